"""The entry of the command line. The only file that decides exit codes.

0, or 2 for wrong usage, 1 for what cannot be done, 130 when interrupted. It imports next to
nothing, so that an interruption finds it ready, even one that comes during the other imports.
"""

import gc
import os
import signal
import sys
from contextlib import suppress

from sim.errors import CapacityError, ConfigError, FileError, TimingRangeError
from workloads.errors import OptionError, TraceError


def console() -> int:
    """Be the process of ``kvsim``; answer its exit code."""
    # Imports make tens of thousands of objects that stay, and a run hardly any garbage: looking for
    # it took a tenth of a short run, half of that at its end.
    gc.set_threshold(50_000)
    code = main()
    gc.freeze()
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; answer the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stderr is None:  # closed: what is said goes nowhere, and no file gets its number
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    with suppress(ValueError):  # not in the main thread, which alone may do this
        # As an interruption: temporary files go, and what is whole stays.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from sim.flags import execute  # noqa: PLC0415  # see the module's docstring

        return execute(arguments)
    except BrokenPipeError:  # whoever read the output, like head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConfigError, TraceError, OSError) as error:
        code, message = _refusal(error)
        _say(f"kvsim: {' '.join(message.splitlines())}")
        return code
    except MemoryError as error:
        _say(f"kvsim: out of memory: {error}: shorten the trace or its outputs")
        return 1
    except KeyboardInterrupt:
        after = "\n" if sys.stderr.isatty() else ""  # the ^C that a terminal shows
        _say(f"{after}kvsim: interrupted")
        return 130


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _refusal(error: Exception) -> tuple[int, str]:
    """Answer exit code and message: 2 for wrong usage, 1 for what cannot be done."""
    if isinstance(error, OSError):
        return 1, f"{error.filename or 'standard output'}: {error.strerror or error}"
    cannot = CapacityError | FileError | TimingRangeError
    if isinstance(error, ConfigError | OptionError) and not isinstance(error, cannot):
        return 2, str(error)
    return 1, str(error)
