"""The flags and arguments of every command, in click's terms."""

from types import MappingProxyType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.options import Setting


SHORT_FLAGS = {
    "output_dir": ("-o",),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
}
"""Settings that have a second, shorter flag."""


def _option(setting: "Setting", text: str | None = None) -> click.Option:
    """Answer the flag of *setting*; values stay text, `sim.settings` converts and checks them.

    *text* is its help, if not the setting's.
    """
    names = [*SHORT_FLAGS.get(setting.name, ()), setting.flag]
    if setting.type is bool:
        names[-1] += f"/--no-{setting.flag[2:]}"
        shown = "on" if setting.default else "off"
        return click.Option(names, default=None, help=f"{text or setting.help} [default: {shown}]")
    default = "" if setting.default is None else f" [default: {setting.default}]"
    metavar = "|".join(setting.choices) or getattr(setting.type, "__name__", "str").upper()
    return click.Option(names, default=None, metavar=metavar, help=(text or setting.help) + default)


class Flagged(click.Command):
    """A command whose flags are made when it is asked for them: the list of commands needs none."""

    only: "tuple[str, ...] | None" = None
    """Names of the settings whose flags it has; None is all."""
    writes: bool = True
    """Whether it has the settings of the output; else ``--json`` alone."""
    own: "tuple[click.Parameter, ...]" = ()
    """Flags and arguments that are no settings."""
    helps: "Mapping[str, str]" = MappingProxyType({})
    """Help of flags that mean something else here."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Answer every flag."""
        if not self.params:
            from sim.options import settings  # noqa: PLC0415  # see the class

            config = click.Option(
                ["--config"],
                metavar="FILE",
                help="JSON or TOML file with flags by name; flags win.",
            )
            shown = [
                s
                for s in settings()
                if (self.only is None or s.name in self.only)
                and (self.writes or s.concern != "output" or s.name == "json")
            ]
            self.params = [*self.own, config, *(_option(s, self.helps.get(s.name)) for s in shown)]
        return super().get_params(ctx)


class Capacity(Flagged):
    """``kvsim capacity``: the settings that decide the pool, and the question."""

    only = (
        "model", "gpu", "gpu_memory_gib", "dtype", "quantization", "tensor_parallel_size",
        "pipeline_parallel_size", "enable_expert_parallel", "max_model_len", "block_size",
        "kv_cache_dtype", "gpu_memory_utilization", "vllm_version", "kv_cache_memory_bytes",
        "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
        "trace", "trace_format", "seed", "json",
    )  # fmt: skip
    helps = MappingProxyType(
        {
            "trace": "Trace whose lengths requests have, averaged over time.",
            "max_model_len": "Longest prompt plus output, in tokens [default: the model's].",
            "json": "Print the answer as JSON, not as text.",
            "enforce_eager": "No CUDA graphs, and no memory for them.",
        }
    )
    own = (
        click.Option(
            ["--from-log"],
            metavar="FILE",
            help="Start-up log of a server: what it said beside what is computed, line by line. "
            "Model and settings are the log's unless flags say otherwise.",
        ),
        click.Option(
            ["--mean-len"],
            metavar="INT",
            help="Tokens that a request holds on average [default: --max-model-len].",
        ),
        click.Option(
            ["--prefix-len"], metavar="INT", help="Tokens of them that all requests share."
        ),
        click.Option(
            ["--users"],
            metavar="INT",
            help="Requests to hold at once: which utilization, KV dtype, tensor parallelism or "
            "number of cards does.",
        ),
    )


class Advise(Flagged):
    """``kvsim advise``: every setting of a run; it writes no files."""

    writes = False
    helps = MappingProxyType(
        {
            "allocator": "KV allocator to start from [default: paged; prefix caching is a step].",
            "json": "Print the answer as JSON, not as text.",
        }
    )


