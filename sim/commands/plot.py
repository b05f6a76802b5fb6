"""``kvsim plot``: charts of a folder of results."""

from pathlib import Path
from typing import Any

from sim.commands.common import say
from sim.errors import ConfigError
from sim.results import make_output_dir
from workloads.errors import did_you_mean, plain, quote


def plot(values: dict[str, Any]) -> int:
    """Draw the folder that *values* name; answer the exit code.

    Raises:
        ConfigError, FileError: what cannot be used, read or drawn.
    """
    from sim.plots.figures import (  # noqa: PLC0415  # a refused flag need not wait for pandas
        FORMATS,
        choose,
        write_charts,
    )
    from sim.plots.results import read_results  # noqa: PLC0415  # as above
    from sim.plots.style import load_style  # noqa: PLC0415  # as above
    from sim.plots.table import EXPECTED  # noqa: PLC0415  # as above

    if not values["folder"]:
        raise ConfigError(f"kvsim plot: {EXPECTED}; got none")
    formats = list(dict.fromkeys(_words(values["format"] or ",".join(FORMATS), "--format")))
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"--format: unknown format {quote(name)}; {did_you_mean(name, FORMATS)}"
            )
    style = load_style(values["style"]) if values["style"] is not None else {}
    columns = _words(values["y"], "--y") if values["y"] is not None else []
    folder = Path(values["folder"])
    results = read_results(folder)
    charts, notes = choose(results, values["x"], columns, values["where"])
    output = make_output_dir(values["output_dir"] or folder)
    files, lacking = write_charts(output, charts, formats, style)
    for note in notes:
        say(f"note: {note}")
    if lacking:
        say(
            f"note: the font has no shape for {quote(''.join(sorted(lacking)))}: "
            "--style FILE with font.family names another"
        )
    say(f"wrote {plain(str(output))}: {', '.join(path.name for path in files)}")
    return 0


def _words(listed: str, where: str) -> list[str]:
    words = [word.strip() for word in listed.split(",")]
    if not all(words):
        raise ConfigError(f"{where}: expected names separated by commas, got {quote(listed)}")
    return words
