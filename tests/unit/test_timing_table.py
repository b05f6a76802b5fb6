"""Timing tables as files: what is saved is loaded, and what cannot be right is refused."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.config import TimingConfig
from sim.errors import ConfigError, FileError
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import Deployment, make_step_time
from sim.timing.importers import IMPORTERS
from sim.timing.importers.native import read_native
from sim.timing.table import COLUMNS, TimingTable, make_table
from sim.timing.table_file import load, save, sidecar
from tests.tiny_table import INFO, decode, gemm, prefill, tiny_rows, tiny_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.parquet"
    save(tiny_table(), path)
    return path


def _equal(left: TimingTable, right: TimingTable) -> bool:
    return left.info == right.info and all(
        np.array_equal(left.columns[name], right.columns[name], equal_nan=name == "spread_us")
        for name in COLUMNS
    )


def test_what_is_saved_is_loaded_and_saved_again_in_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    table = load(path)
    assert _equal(table, tiny_table())
    other = tmp_path / "again.parquet"
    for _ in range(2):
        save(table, other)
        assert other.read_bytes() == path.read_bytes()
        assert sidecar(other).read_bytes() == sidecar(path).read_bytes()
        table = load(other)


def test_rows_are_sorted_whatever_order_they_come_in() -> None:
    assert _equal(make_table(INFO, reversed(tiny_rows()), ""), tiny_table())


def test_rows_by_value() -> None:
    table = tiny_table()
    assert len(table) == len(tiny_rows())
    assert table.distinct("op") == [("decode_attention",), ("gemm",), ("prefill_attention",)]
    assert len(table.where(op="gemm", n=4096)) == 6
    assert table.describe() == "made up for tests, made-up 1.0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "x: no rows; expected at least one measurement"),
        ([decode(1, 16, 1.0) | {"op": "gem"}], "unknown operation 'gem'; did you mean 'gemm'"),
        ([decode(-1, 16, 1.0)], "x: column batch, row 1: -1; expected 0 or more"),
        (
            [decode(1, 16, 0.0)],
            "x: column latency_us, row 1: 0.0; expected 1e-06 to 1e+12 m",
        ),
        ([decode(1, 16, 1.0), decode(2, 16, -3.0)], "column latency_us, row 2: -3.0; expected"),
        ([decode(1, 16, float("nan"))], "column latency_us, row 1: nan; expected 1e-06 to"),
        ([decode(1, 16, float("inf"))], "column latency_us, row 1: inf; expected 1e-06 to"),
        ([decode(1, 16, 1e300)], "column latency_us, row 1: 1e+300; expected 1e-06 to 1e+12 mic"),
        ([decode(1, 16, 1e-300)], "column latency_us, row 1: 1e-300; expected 1e-06 to"),
        ([decode(1, 2**31, 1.0)], "column context, row 1: 2147483648; expected 0 or more, at most"),
        ([decode(0, 16, 1.0)], "column batch, row 1: 0; expected 1 or more, as in any decode_att"),
        ([decode(1, 16, 1.0, num_heads=0)], "column num_heads, row 1: 0; expected 1 or more"),
        ([decode(1, 16, 1.0, head_dim=0)], "column head_dim, row 1: 0; expected 1 or more"),
        ([gemm(0, 2, 3, 1.0)], "column num_tokens, row 1: 0; expected 1 or more, as in any gemm"),
        ([decode(1, 16, 1.0, kernel="a\x1b[31m")], r"kernel, row 1: 'a\x1b[31m'; expected print"),
        ([decode(1, 16, 1.0, spread_us=float("inf"))], "spread_us, row 1: inf; expected 0 or mor"),
        ([decode(1, 16, 1.0, spread_us=-1.0)], "column spread_us, row 1: -1.0; expected 0 or more"),
        ([decode(1, 16, 1.0)] * 2, "decode_attention batch=1 context=16"),
        ([decode(1, 16, 1.0, provenance="guessed")], "row 1: 'guessed'; expected assumed"),
        ([decode(1, 16, 1.0, provenance="measured")], "row 1: 'measured'; expected assumed in a"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_cannot_be_right_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(FileError, match=re.escape(message)) as refusal:
        make_table(INFO, rows, "x")
    assert "\n" not in str(refusal.value)


def test_zero_may_mean_something() -> None:
    """Contiguous; no history; as many experts as uniform routing touches."""
    sizes = {"n": 8, "k": 8, "num_experts": 4, "top_k": 2, "num_gpus": 1, "num_tokens": 1}
    moe = gemm(1, 8, 8, 1.0) | {"op": "moe", "num_active_experts": 0} | sizes
    assert len(make_table(INFO, [decode(1, 0, 1.0, block_size=0), prefill(1, 1.0), moe], "")) == 3


def test_a_row_may_be_worth_less_than_its_table() -> None:
    info = msgspec.structs.replace(INFO, provenance="measured")
    rows = [decode(1, 16, 1.0), decode(1, 32, 2.0, provenance="fitted")]
    assert make_table(info, rows, "").columns["provenance"].tolist() == ["measured", "fitted"]
    table = make_table(info, [*rows, *map(_llama, range(16, 64, 16))], "")
    assert set(table.columns["provenance"].tolist()) == {"measured", "fitted"}


def _llama(context: int) -> dict[str, Any]:
    return decode(2, context, 1.0)


def _frame(change: Callable[[pd.DataFrame], Any]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        frame = pd.read_parquet(path)
        changed = change(frame)
        (frame if changed is None else changed).to_parquet(path)

    return apply


def _text(text: bytes) -> Callable[[Path], object]:
    return lambda path: sidecar(path).write_bytes(text)


def _column(name: str, values: Callable[[int], Any]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        table = pq.read_table(path)
        column = values(len(table))
        pq.write_table(table.set_column(table.column_names.index(name), name, column), path)

    return apply


def _twice(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.append_column("batch", table["batch"]), path)


def _not_utf8(count: int) -> Any:
    offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(b"\xff" * count)])


def _fifo(name: str) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        path.with_name(name).unlink()
        os.mkfifo(path.with_name(name))

    return apply


def _key(**changes: Any) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        content = json.loads(sidecar(path).read_bytes()) | changes
        sidecar(path).write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _frame(lambda f: f.drop(columns=["batch", "op"])),
            "no column op, batch; expected op, ker",
        ),
        (_frame(lambda f: f.iloc[::-1]), "row 2 (prefill_attention "),
        (_frame(lambda f: pd.concat([f.iloc[:2], f.iloc[1:2]])), "rows 2 and 3 have the same key"),
        (
            _frame(lambda f: f.assign(batch=f["batch"].astype(float))),
            "column batch is double with ",
        ),
        (_frame(lambda f: f.assign(op=1)), "column op is int64 with 0 nulls; expected text"),
        (_frame(lambda f: f.assign(latency_us=None)), "column latency_us is null with 27 nulls"),
        (_frame(lambda f: f.iloc[:0]), "no rows; expected at least one measurement"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "expected a Parquet file"),
        (lambda path: path.write_bytes(b""), "expected a Parquet file"),
        (
            lambda path: path.rename(path.with_name("tinny.parquet")),
            "did you mean 'tinny.parquet'?",
        ),
        (lambda path: sidecar(path).unlink(), "tiny.json: No such file or directory; expected the"),
        (
            _text(b"{"),
            "tiny.json: Input data was truncated; expected what describes a timing table",
        ),
        (_text(b"[1]"), "Expected `object`, got `array`; expected what describes"),
        (_text(b"\xff"), "expected what describes a timing table"),
        (_text(b"{}"), "missing required field `gpu`"),
        (_key(provenance="true"), "Invalid enum value 'true'"),
        (_key(typo=1), "contains unknown field `typo`"),
        (_key(version=2), "Invalid enum value 2 - at `$.version`"),
        (_column("batch", lambda n: pa.array([2**63] * n, pa.uint64())), "not in range: 0 to 9223"),
        (_column("kernel", _not_utf8), "codec can't decode byte 0xff"),
        (_column("op", lambda n: pa.array([{"\x1b": 1}] * n)), r"column op is 'struct<\x1b: int6"),
        (_twice, "column batch is there twice; expected it once"),
        (_fifo("tiny.parquet"), "tiny.parquet: no regular file; expected a Parquet file"),
        (_fifo("tiny.json"), "tiny.json: no regular file; expected the JSON file"),
        (_key(**{"a\nb": 1}), r"unknown field `a\nb`"),
        (_key(tensor_parallel_size=0), "Expected `int` >= 1 - at `$.tensor_parallel_size`"),
        (_key(tensor_parallel_size=10**6), "Expected `int` <= 1024 - at `$.tensor_parallel_size`"),
        (_key(source="a\x1b[31m"), r"tiny.json: key source: 'a\x1b[31m'; expected printable text"),
        (_key(versions={"a\n": "1"}), r"tiny.json: key versions: 'a\n'; expected printable text"),
        (_key(notes=["a\0"]), r"tiny.json: key notes: 'a\x00'; expected printable text"),
        (
            lambda p: sidecar(p).write_bytes(sidecar(p).read_bytes()[:-2] + b',"gpu":"H100"}'),
            "tiny.json: key 'gpu' is there twice; expected what describes",
        ),
        (_key(source="x" * 10**6), "tiny.json: more than 1,000,000 bytes; expected the JSON file"),
        (_text(b'{"versions":' + b"[" * 10**5), "tiny.json: "),
    ],
)
def test_files_that_are_no_table_are_refused(
    path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(path)
    with pytest.raises(FileError, match=re.escape(message)) as refusal:
        load(path)
    assert str(refusal.value).startswith("--timing-table ")
    assert "\n" not in str(refusal.value)


def test_what_has_to_be_imported_first_is_refused_with_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"import llmservingsim {tmp_path} -o TABLE.parquet"):
        load(tmp_path)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(ConfigError, match=r"kvsim tables import native .*rows.csv -o T"):
        load(tmp_path / "rows.csv")


def test_a_table_whose_json_cannot_be_written_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").mkdir()
    with pytest.raises(FileError, match=r"tiny.json cannot be written"):
        save(tiny_table(), tmp_path / "tiny.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.json"]


@pytest.mark.parametrize("place", ["pq.write_table", "write_json"])
def test_what_cannot_be_written_leaves_the_older_pair(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    target = {"pq.write_table": "pyarrow.parquet", "write_json": "sim.timing.table_file"}[place]
    monkeypatch.setattr(f"{target}.{place.removeprefix('pq.')}", fail)
    with pytest.raises(FileError, match="no room"):
        save(make_table(INFO, tiny_rows()[:3], ""), path)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before


def test_names_that_are_no_text_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.parquet")
    save(tiny_table(), path)
    assert _equal(load(path), tiny_table())


def test_the_report_says_what_rows_are_worth(tmp_path: Path) -> None:
    info = msgspec.structs.replace(INFO, provenance="measured")
    rows = [row | {"provenance": "fitted"} if row.get("batch") == 4 else row for row in tiny_rows()]
    save(make_table(info, rows, ""), tmp_path / "t.parquet")
    timing = TimingConfig(timing_table=str(tmp_path / "t.parquet"))
    deployment = Deployment(get_model("Llama-3.1-8B"), get_gpu("H200"))
    sources = make_step_time(timing, deployment).sources
    assert str(sources[0]) == (
        "decode attention measured "
        "(H200, made up for tests, made-up 1.0, page 16, 33 % of rows fitted)"
    )


# ---- our own format, unsorted


def _csv(path: Path, rows: list[dict[str, Any]], header: list[str] | None = None) -> None:
    names = header or list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) + "\n", encoding="utf-8")
    path.with_suffix(".json").write_bytes(msgspec.json.encode(INFO))


def test_csv_and_parquet_in_any_order_are_the_same_table(tmp_path: Path) -> None:
    rows = tiny_rows()[::-1]
    _csv(tmp_path / "rows.csv", rows)
    assert _equal(read_native(tmp_path / "rows.csv"), tiny_table())
    table = tiny_table()
    save(table.at(np.arange(len(table))[::-1]), tmp_path / "rows.parquet")
    assert _equal(read_native(tmp_path / "rows.parquet"), table)


def test_a_csv_may_begin_with_a_byte_order_mark_and_spell_the_gpu_as_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    _csv(path, tiny_rows())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    info = msgspec.structs.replace(INFO, gpu="h200_sxm", model="llama-3.1-8b")
    path.with_suffix(".json").write_bytes(msgspec.json.encode(info))
    table = read_native(path)
    assert (table.info.gpu, table.info.model) == ("H200", "meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "line 1: no column op, latency_us"),
        ([prefill(4, 1.0) | {"latncy": 2}], "line 1: unknown column 'latncy'; did you mean 'laten"),
        (
            [{"op": "gemm", "latency_us": 1}],
            "line 2, column kernel: nothing there; expected it, as",
        ),
        (
            [gemm(1, 2, 3, 1.0), gemm(2, 2, 3, 0.0)],
            "line 3, column latency_us: 0.0; expected 1e",
        ),
        ([gemm(1, 2, 3, float("nan"))], "line 2, column latency_us: nan; expected 1e-06"),
        ([gemm(1, 2, -3, 1.0)], "line 2, column k: -3; expected 1 or more, at most 2147483647"),
        ([gemm(1, 2, 3, 1.0) | {"n": "1.5"}], "column n: expected a whole number, got '1.5'"),
        ([gemm(1, 2, 3, 1.0) | {"n": 2**64}], "column n: 18446744073709551616; expected"),
        ([gemm(1, 2, 3, 1.0) | {"latency_us": "1 ms"}], "column latency_us: expected microseconds"),
        ([gemm(1, 2, 3, 1.0)] * 2, "line 3: the same operation, kernel and sizes as line 2"),
        ([gemm(1, 2, 3, 1.0) | {"op": "gem"}], "unknown operation 'gem'; did you mean 'gemm'?"),
        ([gemm(1, 2, 3, 1.0) | {"provenance": "x"}], "column provenance: 'x'; expected assumed"),
        ([gemm(1, 2, 3, 1.0) | {"kernel": "a,b"}], "line 2: 7 values; expected 7"),
        ([gemm(1, 2, 3, 1e300)], "line 2, column latency_us: 1e+300; expected 1e-06 to 1e+12"),
        ([gemm(0, 2, 3, 1.0)], "line 2, column num_tokens: 0; expected 1 or more"),
        (
            [gemm(1, 2, 3, 1.0) | {"kernel": '"a\nb"'}],
            r"line 3, column kernel: 'a\nb'; expected pr",
        ),
        ([gemm(1, 2, 3, 1.0) | {"kernel": "a\u2028b"}], r"line 2, column kernel: 'a\u2028b'; exp"),
        ([gemm(1, 2, 3, 1.0) | {"kernel": '"a'}], "line 2: unexpected end of data; expected CSV"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_lines_that_cannot_be_right_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    _csv(tmp_path / "rows.csv", rows)
    message = message.replace("7 values; expected 7", "8 values; expected 7")
    with pytest.raises(FileError, match=re.escape(message)) as refusal:
        read_native(tmp_path / "rows.csv")
    assert str(refusal.value).startswith(str(tmp_path / "rows.csv"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "H20000"}, "key gpu: 'H20000' is unknown; did you mean 'H200'?"),
        ({"gpu": "A100"}, "key gpu: 'A100' is ambiguous; expected one of A100-40, A100-80"),
        ({"model": "lama"}, "key model: 'lama' is unknown"),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    _csv(tmp_path / "rows.csv", tiny_rows())
    (tmp_path / "rows.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(INFO, **change))
    )
    with pytest.raises(FileError, match=re.escape(f"rows.json: {message}")):
        read_native(tmp_path / "rows.csv")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    _csv(tmp_path / "rows.csv", tiny_rows())
    _fifo("rows.csv")(tmp_path / "rows.csv")
    with pytest.raises(FileError, match=r"rows.csv: no regular file; expected a CSV file"):
        read_native(tmp_path / "rows.csv")


def test_a_name_that_ends_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.txt: expected a name ending in .parquet or .csv"):
        read_native(tmp_path / "rows.txt")


def test_importers_are_found_and_one_that_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(IMPORTERS) == sorted(IMPORTERS)
    assert IMPORTERS["native"].read is read_native
    gone = IMPORTERS["native"]._replace(function="gone.read")
    with pytest.raises(FileError, match=r"importer gone needs sim.timing.importers.gone"):
        _ = gone.read