class Check(Flagged):
    """``kvsim check``: every setting of a run, and what is checked."""

    writes = False
    helps = MappingProxyType(
        {
            "trace": "Trace, or specification, of the load; of a run, where its own lies now.",
            "json": "Print the findings as JSON, not as text.",
        }
    )
    own = (
        click.Argument(["folder"], required=False, metavar="[DIR]"),
        click.Option(
            ["--log"],
            metavar="FILE",
            help="Log of a vLLM server (SGLang's and TensorRT-LLM's too): start-up, statistics.",
        ),
        click.Option(
            ["--metrics"], metavar="FILE", help="Text of a vLLM server's /metrics, or OpenMetrics."
        ),
        click.Option(
            ["--fail-on"],
            metavar="error|warning|info|never",
            help="Exit with 1 if a finding is as grave as this [default: error].",
        ),
        click.Option(
            ["--gains/--no-gains"],
            default=None,
            help="Simulate what each change would bring [default: on].",
        ),
    )


_OUTPUT = ("-o", "--output")
TABLES: "dict[str, tuple[str, list[click.Parameter]]]" = {
    "list": (
        "List fits and timing tables. Of fits every GPU, of tables those in the folders (default: "
        "this one, and kernels/tables of a source tree).",
        [
            click.Argument(["folders"], nargs=-1, metavar="[FOLDER]..."),
            click.Option(["--json"], is_flag=True, help="Print JSON, not text."),
        ],
    ),
    "show": (
        "Say what is in a timing table, and draw it. With --gpu and no table: the fit of that GPU.",
        [
            click.Argument(["table"], required=False, metavar="[TABLE]"),
            click.Option(_OUTPUT, metavar="FILE", help="Chart to draw, .png or .svg."),
            click.Option(
                ["--heads"],
                metavar="QUERY/KV/DIM",
                help="Heads of a rank whose decode attention is drawn [default: those with most "
                "rows].",
            ),
            click.Option(
                ["--kernel"], metavar="STR", help="Kernel that is drawn [default: most rows]."
            ),
            click.Option(["--gpu"], metavar="STR", help="GPU whose fit is drawn."),
            click.Option(
                ["--model"],
                metavar="STR",
                help="Model whose heads the fit is drawn for [default: meta-llama/Llama-3.1-8B].",
            ),
            click.Option(
                ["-tp", "--tensor-parallel-size"],
                metavar="INT",
                help="GPUs that share that model [default: 1].",
            ),
        ],
    ),
    "import": (
        "Make a timing table of other measurements. NAME says whose: aiconfigurator, "
        "llmservingsim or native; SOURCE is a system, a profile folder or a file.",
        [
            click.Argument(["name"], required=False, metavar="NAME"),
            click.Argument(["source"], required=False, metavar="SOURCE"),
            click.Option(
                _OUTPUT, metavar="FILE", help="Parquet file to write; its JSON file goes beside it."
            ),
            click.Option(
                ["--gpu"], metavar="STR", help="GPU, where the source's name is not ours."
            ),
            click.Option(["--model"], metavar="STR", help="Model that layers and experts are of."),
            click.Option(
                ["-tp", "--tensor-parallel-size"],
                metavar="INT",
                help="GPUs that share the model; rows are of one of them [default: 1].",
            ),
            click.Option(["--backend"], metavar="STR", help="Engine that was measured."),
            click.Option(["--backend-version"], metavar="STR", help="Its version."),
        ],
    ),
    "check": (
        "Check timing tables: a line each; exit code 1 if one is bad.",
        [click.Argument(["tables"], nargs=-1, metavar="TABLE...")],
    ),
}
"""The commands of ``kvsim tables``: help and parameters. Their values stay text."""


