"""Files that are written whole or not at all."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import ConfigError, FileError
from workloads.errors import plain, quote


def reason(error: OSError | ValueError) -> str:
    """Answer why, in the system's words, without number and file name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def regular(path: Path) -> Path:
    """Answer *path*, which is no pipe and no device: reading one of these may never end.

    Raises:
        OSError, ValueError: it is one, or is not there.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # who reads a folder is told so
        raise OSError("no regular file")
    return path


def read_small(path: Path, max_bytes: int) -> bytes:
    """Answer the content of the regular file *path*.

    Raises:
        OSError, ValueError: it cannot be read, or is longer than *max_bytes*.
    """
    with regular(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"more than {max_bytes:,} bytes")
    return content


def refuse_twice(data: bytes) -> None:
    """Refuse a JSON text in which an object has a key twice.

    Raises:
        msgspec.DecodeError: it has.
    """

    def once(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise msgspec.DecodeError(f"key {quote(name)} is there twice")
            seen.add(name)

    json.loads(data, object_pairs_hook=once)


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Lend an empty file beside *path*, whose name nobody else has; what is there at the end goes.

    Not `tempfile`, whose files are for their owner only.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_output_file(path: Path, suffixes: tuple[str, ...], where: str) -> None:
    """Refuse a *path* that cannot be written to, before work is done; *where* begins the message.

    Raises:
        ConfigError: it ends in none of *suffixes*, if there are any, or is a folder or device.
        FileError: its folder is none, or not writable.
    """
    shown = f"{where} {plain(str(path))}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{shown}: expected a name ending in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigError(f"{shown} is a folder; expected the name of a file")
    if path.exists() and not path.is_file():  # /dev/null would be replaced
        raise ConfigError(f"{shown} is no regular file; expected the name of one")
    try:
        with temporary_file(path):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise FileError(f"{shown}: {reason(error)}; expected a file in a writable folder") from None


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Lend a temporary name beside *path*; what was written there replaces *path* at the end.

    Raises:
        FileError: it cannot be written; an older *path* is as it was.
    """
    try:
        with temporary_file(path) as temporary:
            yield temporary
            temporary.replace(path)
    except OSError as error:
        raise FileError(
            f"{plain(str(path))} cannot be written: {reason(error)}; "
            "expected room and a writable folder"
        ) from error


def encode_json(value: object) -> bytes:
    """Answer *value* as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_json(path: Path, value: object) -> None:
    """Write *value* as indented JSON with a final newline."""
    with atomic(path) as temporary:
        temporary.write_bytes(encode_json(value))
