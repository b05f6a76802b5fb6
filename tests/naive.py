"""A naive model of vLLM 0.33.0's rules: one token list a request, one free list, no shortcuts.

It shares no code with `sim` and knows none of its structures: prompts are expanded to tokens, a
block is named by the tuple of all tokens up to its end, the free list is a list of block ids, and
every step walks every request. Slow, and short enough to be read beside the rules it follows.

Asynchronous scheduling is told as vLLM tells it: a queue of two steps, placeholders for tokens that
are not known yet, and token lists that grow only when a step's output is taken in.

Static batching, which vLLM does not have, is told from its definition: a list of members, settled
when the batch opens, and a list of those who are done.
"""

from dataclasses import dataclass, field

Token = tuple[object, int]


@dataclass(eq=False)
class NaiveRequest:
    name: str
    arrival: int
    prompt: list[Token]
    num_outputs: int
    tokens: list[Token] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    outputs: int = 0
    placeholders: int = 0
    cached: int = -1
    preemptions: int = 0
    steps: list[int] = field(default_factory=list)
    """First scheduled, first token, finished."""
    times: list[int] = field(default_factory=list)
    """First token, finished."""


@dataclass
class NaiveConfig:
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    budget: int
    caching: bool
    chunked: bool
    gate: bool
    watermark: float
    threshold: int
    base: int
    per_token: int
    per_context: int
    asynchronous: bool = False
    static: bool = False


@dataclass
class NaiveStep:
    time: int
    running: int
    waiting: int
    used: int
    scheduled: list[tuple[str, int]]
    preempted: list[str]
    admitted: list[str]
    resumed: list[str]
    finished: list[str]
    cache: tuple[int, int, int, int]
    tables: dict[str, list[int]]