SWEEP: "list[click.Parameter]" = [
    click.Argument(["spec"], required=False, metavar="SPEC.toml"),
    click.Option(["-o", "--output-dir"], metavar="DIR", help="Folder for the results."),
    click.Option(["--dry-run"], is_flag=True, help="List the cells, and run none."),
    click.Option(["--jobs"], metavar="INT", help="Processes of this machine [default: its CPUs]."),
    click.Option(
        ["--executor"],
        metavar="local|ray",
        help="Where cells run: processes of this machine, or a Ray cluster [default: local].",
    ),
    click.Option(
        ["--address"],
        metavar="STR",
        help="The Ray cluster: HOST:PORT on one of its nodes, ray://HOST:PORT from outside "
        "[default: the one that runs here].",
    ),
]
PLOT_HELP = """Draw charts of a folder that kvsim run -o, compare or sweep wrote, from its files.

A sweep is drawn over a setting, one curve an allocator; other settings have panels, seeds bars. A
run is drawn over time, a comparison both ways."""
PLOT: "list[click.Parameter]" = [
    click.Argument(["folder"], required=False, metavar="DIR"),
    click.Option(
        ["-o", "--output-dir"],
        metavar="DIR",
        help="Folder for the charts [default: beside the data].",
    ),
    click.Option(
        ["--x"], metavar="NAME", help="Setting to draw over [default: the first that was swept]."
    ),
    click.Option(
        ["--y"],
        metavar="NAME,...",
        help="Columns of the summary to draw [default: a chart each of concurrency, slots, "
        "throughput, goodput, latencies, hit rate, preemptions, and what two settings or a "
        "trade-off show].",
    ),
    click.Option(
        ["--where"],
        metavar="NAME=VALUE",
        multiple=True,
        help="Draw only cells with this value; may be given several times.",
    ),
    click.Option(["--format"], metavar="png,svg", help="Formats of the files [default: both]."),
    click.Option(
        ["--style"],
        metavar="STR",
        help="Style of matplotlib: a name like dark_background, or a file. Colours of curves stay.",
    ),
]
REPORT: "list[click.Parameter]" = [
    click.Argument(["folder"], required=False, metavar="DIR"),
    click.Option(_OUTPUT, metavar="FILE.html", help="Page to write [default: DIR/report.html]."),
    click.Option(
        ["--trace"], metavar="FILE", help="Where the trace lies now [default: as it was given]."
    ),
    click.Option(
        ["--timing-table"], metavar="FILE", help="Likewise, the timing table, if there was one."
    ),
]
_SOURCE: "list[click.Parameter]" = [
    click.Argument(["source"], required=False, metavar="TRACE"),
    click.Option(["--trace-format"], metavar="STR", help="Its format [default: as recognised]."),
    click.Option(["--seed"], metavar="INT", help="Of a specification (.toml) [default: 0]."),
]
_NATIVE = click.Option(_OUTPUT, metavar="FILE.jsonl", help="File to write, in our own format.")
TRACE: "dict[str, tuple[str, list[click.Parameter]]]" = {
    "inspect": (
        "Say what is in a trace: arrivals, lengths, sessions, how often prompts repeat, oddities; "
        "and draw it.",
        [
            *_SOURCE,
            click.Option(
                ["--block-size"],
                metavar="INT",
                help="Tokens in a block, for reuse [default: 16].",
            ),
            click.Option(_OUTPUT, metavar="FILE", help="Chart to draw, .png or .svg."),
            click.Option(["--json"], is_flag=True, help="Print JSON, not text."),
        ],
    ),
    "convert": (
        "Write a trace, or the requests that a specification (.toml) describes, in our own format.",
        [*_SOURCE, _NATIVE],
    ),
    "sample": (
        "Write a part of a trace in our own format; sessions stay whole.",
        [
            *_SOURCE,
            _NATIVE,
            click.Option(
                ["--start"], metavar="SECONDS", help="Leave out sessions that start before."
            ),
            click.Option(
                ["--end"], metavar="SECONDS", help="Leave out sessions that start then or later."
            ),
            click.Option(["--every"], metavar="N", help="Keep one of N sessions [default: all]."),
            click.Option(
                ["--request-rate"],
                metavar="FLOAT",
                help="Requests a second on average of what is left: gaps are multiplied by one "
                "factor [default: as recorded].",
            ),
        ],
    ),
    "fit": (
        "Write a specification that imitates a trace: lengths, arrivals, sharing; print how well.",
        [
            *_SOURCE,
            click.Option(_OUTPUT, metavar="FILE.toml", help="Specification to write."),
        ],
    ),
}
"""The commands of ``kvsim trace``, likewise."""
