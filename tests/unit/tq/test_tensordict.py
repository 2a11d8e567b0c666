"""Columns go out as a TensorDict, and come back from one as they were."""

import sys
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError
from tq.client.arguments import as_columns
from tq.columns import Column, PackedBatch

COLUMNS = {
    "scores": Column.of_scalars(torch.tensor([0.5, 1.0])),
    "tokens": Column.of_rows([torch.tensor([1, 2, 3]), torch.tensor([4])]),
    "images": Column.of_dense(torch.arange(12).reshape(2, 3, 2)),
    "texts": Column.of_texts(["a", "b"]),
    "facts": Column.of_values([{"turns": 1}, {"turns": 2}]),
}
BATCH = PackedBatch((7, 8), COLUMNS)


def test_what_goes_out_comes_back() -> None:
    pytest.importorskip("tensordict", reason="pip install tensordict")
    out: Any = BATCH.to_tensordict()
    assert (tuple(out.batch_size), out["images"].shape) == ((2,), (2, 3, 2))
    assert [row.tolist() for row in out["tokens"].unbind()] == [[1, 2, 3], [4]]
    columns, number = as_columns(out)
    assert number == 2
    for name, column in COLUMNS.items():
        back = columns[name]
        assert (back.kind, back.values.dtype) == (column.kind, column.values.dtype)
        for one, other in zip(back, column, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    monkeypatch.setattr("tq.columns.pip_line", lambda extra: f"pip install {extra}")
    with pytest.raises(ConfigError, match="pip install tensordict"):
        BATCH.to_tensordict()
