"""The errors of this package, and how every refusal quotes what the user wrote."""

from collections.abc import Iterable

MAX_QUOTE = 80
"""Most characters of user data in one place of a message."""


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line naming file, line and field."""


class OptionError(TraceError):
    """An option of a format that cannot be used, whatever is in the trace."""


def quote(value: object) -> str:
    """Answer *value* as one printable line of at most `MAX_QUOTE` characters."""
    text = repr(value[:MAX_QUOTE] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 3] + "..."


def plain(text: str) -> str:
    """Answer *text*, a path say, whole and on one line; quoted only where it is not readable."""
    return text if text.isprintable() and text == text.strip() != "" else repr(text)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Answer "did you mean 'x'? " for the one of *choices* nearest to *word*, or nothing."""
    import difflib  # noqa: PLC0415  # only who erred waits for it

    # The comparison takes quadratic time: the start of a long word has to do.
    spelt = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word[:MAX_QUOTE].lower(), spelt, n=1, cutoff=0.5)
    return f"did you mean {quote(spelt[found[0]])}? " if found else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Answer what the user may have meant by *word*: the nearest of *choices*, then all of them.

    Case does not matter to the comparison; the choices are shown as they are spelt.
    """
    choices = sorted(choices)
    return f"{nearest(word, choices)}choices: {', '.join(choices)}"
