"""The error of a setting that cannot be used."""


class ConfigError(ValueError):
    """A setting that cannot be used.

    The message is one line naming the flag, the value, what was expected and the nearest choice.
    """