class NaivePool:
    """vLLM's block pool: `v1/core/block_pool.py`."""

    def __init__(self, config: NaiveConfig) -> None:
        self.config = config
        self.free = list(range(1, config.num_blocks))
        self.references = [0] * config.num_blocks
        self.name_of: dict[int, tuple[Token, ...]] = {}
        self.cached: dict[tuple[Token, ...], list[int]] = {}

    def hit(self, request: NaiveRequest) -> list[int]:
        size, blocks = self.config.block_size, list[int]()
        if not self.config.caching:
            return blocks
        for end in range(size, len(request.tokens), size):
            name = tuple(request.tokens[:end])
            if name not in self.cached:
                break
            blocks.append(self.cached[name][0])
        return blocks

    def allocate(
        self, request: NaiveRequest, n: int, hit: list[int], *, admission: bool, others: bool
    ) -> bool:
        config = self.config
        size = config.block_size
        spare = int(config.watermark * config.num_blocks) if admission and others else 0
        unheld = sum(not self.references[block] for block in hit)
        reach = min(request.computed + len(hit) * size + n, config.max_model_len)
        if admission and config.gate:
            whole = min(len(request.tokens), config.max_model_len)
            if -(-whole // size) - len(hit) + unheld + spare > len(self.free):
                return False
        new = max(-(-reach // size) - len(request.blocks) - len(hit), 0)
        if new + unheld + spare > len(self.free):
            return False
        for block in hit:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
        request.blocks += hit
        for _ in range(new):
            block = self.free.pop(0)
            if block in self.name_of:
                name = self.name_of.pop(block)
                self.cached[name].remove(block)
                if not self.cached[name]:
                    del self.cached[name]
            self.references[block] = 1
            request.blocks.append(block)
        self.cache(request, min(reach, len(request.tokens)))
        return True

    def cache(self, request: NaiveRequest, num_tokens: int) -> None:
        if not self.config.caching:
            return
        size = self.config.block_size
        for position in range(num_tokens // size):
            block = request.blocks[position]
            if block not in self.name_of:
                name = tuple(request.tokens[: (position + 1) * size])
                self.name_of[block] = name
                self.cached.setdefault(name, []).append(block)

    def release(self, request: NaiveRequest) -> None:
        unhashed: list[int] = []
        hashed: list[int] = []
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if not self.references[block]:
                (hashed if block in self.name_of else unhashed).append(block)
        self.free = unhashed + self.free + hashed
        request.blocks = []


class Naive:
    """The scheduler, the engine and their clock: ``v1/core/sched/scheduler.py``.

    The loop is ``step_with_batch_queue`` of ``v1/engine/core.py``; synchronous is a queue of one.
    """

    def __init__(self, config: NaiveConfig, requests: list[NaiveRequest]) -> None:
        self.config = config
        self.pool = NaivePool(config)
        self.requests = [r for r in requests if len(r.prompt) < config.max_model_len]
        self.coming = list(self.requests)
        for request in self.requests:
            request.tokens = list(request.prompt)
            room = config.max_model_len - len(request.prompt)
            request.num_outputs = min(request.num_outputs, room)
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.steps: list[NaiveStep] = []
        self.members: list[NaiveRequest] = []
        self.done: list[NaiveRequest] = []

    def run(self) -> list[NaiveStep]:
        now = gpu_is_free = 0
        queue: list[tuple[list[NaiveRequest], int]] = []
        while self.coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, self.coming[0].arrival)
            while self.coming and self.coming[0].arrival <= now:
                self.waiting.append(self.coming.pop(0))
            start = max(now, gpu_is_free)
            samples, duration = self.schedule(start)
            gpu_is_free = start + duration
            queue.append((samples, gpu_is_free))
            if self.steps[-1].scheduled and len(queue) < 1 + self.config.asynchronous:
                continue
            samples, end = queue.pop(0)
            now = max(now, end)
            self.update(samples, now)
        return self.steps

    def schedule(self, start: int) -> tuple[list[NaiveRequest], int]:
        config, pool = self.config, self.pool
        self.members = self.members if self.running else self.waiting[: config.max_num_seqs]
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if alone else config.threshold
        budget = config.budget
        scheduled: list[tuple[NaiveRequest, int]] = []
        preempted: list[NaiveRequest] = []
        position = 0
        while position < len(self.running) and budget:
            request = self.running[position]
            known = request.computed + 2 - request.placeholders
            ends = request.placeholders and known >= len(request.prompt) + request.num_outputs
            if ends or request in self.done:
                position += 1
                continue
            n = len(request.tokens) + request.placeholders - request.computed
            n = min(n, budget, threshold or n, config.max_model_len - 1 - request.computed)
            while not pool.allocate(request, n, [], admission=False, others=True):
                if holders := [done for done in self.done if done in self.running]:
                    position -= self.running.index(holders[0]) < position
                    self.running.remove(holders[0])
                    pool.release(holders[0])
                    continue
                self.members = []
                victim = self.running.pop()
                pool.release(victim)
                victim.computed = 0
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                scheduled.append((request, n))
                budget -= n
                position += 1
                continue
            break
        admitted: list[str] = []
        resumed: list[str] = []
        cache = [0, 0, 0, 0]
        passed: list[NaiveRequest] = []
        while not preempted and budget and self.seats_for_head():
            request = self.waiting[0]
            if request.placeholders:
                passed.append(self.waiting.pop(0))
                continue
            hit = pool.hit(request)
            num_hit = len(hit) * config.block_size
            n = len(request.tokens) - num_hit
            n = min(n, threshold or n)
            if n > budget and not config.chunked:
                break
            n = min(n, budget)
            others = bool(self.running)
            if not pool.allocate(request, n, hit, admission=True, others=others):
                self.members = []
                break
            self.running.append(self.waiting.pop(0))
            request.computed = num_hit
            again = 2 * bool(request.preemptions)
            if config.caching:
                cache[again] += len(request.tokens)
                cache[again + 1] += num_hit
            (resumed if again else admitted).append(request.name)
            if not again:
                request.cached = num_hit
                request.steps.append(len(self.steps))
            scheduled.append((request, n))
            budget -= n
        self.waiting = passed + self.waiting
        row = NaiveStep(
            time=start,
            running=len(self.running),
            waiting=len(self.waiting),
            used=config.num_blocks - 1 - len(pool.free),
            scheduled=[(request.name, n) for request, n in scheduled],
            preempted=[request.name for request in preempted],
            admitted=admitted,
            resumed=resumed,
            finished=[],
            cache=(cache[0], cache[1], cache[2], cache[3]),
            tables={request.name: list(request.blocks) for request, _ in scheduled},
        )
        self.steps.append(row)
        return self.advance(scheduled)

    def seats_for_head(self) -> bool:
        if not self.waiting or (self.config.static and self.waiting[0] not in self.members):
            return False
        return len(self.running) < self.config.max_num_seqs

    def advance(self, scheduled: list[tuple[NaiveRequest, int]]) -> tuple[list[NaiveRequest], int]:
        config, context = self.config, 0
        samples: list[NaiveRequest] = []
        for request, n in scheduled:
            request.computed += n
            context += request.computed
            if request.computed >= len(request.tokens) + request.placeholders:
                request.placeholders += 1
                samples.append(request)
        if not scheduled:
            return samples, 0
        total = sum(n for _, n in scheduled)
        return samples, config.base + config.per_token * total + config.per_context * context

    def update(self, samples: list[NaiveRequest], now: int) -> None:
        row, number = self.steps[-1], len(self.steps) - 1
        for request in samples:
            request.tokens.append((f"out:{request.name}", request.outputs))
            request.outputs += 1
            request.placeholders -= 1
            if request in self.running:
                self.pool.cache(request, request.computed - request.placeholders)
            if request.outputs == 1:
                request.steps.append(number)
                request.times.append(now)
            if request.outputs == request.num_outputs:
                self.done.append(request)
        if self.config.static and set(self.running) - set(self.done):
            return
        for request in self.done:
            request.steps.append(number)
            request.times.append(now)
            row.finished.append(request.name)
            if request in self.running:
                self.running.remove(request)
                self.pool.release(request)
            elif request in self.waiting:
                self.waiting.remove(request)
        self.done = []
