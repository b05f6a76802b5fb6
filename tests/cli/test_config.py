"""Flags and configuration files: one vocabulary, one order of precedence, one set of refusals."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sim.commands.compare import COMPARED
from sim.config import CONCERNS
from sim.errors import ConfigError
from sim.options import settings
from sim.settings import FLAG_RANK, Given, read_config_file, resolve
from tests.cli.conftest import Kvsim, Outcome

SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 21,
    "max_model_len": 200,
    "max_num_seqs": 6,
    "step_time": "constant:0.01",
}


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


@pytest.fixture
def replay(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> Any:
    """Run with a configuration file and flags; answer the outcome and the manifest's config."""

    def run(
        config: dict[str, Any], *flags: str, suffix: str = ".json", text: str | None = None
    ) -> tuple[Outcome, dict[str, Any]]:
        values = {**SMALL, "trace": str(busy_trace), **config}
        path = tmp_path / f"config{suffix}"
        if text is None and suffix == ".toml":
            text = "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())
        path.write_text(json.dumps(values) if text is None else text)
        out = tmp_path / "out"
        done = kvsim("run", "--config", path, "-o", out, *flags)
        manifest = out / "manifest.json"
        resolved = json.loads(manifest.read_bytes())["config"] if manifest.exists() else {}
        return done, resolved

    return run


@pytest.mark.parametrize("suffix", [".json", ".toml", ".JSON"])
def test_every_setting_may_come_from_a_file(replay: Any, suffix: str) -> None:
    config = {
        "model": "Qwen/Qwen3-8B",
        "gpu": "H100",
        "allocator": "contiguous",
        "reservation": "pow2",
        "placement": "buddy",
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 4096,
        "long_prefill_token_threshold": 100,
        "watermark": 0.25,
        "async_scheduling": True,
        "seed": 3,
        "trace_format": "native",
        "format": "csv",
        "json": True,
        "kv_cache_memory_bytes": 123456789,
    }
    done, resolved = replay(config, suffix=suffix)
    assert done.code == 0, done.err
    assert json.loads(done.out)["allocator"] == "reserve-pow2-buddy"
    del config["format"], config["json"]
    assert {name: resolved[name] for name in config} == config
    assert done.notes == [
        note
        for name, value in (("kv_cache_memory_bytes", 123456789), ("gpu_memory_utilization", 0.5))
        for note in done.notes
        if f"key '{name}' ({value}) has no effect" in note
    ]
    assert len(done.notes) == 2


def test_keys_with_dashes(replay: Any) -> None:
    assert replay({"block-size": 32})[1]["block_size"] == 32


def test_flags_win_over_the_file(replay: Any) -> None:
    done, resolved = replay(
        {"block_size": 32, "enable_chunked_prefill": False, "max_num_seqs": 3, "seed": 1},
        *("--block-size", "64", "--enable-chunked-prefill", "--max_num_seqs", "4"),
    )
    assert (done.code, done.err) == (0, "")
    assert (resolved["block_size"], resolved["max_num_seqs"], resolved["seed"]) == (64, 4, 1)
    assert resolved["enable_chunked_prefill"] is True


def test_null_is_the_default(replay: Any) -> None:
    done, resolved = replay({"block_size": None, "allocator": None, "kv_cache_memory_bytes": None})
    assert (done.code, resolved["block_size"], resolved["allocator"]) == (0, 16, "prefix")


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [("block_sise", "block_size"), ("max-num-sequences", "max_num_seqs"), ("GPU", "gpu")],
)
def test_unknown_keys_are_refused_with_the_nearest(
    replay: Any, key: str, nearest: str, suffix: str
) -> None:
    done, _ = replay({key: 16}, suffix=suffix)
    assert done.code == 2
    assert f"config{suffix}: key '{key}' is unknown; did you mean '{nearest}'?" in done.refusal


