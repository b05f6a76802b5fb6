"""Settings as logs hold them: commands, dictionaries and configurations of Python."""

import re
from collections.abc import Iterator
from typing import Any

MAX_VALUE = 200
"""Characters of a value that are kept."""

_COMMAND = re.compile(
    r"\bvllm serve\b|\bvllm\.entrypoints\.|\bsglang\.launch_server\b|\bsglang serve\b"
    r"|\btrtllm-serve\b|\bapi_server(?:\.py)? +--"
)
_FLAGS_ALONE = re.compile(r"\s*(?:[#$>+]\s*|-\s+)?[\"']?--[a-z][\w-]+(?:[= ]|$)")
_LOGGED = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG)\b|\bpid=\d|\]: ")
_FLAG = re.compile(
    r"(?<![\w-])--?(?P<name>[a-zA-Z][\w.-]*)"
    r"(?:(?:=|\s+)(?P<value>\"[^\"]*\"|'[^']*'|(?!-[-a-zA-Z])[^\s\\]+))?"
)
_ENVIRONMENT = re.compile(r"\b((?:VLLM|SGLANG)_[A-Z0-9_]+)=(\S+)")
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
          "q": "quantization", "tp_size": "tensor_parallel_size"}  # fmt: skip
_MODEL = re.compile(r"\b(?:vllm|trtllm-|sglang )\s?serve\s+([^-\s][^\s\\]*)")
_ASSIGNED = re.compile(r"\s*(?:'(\w+)'\s*:|\"(\w+)\"\s*:|(\w+)\s*=)\s*(.*)", re.DOTALL)
_DICTIONARIES = (
    (re.compile(r"non-default args:\s*\{"), True),
    (re.compile(r"\bargs:\s*Namespace\("), False),
    (re.compile(r"\b(?:server_args=)?ServerArgs\("), False),
    (re.compile(r"LLM engine \([^)]*\) with config:\s*"), False),
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def value(text: str) -> Any:
    """Answer *text* as int, float, bool or None where it reads as one, else as it stands."""
    text = text.strip().rstrip(",;")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1][:MAX_VALUE]
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if scaled := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text):
        power = "kmg".index(scaled[2].lower()) + 1
        exact = float(scaled[1]) * (1000 if scaled[2].islower() else 1024) ** power
        return int(exact) if exact.is_integer() else text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text[:MAX_VALUE]


def _top_level(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of ``a=1, b=C(d=2)`` or ``'a': 1, ...``, up to where it closes."""
    depth, start, quote_mark = 0, 0, ""
    for position, letter in enumerate(text):
        if quote_mark:
            quote_mark = "" if letter == quote_mark and text[position - 1] != "\\" else quote_mark
        elif letter in "'\"":
            quote_mark = letter
        elif letter in _CLOSING:
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if depth < 0 or (letter == "," and depth == 0 and not quote_mark):
            if found := _ASSIGNED.match(text[start:position]):
                yield found[1] or found[2] or found[3], found[4]
            start = position + 1
        if depth < 0:
            return
    # What a cut leaves of the last value is not taken, unless it is whole.
    if not quote_mark and depth == 0 and (found := _ASSIGNED.match(text[start:])):
        yield found[1] or found[2] or found[3], found[4]


def stated(text: str) -> tuple[dict[str, Any], bool] | None:
    """Answer the settings that a logged line states, and whether the user gave them."""
    for opening, given in _DICTIONARIES:
        if found := opening.search(text):
            pairs = _top_level(text[found.end() :])
            return {name: value(shown) for name, shown in pairs}, given
    return None


def commanded(text: str) -> dict[str, Any]:
    """Answer the settings of a command, or of a line of flags; {} for a line that is neither.

    Lines of the server's own are no commands, whatever flags they advise.
    """
    is_command = _COMMAND.search(text) is not None
    if _LOGGED.search(text) or not (is_command or _FLAGS_ALONE.match(text)):
        return {}
    settings: dict[str, Any] = {name: value(shown) for name, shown in _ENVIRONMENT.findall(text)}
    if model := _MODEL.search(text):
        settings["model"] = model[1]
    for found in _FLAG.finditer(text):
        name, shown = found["name"].replace("-", "_"), found["value"]
        if len(name) < 2 and name != "q":
            continue
        if not found[0].startswith("--") and name not in _SHORT:
            continue
        name = _SHORT.get(name, name)
        if shown is not None and shown.isupper() and shown.lower() == name:
            continue  # a list of flags: --max-model-len MAX_MODEL_LEN
        settings["model" if name == "model_path" else name] = (
            True if shown is None else value(shown)
        )
    return settings
