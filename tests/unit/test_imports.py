"""Who may import whom, and who may print: read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# Every module of sim with what it may import of sim, lowest first. A layer may import the layers
# below it, and modules of its own layer.
LAYERS = (
    (
        "columns",
        "errors",
        "files",
        "config",
        "request",
        "tables",
        "gaps",
        "arrow",
        "goodput",
        "slots",
    ),
    ("hardware", "kv_layout", "kv_groups", "server_log", "plots"),
    ("model_spec",),
    ("hf_config",),
    ("models",),
    ("kv_spec", "memory", "stages", "kv_pool", "pool_sizing", "timing"),
    ("allocators", "totals"),
    ("scheduler_output", "options", "refusal", "modelled", "overrun"),
    ("scheduler", "static_batching"),
    ("settings",),
    ("metrics", "capacity", "clients", "reconcile", "arrivals"),
    ("engine",),
    ("simulation",),
    ("result_tables",),
    ("summary", "results", "report", "capacity_report"),
    (
        "comparison",
        "timing_report",
        "timing_plots",
        "trace_report",
        "sweep",
        "what_if",
        "block_map",
        "health",
        "watch",
    ),
    ("advice", "advice_report"),
    ("commands",),
    ("flag_params",),
    ("flags",),
    ("cli",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

# Reports see rows. metrics alone reads what an allocator answers, `MemoryStats`.
ROWS_ONLY = {
    "metrics": {"sim.allocators.values"},
    "result_tables": set[str](),
    "summary": set[str](),
    "results": set[str](),
    "report": set[str](),
    "comparison": set[str](),
}
COMMANDS = {
    f"sim/commands/{name}.py"
    for name in (
        "capacity",
        "common",
        "run",
        "compare",
        "plot",
        "sweep",
        "tables",
        "trace",
        "advise",
        "report",
        "check",
        "watch",
    )
}
PLOTS = {f"sim/plots/{path.name}" for path in (REPOSITORY / "sim" / "plots").glob("*.py")}
ONLY_IN = {
    "simpy": {"sim/engine.py"},
    "click": {"sim/flags.py", "sim/flag_params.py", *COMMANDS},
    "tqdm": {"sim/commands/common.py"},
    "tabulate": {
        "sim/advice_report.py",
        "sim/comparison.py",
        "sim/timing_report.py",
        "sim/trace_report.py",
        "sim/commands/sweep.py",
    },
    "pyarrow": {
        "sim/result_tables.py",
        "sim/arrow.py",
        "sim/results.py",
        "sim/timing/table_file.py",
        "sim/timing/importers/aiconfigurator.py",
        "workloads/readers/native.py",
        "workloads/readers/source.py",
        "workloads/readers/table.py",
    },
    "yaml": {"sim/timing/importers/llmservingsim.py"},
    "matplotlib": {*PLOTS, "sim/timing_plots.py", "sim/trace_report.py"},
    "pandas": PLOTS - {"sim/plots/style.py"},
    "torch": set[str](),
    "triton": set[str](),
    "ray": {"sim/sweep/ray_cluster.py"},
    "rich": {"sim/watch/board.py", "sim/commands/watch.py"},
    "prometheus_client": {
        "sim/health/from_metrics.py",
        "sim/watch/endpoint.py",
        "sim/watch/families.py",
        "sim/watch/openmetrics.py",
    },
}
FILES = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("sim", "workloads")
    for path in (REPOSITORY / folder).rglob("*.py")
)


def _tree(path: Path) -> ast.Module:
    return ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            if node.module in {"sim", "workloads"}:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: Path) -> str:
    """Answer the part of sim that a file belongs to: a package counts as one."""
    return path.with_suffix("").parts[1]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_folders(path: Path) -> None:
    ours = {"workloads"} if path.parts[0] == "workloads" else {"sim", "workloads"}
    tops = {name.partition(".")[0] for name in _imports(path)}
    assert tops & {"sim", "workloads", "kernels", "tests", "notebooks"} <= ours


def test_kernels_see_times_only() -> None:
    seen = {"sim.errors", "sim.hardware", "sim.timing", "sim.timing_plots", "workloads.errors"}
    for path in (REPOSITORY / "kernels").rglob("*.py"):
        for name in _imports(path.relative_to(REPOSITORY)):
            if name.partition(".")[0] in {"sim", "workloads", "tests", "notebooks"}:
                assert any(f"{name}.".startswith(f"{part}.") for part in seen), f"{path}: {name}"


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "sim"], ids=str)
def test_layers_inside_sim(path: Path) -> None:
    module = _module(path)
    if module == "__init__":
        return
    assert module in LEVELS, f"give {path} its place in LAYERS"
    for name in _imports(path):
        if name.startswith("sim."):
            other = name.split(".")[1]
            assert LEVELS[other] <= LEVELS[module], f"{path} imports {name}"


def test_no_cycles_inside_sim() -> None:
    edges: dict[str, set[str]] = {name: set() for name in LEVELS}
    for path in FILES:
        if path.parts[0] == "sim" and _module(path) != "__init__":
            others = {name.split(".")[1] for name in _imports(path) if name.startswith("sim.")}
            edges[_module(path)] |= others - {_module(path)}
    while edges:
        free = [name for name, others in edges.items() if not others & edges.keys()]
        assert free, f"cycle among {sorted(edges)}"
        for name in free:
            del edges[name]


@pytest.mark.parametrize("module", ROWS_ONLY)
def test_reports_see_no_allocator(module: str) -> None:
    used = {n for n in _imports(Path("sim") / f"{module}.py") if n.startswith("sim.allocators")}
    assert used <= ROWS_ONLY[module]


def test_allocators_know_each_other_by_the_registry_only() -> None:
    for path in FILES:
        if path.parts[:2] != ("sim", "allocators"):
            used = {name for name in _imports(path) if name.startswith("sim.allocators")}
            known = {f"sim.allocators{name}" for name in ("", ".base", ".values", ".runs")}
            assert used <= known, path


@pytest.mark.parametrize("package", ONLY_IN)
def test_packages_with_one_user(package: str) -> None:
    users = {
        path.as_posix()
        for path in FILES
        if any(name.partition(".")[0] == package for name in _imports(path))
    }
    assert users <= ONLY_IN[package]


PRINTING = {"print", "input", "sys.stdout", "sys.stderr"}
EXITING = {"exit", "quit", "sys.exit", "os._exit", "SystemExit"}


@pytest.mark.parametrize("path", [p for p in FILES if p.as_posix() != "sim/cli.py"], ids=str)
def test_who_prints_and_who_exits(path: Path) -> None:
    used = {node.id for node in ast.walk(_tree(path)) if isinstance(node, ast.Name)} | {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not used & EXITING
    assert path.as_posix() in COMMANDS or not used & PRINTING


HEAVY = {
    "numpy",
    "pyarrow",
    "pandas",
    "matplotlib",
    "scipy",
    "torch",
    "tqdm",
    "tabulate",
    "simpy",
    "rich",
    "prometheus_client",
}


def _imported(*arguments: str) -> set[str]:
    """Answer what a process of its own has imported when the command line is done."""
    code = (
        "import sys; from sim.cli import main; code = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["sweep", "--help"],
        ["tables", "--help"],
        ["tables", "show", "--help"],
        ["plot", "--help"],
        ["report", "--help"],
        ["trace", "fit", "--help"],
        ["check", "--help"],
    ],
)
def test_help_is_light(arguments: list[str]) -> None:
    assert not _imported(*arguments) & HEAVY


def test_the_list_of_commands_needs_no_settings() -> None:
    assert not _imported("--help") & {"msgspec", "sim.config", "sim.commands"}


@pytest.mark.parametrize("table_format", ["parquet", "csv"])
@pytest.mark.parametrize("detail", [(), ("--save-steps", "--save-block-tables")])
def test_a_run_pays_for_what_it_uses(
    samples: Path, tmp_path: Path, table_format: str, detail: tuple[str, ...]
) -> None:
    trace = str(samples / "tokens.jsonl")
    flags = ("--format", table_format, *detail, "-o", str(tmp_path))
    imported = _imported("run", "--trace", trace, *flags)
    assert imported & HEAVY == {"numpy", "pyarrow", "simpy"}
    formats = {"pyarrow.parquet", "pyarrow.csv"}
    assert imported & formats == {f"pyarrow.{table_format}"}
    assert not imported & {"pyarrow.dataset", "pyarrow.compute", "pyarrow.pandas_compat"}