def test_a_key_given_twice(replay: Any) -> None:
    done, _ = replay({"block_size": 16, "block-size": 32})
    assert done.code == 2
    assert "key 'block-size' is there twice" in done.refusal


WHOLE = "expected a whole number, at least 1, at most 2147483647, got "


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_size", "16", WHOLE + "'16'"),
        ("block_size", "1k", WHOLE + "'1k'"),
        ("block_size", 16.5, WHOLE + "16.5"),
        ("block_size", True, WHOLE + "True"),
        ("block_size", 0, WHOLE + "0"),
        ("block_size", 2**70, WHOLE + str(2**70)),
        ("block_size", [16], WHOLE + "[16]"),
        ("block_size", {"tokens": 16}, WHOLE + "{'tokens': 16}"),
        ("seed", -1, "expected a whole number, at least 0, at most 9223372036854775807, got -1"),
        ("gpu_memory_utilization", "0.9", "expected a number, above 0, at most 1, got '0.9'"),
        ("gpu_memory_utilization", True, "expected a number, above 0, at most 1, got True"),
        ("watermark", 1.0, "expected a number, at least 0, below 1, got 1.0"),
        ("enable_prefix_caching", "no", "expected true or false, got 'no'"),
        ("enable_prefix_caching", 0, "expected true or false, got 0"),
        ("model", 8, "expected text (not empty), got 8"),
        ("trace", "", "expected text (not empty), got ''"),
        ("placement", "best_fit", "unknown value 'best_fit'; did you mean 'first_fit'?"),
        ("format", ["csv"], "unknown value ['csv']; did you mean 'csv'?"),
        ("allocator", ["paged"], "unknown value ['paged']; did you mean 'paged'?"),
        ("trace_format", "natve", "unknown value 'natve'; did you mean 'native'?"),
    ],
)
def test_wrong_values_in_a_file(replay: Any, key: str, value: Any, expected: str) -> None:
    done, _ = replay({key: value})
    assert done.code == 2
    assert f"config.json: key '{key}': {expected}" in done.refusal


@pytest.mark.parametrize("text", ["gpu_memory_utilization = nan", "gpu_memory_utilization = inf"])
def test_numbers_of_toml_that_are_none(replay: Any, text: str) -> None:
    done, _ = replay({}, suffix=".toml", text=text)
    assert "key 'gpu_memory_utilization': expected a number, above 0" in done.refusal


def test_dates_of_toml(replay: Any) -> None:
    done, _ = replay({}, suffix=".toml", text="trace = 2026-01-01")
    assert "key 'trace': expected text (not empty), got datetime.date" in done.refusal


@pytest.mark.parametrize(
    ("flag", "tokens"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("2.5k", 2500),
        ("0.5K", 512),
        ("1m", 10**6),
        ("1M", 2**20),
        ("1_000", 1000),
        (" 64 ", 64),
        ("+64", 64),
    ],
)
def test_suffixes(flag: str, tokens: int) -> None:
    run = resolve({"block_size": Given(flag, FLAG_RANK, "--block-size")}).run
    assert run.cache.block_size == tokens


def test_bytes_have_suffixes_too() -> None:
    given = {"kv_cache_memory_bytes": Given("2.5GiB", FLAG_RANK, "--kv-cache-memory-bytes")}
    assert resolve(given).run.cache.kv_cache_memory_bytes == 5 * 2**29


@pytest.mark.parametrize(
    "text", ["1.5", "1.0001k", "1kk", "1 kib", "0x10", "1e3", "k", "", "\u0661"]
)
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--block-size: expected a whole number.*1K is 1024"):
        resolve({"block_size": Given(text, FLAG_RANK, "--block-size")})


@pytest.mark.parametrize("flag", ["--block-size", "--block_size"])
@pytest.mark.parametrize("no", ["--no-enable-prefix-caching", "--no_enable_prefix_caching"])
def test_dashes_and_underscores(replay: Any, flag: str, no: str) -> None:
    _, resolved = replay({}, flag, "64", no)
    assert (resolved["block_size"], resolved["enable_prefix_caching"]) == (64, False)


