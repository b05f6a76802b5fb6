"""From the bytes of a log to its messages: colours out, wrapped lines joined, memory bounded."""

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sim.errors import FileError
from sim.files import reason, regular
from workloads.errors import plain

MAX_LINE = 1 << 16
"""Characters of a line that are kept; what follows is skipped."""

MAX_JOINED = 12
"""Lines that a wrapped message may have."""

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),  # what PowerShell writes
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}

_ESCAPES = re.compile(
    r"(?:\x1b|\\x1b|\\u001b|\\033|#033|\^\[|\u241b)\[[0-9;?]*[A-Za-z]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # links and titles
    r"|\[\d[\d;]{0,12}m"  # colours that lost their escape character
)
_BARE_COLOUR = re.compile(r"\[\d[\d;]{0,12}m")
_FRAME = "\u2502\u2503\u2551\u00a6 \t"
_RECORD = re.compile(
    r"""[>\s"']*(?:\d+[:-])?\s*(?:
      \([\w-]+[^()]{0,60}\bpid=\d          # (EngineCore_DP0 pid=1), (Worker_TP0 rank=0 pid=1)
    | [\[(]?\d{4}-\d\d-\d\d | [\[(]?\d\d[:/-]\d\d[:/ -]\d\d
    | [A-Z][a-z]{2}\ +\d+\ \d\d:\d\d:      # syslog
    | \[?(?:INFO|WARN|WARNING|ERROR|DEBUG|CRITICAL|FATAL|TRACE)\b
    | \[[A-Za-z][\w/. -]*(?::\d+)?\]       # [TensorRT-LLM], [file.py:1], [pod/x/y]
    | [IWEF]\d{4}\ \d\d: | \{" | [#$+]\ | --\w
    | [\w.-]+\ +\|\ | [\w.-]+\.py:\d+
    )""",
    re.VERBOSE,
)
_OPENING = re.compile(
    r"\s*(?:Available KV|GPU KV|Maximum conc|#? ?(?:GPU|cuda|CPU) blocks|Model loading|Loading "
    r"|Memory |the current vLLM|model weights take|Traceback|Avg "
    r"|(?:[\w.]*\.)?[A-Z]\w+(?:Error|Exception)\b"
    r"|Engine \d|Initial|Free memory|Estimated|Graph |Capturing|Process |File \"|Load weight"
    r"|KV Cache is|vllm serve|python|total_gpu_memory|non_torch|PyTorch act|available_kv"
    r"|gpu_memory_util|\S+=\S+ vllm)"
)
_ENDED = re.compile(r"(?:[.)\]%]|\dx|GiB|GB|tokens|seconds|\d s)\s*$")


class Message(NamedTuple):
    """A message, of one line or of several that a terminal wrapped.

    Attributes:
        text: without colours and breaks.
        starts: of each of its lines: where in the text it begins, and its number.
    """

    text: str
    starts: list[tuple[int, int]]

    def line(self, position: int) -> int:
        """Answer the number of the line that holds *position* of the text."""
        return next(number for start, number in reversed(self.starts) if start <= position)


def read_lines(path: str | Path, where: str) -> Iterator[tuple[int, str]]:
    r"""Yield the lines of a file with their numbers; those split by "\r" have one number.

    Bytes that are no text become U+FFFD. *where* begins a message.

    Raises:
        FileError: it cannot be read, or is compressed.
    """
    shown = f"{where} {plain(str(path))}"
    try:
        with regular(Path(path)).open("rb") as file:
            head = file.read(8)
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise FileError(f"{shown} is compressed ({name}): expected text; unpack it first")
        encoding = next((name for bom, name in _BOMS if head.startswith(bom)), "utf-8")
        with Path(path).open(encoding=encoding, errors="replace", newline="\n") as text:
            number = 0
            while line := text.readline(MAX_LINE):
                number += 1
                kept = line
                while not line.endswith("\n") and (line := text.readline(MAX_LINE)):
                    pass
                for part in kept.rstrip("\r\n").split("\r"):
                    yield number, part
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{shown} cannot be read: {reason(error)}; expected a log") from error


def clean(line: str) -> str:
    """Answer *line* without colours, frames and trailing blanks."""
    # The quick looks first: most lines have no colours.
    if "\x1b" in line or "x1b" in line or "033[" in line or _BARE_COLOUR.search(line):
        line = _ESCAPES.sub("", line)
    return line.strip(_FRAME) if line[:1] in _FRAME else line.rstrip(_FRAME)


def messages(lines: Iterable[tuple[int, str]]) -> Iterator[Message]:
    """Yield the messages of numbered *lines*.

    A line that begins like no record goes on with the one before, if that began like one, or ended
    within a sentence.
    """
    held: list[tuple[int, str]] = []
    prefixed = False
    for number, raw in lines:
        line = clean(raw[:MAX_LINE])
        if not line:
            continue
        starts_record = _RECORD.match(line) is not None
        if held and not starts_record and len(held) < MAX_JOINED:
            open_ended = prefixed or not _ENDED.search(held[-1][1])
            if open_ended and not _OPENING.match(line):
                held.append((number, line))
                continue
        if held:
            yield _join(held)
        held = [(number, line)]
        prefixed = starts_record
    if held:
        yield _join(held)


def _join(held: list[tuple[int, str]]) -> Message:
    if len(held) == 1:
        return Message(held[0][1], [(0, held[0][0])])
    starts, text = [], ""
    for number, line in held:
        starts.append((len(text), number))
        text += line
    return Message(text, starts)


def ends_open(message: Message) -> bool:
    """Answer whether a log that ends with *message* was cut within it."""
    return not _ENDED.search(message.text)
