"""Prefix identity: equal numbers for equal token sequences, and nothing else.

`PrefixNodes` numbers segments (`workloads.record`), `ContentTree` finds segments where a trace has
the tokens or the text themselves. Neither hashes tokens: what is called equal was compared.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Content = Hashable
"""What a segment holds, by any name; None is content that no other prompt has."""


class PrefixNodes:
    """Numbers every distinct (prefix, content).

    The key of a node is (node before it, tokens of that node before it, content id). What nobody
    can share (content None, an output that no prompt repeats) takes a number and no key.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, Content], int] = {}
        self._next = 1
        self.repeats: list[tuple[int, int, str, int]] = []
        """Nodes whose content is the output of a request, by its name: node before, tokens of that
        before it, request id, node."""

    def new(self, count: int = 1) -> int:
        """Answer the first of *count* numbers that nothing had."""
        first = self._next
        self._next += count
        return first

    def walk(
        self, prompts: Iterable[Sequence[tuple[Content, int]]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Answer how many segments each of *prompts* has, and of all segments node and end.

        The end of a segment is the tokens of its prompt up to and including it.
        """
        get, numbers = self._numbers.get, self._numbers
        following = self._next
        counts: list[int] = []
        nodes: list[int] = []
        ends: list[int] = []
        for segments in prompts:
            node = length_before = end = 0
            for content, length in segments:
                if content is None:
                    node = following
                    following += 1
                else:
                    key = (node, length_before, content)
                    known = get(key)
                    if known is None:
                        known = numbers[key] = following
                        following += 1
                        if isinstance(content, str) and content.startswith("out:"):
                            self.repeats.append((node, length_before, content[4:], known))
                    node = known
                length_before = length
                end += length
                nodes.append(node)
                ends.append(end)
            counts.append(len(segments))
        self._next = following
        return counts, nodes, ends


def shareable_tokens(
    num_prompt_tokens: IntArray,
    num_output_tokens: IntArray,
    segment_offsets: IntArray,
    segment_nodes: IntArray,
    segment_ends: IntArray,
    output_nodes: IntArray,
) -> IntArray:
    """Answer the leading tokens of prompt and output that some other request has too.

    int64 [num_requests]; the arrays are those of `workloads.record.Trace`. Of a node, the request
    that has most of it shares what the one with second most has.
    """
    first = segment_offsets[:-1]
    lengths = np.diff(segment_ends, prepend=0)
    lengths[first] = segment_ends[first]
    second = _second_most(
        np.concatenate([segment_nodes, output_nodes]), np.concatenate([lengths, num_output_tokens])
    )
    in_segment = np.minimum(lengths, second[segment_nodes])
    # A private segment shares nothing, and neither does what follows it: the last that shares any
    # decides, and all before it are shared whole.
    num_shared = np.add.reduceat((in_segment > 0).astype(np.int64), first)
    last = first + np.maximum(num_shared, 1) - 1
    in_prompt = np.where(num_shared > 0, segment_ends[last] - lengths[last] + in_segment[last], 0)
    in_output = np.minimum(num_output_tokens, second[output_nodes])
    return np.where(in_output > 0, num_prompt_tokens + in_output, in_prompt)


def _second_most(nodes: IntArray, lengths: IntArray) -> IntArray:
    """Answer, by node, the second largest of its *lengths*; 0 where it has one only."""
    uses = np.bincount(nodes)
    shared = np.flatnonzero(uses[nodes] > 1)
    order = shared[np.lexsort((lengths[shared], nodes[shared]))]
    ends = np.cumsum(uses[uses > 1]) - 1  # the largest of each node
    second = np.zeros(len(uses), dtype=np.int64)
    second[nodes[order[ends]]] = lengths[order[ends - 1]]
    return second


Piece = str | tuple[str, int]

_MAX_OUTPUTS = 64


class ContentTree:
    """The distinct prompts of a trace, as a tree of pieces, to find what a new one starts with.

    Prompts are bytes, *width* of them a token, and pieces end where two prompts part. What two
    prompts have in common at their start is held once; the tree goes with its reader.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._pieces: list[bytes] = [b""]
        self._names: list[Piece] = [("tree", 0)]
        self._children: dict[tuple[int, int, bytes], int] = {}
        self._outputs: dict[tuple[int, int, bytes], list[int]] = {}
        self._end = (0, 0)

    def _add(self, piece: bytes, name: Piece) -> int:
        self._pieces.append(piece)
        self._names.append(name)
        return len(self._pieces) - 1

    def segments(self, prompt: bytes) -> list[tuple[Piece, int]]:
        """Answer the segments (name, tokens) of *prompt*, whose length is a multiple of width.

        What is new is added to the tree.
        """
        width, pieces = self.width, self._pieces
        node = tokens = position = 0
        found: list[tuple[Piece, int]] = []
        while position < len(prompt):
            key = (node, tokens, prompt[position : position + width])
            children = [*self._outputs.get(key, ())]
            if key in self._children:
                children.append(self._children[key])
            if not children:
                self._children[key] = len(pieces)
                children.append(self._add(prompt[position:], ("tree", len(pieces))))
            common = [_common(pieces[child], prompt, position) for child in children]
            tokens = max(common) // width
            node = children[common.index(max(common))]
            position += tokens * width
            found.append((self._names[node], tokens))
        self._end = (node, tokens)
        return found

    def add_output(self, output: bytes, request_id: str) -> None:
        """Let later prompts that go on with *output* after the last prompt repeat that output.

        Outputs of equal prompts that start alike are told apart from their start on: a later prompt
        repeats the one that it has most of. Of very many, the first ones.
        """
        outputs = self._outputs.setdefault((*self._end, output[: self.width]), [])
        if output and len(outputs) < _MAX_OUTPUTS:
            outputs.append(self._add(output, f"out:{request_id}"))


def _common(piece: bytes, prompt: bytes, position: int) -> int:
    """Answer how many bytes of *piece* are those of *prompt* from *position* on."""
    if prompt.startswith(piece, position):
        return len(piece)
    low, high = 0, min(len(piece), len(prompt) - position)
    while high - low > 1:  # piece[:low] agrees; a difference or the end is before high
        middle = (low + high) // 2
        if piece[low:middle] == prompt[position + low : position + middle]:
            low = middle
        else:
            high = middle
    if high > low and piece[low:high] == prompt[position + low : position + high]:
        low = high
    return low
