"""The one error of this package, and the "did you mean" that every refusal of a name uses."""

import difflib
from collections.abc import Iterable


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line naming file, line and field."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Answer what the user may have meant by *word*: the nearest of *choices*, then all of them.

    Case does not matter to the comparison; the choices are shown as they are spelt.
    """
    spelt = {choice.lower(): choice for choice in sorted(choices)}
    nearest = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=0.5)
    hint = f"did you mean {spelt[nearest[0]]!r}? " if nearest else ""
    return f"{hint}choices: {', '.join(spelt.values())}"
