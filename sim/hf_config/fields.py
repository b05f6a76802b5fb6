"""A ``config.json`` as fields that are asked for by every name they go by.

Nothing in the file is trusted: its size, its depth and every number that is asked for are bounded.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.errors import ConfigError, FileError
from sim.files import regular
from workloads.errors import plain, quote

MAX_FILE_BYTES = 16 * 2**20
"""No configuration is larger: 100 kB is much."""

MAX_INTEGER = 2**31 - 1
"""No size of a model is larger; products of a few stay exact all the same."""

MAX_HEADS = 100_000
"""Heads that a layer may have: what shares them is looked for among all numbers up to them."""

MAX_LAYERS = 10_000
"""Layers that a configuration may have: work grows with them."""

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config",
          "decoder_config", "llm", "text_model_config")  # fmt: skip
"""Where the language model of a model with several parts is."""

MAX_NESTED = 4
"""Levels of `NESTED` that are followed: a thinker's text is two."""


def load_json(path: Path, where: str) -> dict[str, Any]:
    """Answer the object in *path*; *where* begins every message.

    Raises:
        FileError: it cannot be read, is too large, or is no object in JSON.
    """
    try:
        with regular(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(f"{where}: {reason}; expected a config.json of Hugging Face") from None
    if len(raw) > MAX_FILE_BYTES:
        raise FileError(f"{where}: more than {MAX_FILE_BYTES:,} bytes; expected a config.json")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not UTF-8 at byte {error.start}; expected JSON text") from None
    except RecursionError:
        raise FileError(f"{where}: nested too deeply; expected a config.json") from None
    except ValueError as error:
        raise FileError(f"{where}: not JSON: {quote(str(error))}") from None
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise FileError(f"{where}: {kind}; expected an object with the model's fields")
    return value


class Fields:
    """Fields of one language model, by any of their names.

    Attributes:
        where: begins every message: the file.
        notes: what was assumed while reading.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.notes: list[str] = []
        self._values = values

    @classmethod
    def of_language_model(cls, values: Mapping[str, Any], where: str) -> "Fields":
        """Answer the fields of the language model in *values*: what is nested wins over the rest.

        Raises:
            ConfigError: it is nested deeper than any model is.
        """
        merged = dict(values)
        inner = values
        for _ in range(MAX_NESTED):
            name = next((key for key in NESTED if isinstance(inner.get(key), dict)), None)
            if name is None:
                return cls(merged, where)
            inner = inner[name]
            given = {key: value for key, value in inner.items() if value is not None}
            merged = {**merged, **given}
        raise ConfigError(f"{where}: {NESTED[0]} nested more than {MAX_NESTED - 1} deep")

    def sub(self, name: str) -> "Fields | None":
        """Answer the fields in the object *name*; None if there is no such object."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            return None
        fields = Fields(value, f"{self.where}: {name}")
        fields.notes = self.notes
        return fields

    @property
    def is_empty(self) -> bool:
        """Whether there is no field at all."""
        return not self._values

    def error(self, name: str, value: object, expected: str) -> ConfigError:
        """Answer the refusal of *value* in field *name*."""
        return ConfigError(f"{self.where}: {name} {quote(value)}: expected {expected}")

    def note(self, text: str) -> None:
        """Keep what was assumed, once."""
        if text not in self.notes:
            self.notes.append(text)

    def raw(self, *names: str) -> tuple[str, Any]:
        """Answer the first of *names* that is there and not null, and its value; ("", None)."""
        for name in names:
            if self._values.get(name) is not None:
                return name, self._values[name]
        return "", None

    def has(self, *names: str) -> bool:
        """Whether one of *names* is there and not null."""
        return bool(self.raw(*names)[0])

    def integer(self, *names: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        """Answer the first of *names* that has a value, a whole number; None where none has.

        Digits in a string count as a number; false, as in ``"sliding_window": false``, as no value.

        Raises:
            ConfigError: it is no whole number, or out of its bounds.
        """
        for name in names:
            value = self._values.get(name)
            if value is not None and value is not False:
                return self._whole(name, value, least, most)
        return None

    def needed(self, what: str, *names: str) -> int:
        """Answer `integer` of *names*.

        Raises:
            ConfigError: none of them is there: *what* cannot be known; or as `integer`.
        """
        value = self.integer(*names)
        if value is None:
            raise ConfigError(f"{self.where}: {names[0]} is missing: {what} cannot be known")
        return value

    def _whole(self, name: str, value: object, least: int, most: int) -> int:
        expected = f"a whole number of at least {least}"
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,15}", value.strip()):
            value = int(value)
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, expected)
        if value < least:
            raise self.error(name, value, expected)
        if value > most:
            shown = value if value.bit_length() < 200 else "far too large"
            raise self.error(name, shown, f"{expected} and at most {most}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """Answer the first of *names* that is there, which is true or false.

        Raises:
            ConfigError: it is neither.
        """
        name, value = self.raw(*names)
        if not name:
            return default
        if isinstance(value, bool):
            return value
        if value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        raise self.error(name, value, "true or false")

    def word(self, *names: str) -> str:
        """Answer the first of *names* that is there, a string; "" where none is.

        Raises:
            ConfigError: it is no string.
        """
        name, value = self.raw(*names)
        if name and not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value if name else ""

    def integers(
        self,
        name: str,
        *,
        length: int | None = None,
        least: int = 0,
        most: int = MAX_INTEGER,
        holes: bool = False,
    ) -> list[int] | None:
        """Answer the list of whole numbers *name*; None if there is none. *holes*: null is 0.

        Raises:
            ConfigError: it is no list, has another *length*, or something else in it.
        """
        values = self.items(name, length=length)
        if values is None:
            return None
        return [
            0 if holes and value is None else self._whole(f"{name}[{i}]", value, least, most)
            for i, value in enumerate(values)
        ]

    def items(
        self, name: str, *, length: int | None = None, most: int = MAX_LAYERS
    ) -> list[Any] | None:
        """Answer the list *name*; None if there is none.

        Raises:
            ConfigError: it is no list, or has another *length*, or is longer than models are deep.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, value, "a list, one entry a layer")
        if len(value) > most or (length is not None and len(value) < length):
            wanted = f"{length} entries, one a layer" if length else f"at most {most} entries"
            raise ConfigError(f"{self.where}: {name} has {len(value)} entries: expected {wanted}")
        return value if length is None else value[:length]

    def layers(self, name: str, length: int, read: Callable[["Fields"], Any]) -> Iterator[Any]:
        """Answer what *read* makes of each object in the list *name*.

        Raises:
            ConfigError: an entry is no object, or *read* refuses it.
        """
        for i, value in enumerate(self.items(name, length=length) or ()):
            if not isinstance(value, dict):
                raise self.error(f"{name}[{i}]", value, "an object")
            fields = Fields(value, f"{self.where}: {name}[{i}]")
            fields.notes = self.notes
            yield read(fields)


def shown_path(path: Path) -> str:
    """Answer *path* for a message: as it was given, on one line."""
    return plain(str(path))
