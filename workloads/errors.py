"""The one error of this package, and the "did you mean" that every refusal of a name uses."""

import difflib
from collections.abc import Iterable


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line naming file, line and field."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Answer what the user may have meant by *word*: the nearest of *choices*, then all of them."""
    choices = sorted(choices)
    nearest = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}choices: {', '.join(choices)}"
