"""What the command line accepts, as click's commands; their work is imported when one runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from sim.errors import ConfigError
from sim.flag_params import (
    PLOT,
    PLOT_HELP,
    REPORT,
    SWEEP,
    TABLES,
    TRACE,
    Advise,
    Capacity,
    Check,
    Flagged,
)
from workloads.errors import did_you_mean, quote

if TYPE_CHECKING:
    from collections.abc import Callable


def execute(arguments: list[str]) -> int:
    """Do what *arguments* ask for; answer the exit code.

    Raises:
        ConfigError: wrong usage.
        KeyboardInterrupt: interrupted.
    """
    try:
        return int(_cli().main(arguments, prog_name="kvsim", standalone_mode=False) or 0)
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def _work(module: str, name: str, key: str | None = None) -> "Callable[..., int]":
    """Answer what calls the function *name* of a module of `sim.commands`, or its entry *key*.

    The module is imported when it is called, so that ``--help`` pays for no command.
    """

    def call(**values: Any) -> int:
        found = getattr(import_module(f"sim.commands.{module}"), name)
        return int((found if key is None else found[key])(values))

    return call


def _flagged(
    name: str, doc: str, kind: type[Flagged] = Flagged, function: str | None = None
) -> click.Command:
    """Answer the command *name*, whose flags are settings."""
    work = _work(name, function or name)

    def callback(**values: Any) -> int:
        if extra := click.get_current_context().args:
            raise click.UsageError(
                f"unexpected argument {quote(extra[0])}; a trace is given as --trace FILE, "
                "every other setting by its flag"
            )
        return work(**values)

    return kind(name, callback=callback, help=doc, context_settings={"allow_extra_args": True})


def _plain(name: str, doc: str, params: list[click.Parameter]) -> click.Command:
    """Answer the command *name*, which has *params* alone."""
    return click.Command(name, callback=_work(name, name), help=doc, params=params)


def _subgroup(
    name: str, doc: str, table: "dict[str, tuple[str, list[click.Parameter]]]", works: str
) -> click.Group:
    """Answer the commands of *table*; *works* of their module has the functions by name."""
    commands = [
        click.Command(part, callback=_work(name, works, part), help=doc, params=params)
        for part, (doc, params) in table.items()
    ]
    return _Commands(name, help=doc, commands=commands, no_args_is_help=False)


class _Commands(click.Group):
    """The commands by name; one that is unknown or missing is refused with the choices."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Answer what is left of *args* after the group's own flags."""
        if not args:
            choices = ", ".join(sorted(self.commands))
            raise click.UsageError(f"a command is missing; choices: {choices}; or --help")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer the command that *args* start with."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"unknown command {quote(args[0])}; {did_you_mean(args[0], self.commands)}"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; pass an interruption on, for which click would print an empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None


def _cli() -> click.Group:
    group = _Commands(
        "kvsim",
        help="How many users can a GPU hold, and why: replay request traces through "
        "interchangeable KV-cache allocators.",
        context_settings={
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "max_content_width": 100,
        },
        commands=[
            _flagged("run", "Replay a trace through one KV allocator and report what happened."),
            _flagged(
                "compare",
                "Replay one trace through several KV allocators, side by side. Without arguments: "
                "a shipped workload, every allocator.",
            ),
            _flagged(
                "capacity",
                "Say how many blocks and requests a GPU holds, and what would hold more. Runs "
                "nothing.",
                Capacity,
            ),
            _flagged(
                "advise",
                "Try what helps a deployment that does not carry its load, one step after another: "
                "prefix caching, utilization, fp8 KV, max_model_len, max_num_seqs, quantized "
                "weights, more cards.",
                Advise,
                "advise_command",
            ),
            _flagged(
                "check",
                "Go through a check list: a configuration (flags), a run (DIR), a server's log or "
                "its metrics. Says what is wrong, which flag to change, and what the simulator "
                "says it brings. Exit code 1 if it is grave (--fail-on).",
                Check,
            ),
            _plain(
                "sweep",
                "Run every combination of settings that a file asks for, in parallel. What has "
                "finished is kept: the same command goes on after an interruption.",
                SWEEP,
            ),
            _plain("plot", PLOT_HELP, PLOT),
            _plain(
                "report",
                "Write one HTML page of a folder that kvsim run -o or compare wrote: its tables "
                "and charts, and an animated map of the KV pool that shows whose each block is. It "
                "opens from disk. The runs are repeated, and must be what they were.",
                REPORT,
            ),
            _subgroup(
                "tables",
                "List, show, import and check tables of measured kernel times.",
                TABLES,
                "TABLE_COMMANDS",
            ),
            _subgroup(
                "trace",
                "Inspect, convert and sample traces, or imitate one.",
                TRACE,
                "TRACE_COMMANDS",
            ),
        ],
    )
    click.version_option(package_name="kvsim")(group)
    return group