@pytest.mark.parametrize(
    ("flags", "allocator"),
    [
        ([], "prefix"),
        (["--enable-prefix-caching"], "prefix"),
        (["--no-enable-prefix-caching"], "paged"),
        (["--allocator", "paged"], "paged"),
        (["--allocator", "paged", "--no-enable-prefix-caching"], "paged"),
        (["--allocator", "prefix", "--enable-prefix-caching"], "prefix"),
        (["--allocator", "reserve-max", "--no-enable-prefix-caching"], "contiguous"),
    ],
)
def test_prefix_caching_picks_the_allocator(replay: Any, flags: list[str], allocator: str) -> None:
    done, resolved = replay({}, *flags)
    assert (done.code, done.err) == (0, "")
    assert resolved["allocator"] == allocator
    assert resolved["enable_prefix_caching"] == (allocator == "prefix")
    assert replay({"enable_prefix_caching": False})[1]["allocator"] == "paged"


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"allocator": "paged"}, {"enable_prefix_caching": True}),
    ({"allocator": "prefix"}, {"enable_prefix_caching": False}),
    ({"allocator": "reserve-max"}, {"enable_prefix_caching": True}),
    ({"allocator": "reserve-max"}, {"reservation": "pow2"}),
    ({"allocator": "paged"}, {"reservation": "max"}),
    ({"allocator": "prefix"}, {"placement": "buddy"}),
]


def _flags(values: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else []
        flags += [] if isinstance(value, bool) else [f"--{flag}", value]
    return flags


@pytest.mark.parametrize(("named", "other"), CONTRADICTIONS)
@pytest.mark.parametrize(("name_by_flag", "other_by_flag"), list(product([False, True], repeat=2)))
def test_contradictions(
    replay: Any,
    named: dict[str, Any],
    other: dict[str, Any],
    name_by_flag: bool,
    other_by_flag: bool,
) -> None:
    """Refused, whoever says it; only an allocator named by a flag overrules what a file says."""
    config = ({} if name_by_flag else named) | ({} if other_by_flag else other)
    flags = _flags(named if name_by_flag else {}) + _flags(other if other_by_flag else {})
    done, resolved = replay(config, *flags)
    [setting] = other
    if name_by_flag and not other_by_flag:
        assert done.code == 0
        assert [f"key '{setting}'" in note and "has no effect" in note for note in done.notes] == [
            True
        ]
        assert "--allocator" in done.notes[0]
        assert resolved["enable_prefix_caching"] == (named["allocator"] == "prefix")
    else:
        assert done.code == 2
        assert "contradicts" in done.refusal
        assert setting.replace("_", "-") in done.refusal.replace("_", "-")
        assert named["allocator"] in done.refusal
        assert "leave one of them out" in done.refusal


@pytest.mark.parametrize("other", [{"reservation": "pow2"}, {"placement": "buddy"}])
@pytest.mark.parametrize("by_flag", [False, True])
def test_settings_of_an_allocator_that_nobody_named(
    replay: Any, other: dict[str, Any], by_flag: bool
) -> None:
    done, _ = replay({} if by_flag else other, *(_flags(other) if by_flag else []))
    assert done.code == 2
    assert "has no effect on allocator prefix: add --allocator contiguous" in done.refusal


def test_notes_say_what_has_no_effect(replay: Any) -> None:
    done, _ = replay({}, "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "8GiB")
    assert done.code == 0
    assert [note.partition(" has no effect: ")[0] for note in done.notes] == [
        "note: --kv-cache-memory-bytes 8GiB",
        "note: --gpu-memory-utilization 0.5",
    ]
    assert all("key 'num_gpu_blocks_override' (21) wins" in note for note in done.notes)


def test_notes_do_not_go_to_standard_output(replay: Any) -> None:
    done, _ = replay({"json": True}, "--gpu-memory-utilization", "0.5")
    assert json.loads(done.out)["completed"] == 12
    assert len(done.notes) == len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("gpu", "tokens", "seqs"),
    [
        ("H100", 8192, 1024),
        ("H200", 8192, 1024),
        ("RTX-PRO-6000", 8192, 1024),
        ("A100-40", 2048, 256),
        ("A100-80", 2048, 256),
        ("A100-80-PCIe", 2048, 256),
        ("L40S", 2048, 256),
        ("RTX-4090", 2048, 256),
        ("GB200", 16384, 1024),
        ("B300", 16384, 1024),
        ("GB300", 16384, 1024),
    ],
)
def test_defaults_by_gpu(gpu: str, tokens: int, seqs: int) -> None:
    """vLLM 0.33.0, ``engine/arg_utils.py:2940-3006``, for its API server."""
    scheduler = resolve({"gpu": Given(gpu, FLAG_RANK, "--gpu")}).run.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)


