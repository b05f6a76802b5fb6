"""Prompts as token ids: they share what they start with, token by token."""

from array import array

from workloads.errors import TraceError
from workloads.prefix import ContentTree, Piece


class TokenTree:
    """The distinct prompts of a trace; see `ContentTree`."""

    def __init__(self) -> None:
        self._tree = ContentTree(8)

    def prompt(self, ids: list[int]) -> list[tuple[Piece, int]]:
        """Answer the segments of a prompt; raise `TraceError` for ids of more than 64 bits."""
        return self._tree.segments(_bytes(ids))

    def output(self, ids: list[int], request_id: str) -> None:
        """Let later prompts that go on with these ids after the last prompt repeat an output."""
        self._tree.add_output(_bytes(ids), request_id)


def _bytes(ids: list[int]) -> bytes:
    try:
        return array("q", ids).tobytes()
    except OverflowError as error:
        raise TraceError("token ids: expected integers of 64 bits") from error
