import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from sim import arrow

TEXTS = ["a", None, "", "ü€🙂", *(f"r{n};r{n + 1}" for n in range(9)), None]


@pytest.mark.parametrize("values", [np.arange(-3, 8), np.arange(11) / 7], ids=["int", "float"])
def test_numbers(values: np.ndarray) -> None:
    assert arrow.array(values).equals(pa.array(values))
    for missing in (values < 2, values < -9, values < 99):
        ours = arrow.array(values, missing)
        ours.validate(full=True)
        assert ours.equals(pa.array(values, mask=missing))
        assert ours.null_count == missing.sum()


def test_columns_of_a_matrix() -> None:
    matrix = np.arange(12).reshape(4, 3)
    assert arrow.table({"b": matrix[:, 1]}).equals(pa.table({"b": [1, 4, 7, 10]}))


@pytest.mark.parametrize("values", [[], [None], [""], TEXTS], ids=str)
@pytest.mark.parametrize("most", [13, 14, 30, 2**31 - 1])
def test_texts(values: list[str | None], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "MAX_CHUNK_BYTES", most)
    ours = arrow.strings(values)
    ours.validate(full=True)
    assert ours.type == pa.string()
    assert ours.to_pylist() == values
    assert ours.null_count == values.count(None)
    assert (ours.num_chunks > 1) == (sum(len((v or "").encode()) for v in values) > most)


def test_a_text_that_no_array_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "MAX_CHUNK_BYTES", 3)
    assert arrow.strings(["abc", "d"]).to_pylist() == ["abc", "d"]
    with pytest.raises(MemoryError, match="a text of 4 bytes"):
        arrow.strings(["abc", "abcd"])