def test_defaults_fit_each_other() -> None:
    def scheduler(**flags: Any) -> tuple[int | None, int | None]:
        given = {
            name: Given(value, FLAG_RANK, f"--{name.replace('_', '-')}")
            for name, value in flags.items()
        }
        resolved = resolve(given).run.scheduler
        return resolved.max_num_batched_tokens, resolved.max_num_seqs

    assert scheduler(max_num_batched_tokens="100") == (100, 100)
    assert scheduler(enable_chunked_prefill=False) == (8192, 256)
    assert scheduler(enable_chunked_prefill=False, gpu="H100", max_model_len="100") == (8192, 1024)


def test_max_model_len_follows_the_trace() -> None:
    def length(**given: str) -> int | None:
        flags = {name: Given(value, FLAG_RANK, f"--{name}") for name, value in given.items()}
        return resolve(flags).run.model.max_model_len

    assert length() == 8192
    assert length(trace="t.jsonl") == 131072
    assert length(trace="t.jsonl", model="opt-13b") == 2048
    assert length(max_model_len="1K") == 1024


@pytest.mark.parametrize("flag", ["-tp", "--tensor-parallel-size", "--tensor_parallel_size"])
def test_tensor_parallelism(replay: Any, flag: str) -> None:
    done, resolved = replay({"kv_cache_dtype": "fp8"}, flag, "2")
    assert (done.code, done.err) == (0, "")
    assert (resolved["tensor_parallel_size"], resolved["kv_cache_dtype"]) == (2, "fp8")
    assert "KV pool: per GPU, tensor parallel 2: 21 blocks given by" in done.out


def test_a_model_that_is_not_as_published_says_so(replay: Any) -> None:
    done, _ = replay({"model": "google/gemma-3-4b-it"})
    assert done.code == 0
    assert done.notes[0].startswith("note: --model google/gemma-3-4b-it: the vision encoder, 1.35")


def test_help_lists_every_setting(kvsim: Kvsim) -> None:
    for command in ("run", "compare"):
        done = kvsim(command, "--help")
        assert (done.code, done.err) == (0, "")
        for setting in settings():
            assert setting.flag in done.out
    assert "compare" in kvsim("--help").out


def test_names_are_unique_and_documented() -> None:
    names = [setting.name for setting in settings()]
    assert len(set(names)) == len(names)
    assert {setting.concern for setting in settings()} == set(CONCERNS)
    assert all(setting.help.endswith((".", "].", "]")) for setting in settings())
    allocators = next(setting.choices for setting in settings() if setting.name == "allocator")
    assert set(COMPARED) <= set(allocators)


def test_a_file_read_twice_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('block-size = 32\nallocator = "paged"\n')
    assert read_config_file(str(path)) == read_config_file(str(path))
    assert resolve(read_config_file(str(path))) == resolve(read_config_file(str(path)))
