"""From the messages of a log to what each start of an engine said."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sim.errors import ConfigError
from sim.server_log import wording
from sim.server_log.lines import Message, ends_open, messages, read_lines
from sim.server_log.records import (
    FIGURES,
    Refusal,
    RefusalKind,
    Said,
    ServerLog,
    Startup,
    Statistics,
    Word,
)
from sim.server_log.settings_text import commanded, stated
from workloads.errors import plain

MAX_FIGURES = 1024
"""Of one kind and start: more than any engine has workers."""

MAX_STARTUPS = 64
MAX_REFUSALS = 32
MAX_STATISTICS = 4096
"""Lines of statistics kept of a start; of more, every second, then fourth, and so on."""

_PREFIX = re.compile(r"\((\w[\w-]*)(?: rank=(\d+))? pid=(\d+)(?:, ip=([\d.a-fA-F:]+))?\)")
_SGLANG_RANK = re.compile(r"\[[^\]]*?\b((?:DP\d+ )?(?:TP\d+)?(?: ?[PE]P\d+)*)\]")
_DATA_PARALLEL = re.compile(r"DP(\d+)")
_STAGE = re.compile(r"\[Stage-(\d+)\]")
_SERVER = re.compile(r"([A-Za-z][\w.-]*?) +\| |\[(pod/[\w./-]+)\] ")
_CLOCK = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T:](\d\d):(\d\d):(\d\d)")
_ENGINE_NUMBER = re.compile(r"\bEngine (\d+):")


class _Source:
    """Who wrote a message: of which server, engine, stage and worker."""

    def __init__(self, text: str) -> None:
        server = _SERVER.match(text)
        self.server = (server[1] or server[2]) if server else ""
        head = text[:400]
        names = _PREFIX.findall(head)
        rank = _SGLANG_RANK.search(head[:80])
        stage = _STAGE.search(head)
        tags = " ".join(name for name, *_ in names) or (rank[1] if rank else "")
        found = _DATA_PARALLEL.search(tags)
        self.engine = (found[1].lstrip("0") or "0") if found else "0"
        if stage:
            self.engine += f" stage {stage[1]}"
        self.worker = rank[1] if rank else ""
        for name, number, pid, address in names:
            if "Worker" in name:
                # Old workers share a name; a newer one has its rank in it.
                named = bool(re.search(r"\d", name))
                label = f" rank={number}" if number else f" pid={pid}"
                host = f" ip={address}" if address else ""
                self.worker = name if named else f"{name}{label}{host}"


class _Reader:
    """The state while a log is read: what start each engine is at."""

    def __init__(self) -> None:
        self.startups: list[Startup] = []
        self.forgotten = 0
        self._current: dict[tuple[str, str], Startup] = {}
        self._sized: set[int] = set()
        self._strides: dict[int, list[int]] = {}

    def read(self, message: Message) -> None:
        """Take what *message* says."""
        text = message.text
        source = _Source(text)
        if self._read_statistics(message, source):
            return
        self._read_words(message, source)
        refusal = _refusal(message, source.worker)
        if refusal is not None:
            self._refuse(refusal, source)
            return
        for known in wording.WORDINGS:
            for found in known.pattern.finditer(text):
                self._take(known, found, message, source)

    def _startup(self, source: _Source, anew: bool = False) -> Startup:
        """Answer the start that *source* is at; *anew* begins another, of its whole server."""
        key = (source.server, source.engine)
        now = self._current.get(key)
        if now is not None and not anew:
            return now
        named = " ".join(part for part in (source.server, _engine_name(source.engine)) if part)
        fresh = Startup(name=named)
        parent = now or self._current.get((source.server, "0"))
        if parent is not None:
            for name in ("engine", "version", "model", "gpu", "platform"):
                setattr(fresh, name, getattr(parent, name))
            fresh.settings, fresh.config = dict(parent.settings), dict(parent.config)
        self._current[key] = fresh
        self.startups.append(fresh)
        self._strides[id(fresh)] = [0, 1]
        if len(self.startups) > MAX_STARTUPS:
            gone = self.startups.pop(0)
            self._sized.discard(id(gone))
            self._strides.pop(id(gone), None)
            self.forgotten += 1
        return fresh

    def _begin(self, source: _Source) -> Startup:
        """Answer the start that settings given now are of: another, if this one has its pool."""
        startup = self._startup(source)
        if id(startup) not in self._sized:
            return startup
        fresh = self._startup(source, anew=True)
        fresh.version = fresh.model = None
        fresh.settings, fresh.config = {}, {}
        for key in [k for k in self._current if k[0] == source.server]:
            if self._current[key] is not fresh:
                del self._current[key]
        return fresh

    def _take(
        self, known: wording.Wording, found: re.Match[str], message: Message, source: _Source
    ) -> None:
        startup = self._startup(source)
        line = message.line(found.start())
        figures = {n: t for n, t in found.groupdict().items() if t is not None and n in FIGURES}
        if not known.late and id(startup) in self._sized:
            said = [old.worker for name in figures for old in getattr(startup, name)]
            if source.worker in said:
                startup = self._startup(source, anew=True)
        if known.pool:
            self._sized.add(id(startup))
            startup = self._of_length(startup, figures.get("request_tokens"), source)
        if "max_model_len" in found.groupdict():
            length = int(wording.number(found["max_model_len"]))
            startup.config.setdefault("max_model_len", Word(length, line))
        for name, text in figures.items():
            unit = text.lstrip("-0123456789,_.'\u2009\u00a0\u202f ")
            said_now = Said(wording.number(text), line, source.worker, unit)
            kept: list[Said] = getattr(startup, name)
            if len(kept) < MAX_FIGURES and not (known.late and said_now[::2] in _seen(kept)):
                kept.append(said_now)

    def _of_length(self, startup: Startup, length: str | None, source: _Source) -> Startup:
        """Answer the start that a line on requests of *length* tokens is of.

        One start has one longest request: another is of another start, as is the pool before it.
        """
        known = [said.value for said in startup.request_tokens]
        if length is None or not known or wording.number(length) in known:
            return startup
        fresh = self._startup(source, anew=True)
        self._sized.add(id(fresh))
        last = startup.request_tokens[-1].line
        for name in ("tokens", "gpu_blocks", "cpu_blocks", "kv_gib"):
            kept: list[Said] = getattr(startup, name)
            setattr(fresh, name, [said for said in kept if said.line > last])
            kept[:] = [said for said in kept if said.line <= last]
        return fresh

    def _refuse(self, refusal: Refusal, source: _Source) -> None:
        startup = self._startup(source)
        if refusal.kind == "other" and id(startup) in self._sized:
            return  # what follows from the first, or a request that was refused later
        self._sized.add(id(startup))
        known = [old.figures for old in startup.refusals]
        if refusal.figures not in known and len(known) < MAX_REFUSALS:
            startup.refusals.append(refusal)

    def _read_words(self, message: Message, source: _Source) -> None:
        """Take engine, version, model, card and settings."""
        text = message.text
        given = commanded(text)
        engine_says = stated(text)
        if given or engine_says:
            startup = self._begin(source)
            values, of_user = engine_says or (given, True)
            target = startup.settings if of_user else startup.config
            line = message.line(0)
            for name, value in values.items():
                # A command goes before what the server repeats of it.
                target.setdefault(name, Word(value, line))
            model = values.get("model") or values.get("model_tag") or values.get("model_path")
            if isinstance(model, str) and startup.model is None:
                startup.model = Word(model, line)
        for engine, marks in wording.ENGINES:
            if marks.search(text):
                startup = self._startup(source)
                if startup.engine == "unknown":
                    startup.engine = engine
                break
        for field, patterns in (
            ("version", wording.VERSIONS),
            ("model", wording.MODELS),
            ("gpu", wording.GPUS),
            ("platform", (wording.PLATFORM,)),
            ("preemption", (wording.PREEMPTION,)),
        ):
            for words in patterns:
                if found := words.search(text):
                    startup = self._startup(source)
                    if getattr(startup, field) is None:
                        word = Word(found[1].strip(), message.line(found.start()))
                        setattr(startup, field, word)
        self._read_bounds(message, source)

    def _read_bounds(self, message: Message, source: _Source) -> None:
        """Take what the wording tells of the version; the narrowest bound comes first."""
        text = message.text
        for bound, (words, meaning) in enumerate(wording.BOUNDS):
            if found := words.search(text):
                startup = self._startup(source)
                old = startup.wording
                if old is None or bound < _bound_rank(old):
                    startup.wording = Word(meaning, message.line(found.start()))
                break

    def _read_statistics(self, message: Message, source: _Source) -> bool:
        """Take a line of statistics; answer whether it is one."""
        text = message.text
        parts = wording.STATISTICS_PARTS
        scale = 1.0
        found = wording.STATISTICS.search(text)
        if found is None:
            found, scale, parts = (
                wording.SGLANG_STATISTICS.search(text),
                100.0,
                wording.SGLANG_PARTS,
            )
        if found is None:
            return False
        named = _ENGINE_NUMBER.search(text)
        source.engine = (named[1].lstrip("0") or "0") if named else source.engine
        startup = self._startup(source)
        if startup.engine == "unknown":
            startup.engine = "vllm" if scale == 1.0 else "sglang"
        if ", Swapped:" in text and startup.wording is None:
            startup.wording = Word("V0", message.line(0))
        self._sized.add(id(startup))
        seen = self._strides[id(startup)]
        seen[0] += 1
        if (seen[0] - 1) % seen[1]:
            return True
        values = {
            name: wording.number(part["x"]) if (part := words.search(text)) else None
            for name, words in parts.items()
        }
        waiting, swapped = values.get("waiting"), values.get("swapped")
        preempted = values.get("preempted")
        startup.statistics.append(
            Statistics(
                line=message.line(found.start()),
                engine=named[1] if named else "",
                clock_s=_clock(text),
                running=int(wording.number(found["running"])),
                waiting=None if waiting is None else int(waiting),
                swapped=None if swapped is None else int(swapped),
                kv_usage_pct=wording.number(found["usage"]) * scale,
                hit_rate_pct=values.get("hit"),
                prompt_tokens_per_s=values.get("prompt"),
                generation_tokens_per_s=values.get("generation"),
                preempted=None if preempted is None else int(preempted),
            )
        )
        if len(startup.statistics) > MAX_STATISTICS:
            startup.statistics[:] = startup.statistics[::2]
            seen[1] *= 2
        return True


def _seen(kept: list[Said]) -> list[tuple[Any, ...]]:
    return [old[::2] for old in kept]


def _bound_rank(word: Word) -> int:
    return [meaning for _, meaning in wording.BOUNDS].index(word.value)


def _engine_name(engine: str) -> str:
    number, _, stage = engine.partition(" ")
    return " ".join(part for part in ("" if number == "0" else f"DP{number}", stage) if part)


def _clock(text: str) -> int | None:
    """Answer seconds of the timestamp in *text*; of two, only the difference within a month."""
    found = _CLOCK.search(text[:200])
    if found is None:
        return None
    month, day, hours, minutes, seconds = (int(part) for part in found.groups()[1:])
    return (((month * 31 + day) * 24 + hours) * 60 + minutes) * 60 + seconds


def _refusal(message: Message, worker: str) -> Refusal | None:
    """Answer the refusal in *message*, if there is one."""
    text = message.text
    for name, words in wording.REFUSALS.items():
        if found := words.search(text):
            parts = {n: wording.number(t) for n, t in found.groupdict().items() if t is not None}
            kind: RefusalKind = "max_model_len" if name == "pool_tokens" else name
            return Refusal(
                kind,
                message.line(found.start()),
                worker,
                text[found.start() :][:300],
                needed_gib=parts.get("needed"),
                available_gib=parts.get("available"),
                total_gib=parts.get("total"),
                utilization=parts.get("utilization"),
                max_model_len=_whole(parts.get("length")),
                estimated_max_model_len=_whole(parts.get("estimate")),
                pool_tokens=_whole(parts.get("pool")),
            )
    if found := wording.OTHER_REFUSAL.search(text):
        return Refusal("other", message.line(found.start()), worker, found[1].strip())
    return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def parse_server_log(lines: Iterable[tuple[int, str]], shown: str = "the log") -> ServerLog:
    """Answer what numbered *lines* say; *shown* begins a message.

    Holds a bounded part of them at a time.

    Raises:
        ConfigError: no line is of a server, or there is none.
    """
    reader = _Reader()
    count = 0

    def counted() -> Iterable[tuple[int, str]]:
        nonlocal count
        for number, line in lines:
            count = number
            yield number, line

    last: Message | None = None
    for message in messages(counted()):
        last = message
        if wording.INTERESTING.search(message.text):
            reader.read(message)
    startups = [startup for startup in reader.startups if _tells(startup)]
    if not startups:
        what = "is empty" if count == 0 else f"has {count:,} lines, none of a server"
        raise ConfigError(
            f"{shown} {what}: expected the start-up log of a vLLM server, with a line like "
            "'GPU KV cache size: 123,456 tokens'"
        )
    told = [startup for startup in startups if _tells_memory(startup)] or startups[-1:]
    cut = last.starts[-1][1] if last is not None and _was_cut(last) else None
    return ServerLog(told, count, reader.forgotten, cut)


def _was_cut(last: Message) -> bool:
    return bool(wording.INTERESTING.search(last.text)) and ends_open(last)


def _tells_memory(startup: Startup) -> bool:
    told = any(getattr(startup, name) for name in FIGURES)
    return told or bool(startup.refusals) or bool(startup.statistics)


def _tells(startup: Startup) -> bool:
    return _tells_memory(startup) or startup.engine != "unknown"


def read_server_log(path: str | Path, where: str = "--from-log") -> ServerLog:
    """Answer what the log at *path* says; *where* begins a message.

    Raises:
        FileError: it cannot be read.
        ConfigError: no line is of a server.
    """
    return parse_server_log(read_lines(path, where), f"{where} {plain(str(path))}")
