"""What can go wrong with what the user asks for; every message is one line.

ConfigError
 ├─ CapacityError
 ├─ FileError
 └─ TimingRangeError
"""


class ConfigError(ValueError):
    """A setting that cannot be used: which, its value, what was expected, the nearest choice."""


class CapacityError(ConfigError):
    """Settings that are valid and do not fit the memory there is; the message has both numbers."""


class FileError(ConfigError):
    """A folder, file or port that cannot be used: which, and why."""


class TimingRangeError(ConfigError):
    """A step that no measurement covers: its size, the range that was measured, and what helps."""


class EngineStuckError(RuntimeError):
    """Requests wait, none runs, none can be admitted: an allocator breaks its contract."""
