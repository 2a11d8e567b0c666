"""Safetensors directories: several files, rows, errors."""

from pathlib import Path

import pytest
import torch

from asyncflow.errors import ConfigError
from workers.engines.hf.weights import HfWeights, write_weights


def test_weights_come_back_from_several_files(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(4, 5) for i in range(5)}
    write_weights(tmp_path, dict.fromkeys(weights, (4, 5)), lambda name: weights[name], file_bytes=170)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    read = HfWeights(tmp_path)
    for name, tensor in weights.items():
        assert read.read(name, (4, 5)).equal(tensor)
        assert read.read_rows(name, (4, 5), 1, 3).equal(tensor[1:3])
        assert read.read_rows(name, (4, 5), 4, 4).shape == (0, 5)
    assert read.find("other", ("w3",)) == "w3" and read.dtype("w3") == torch.float32


def test_wrong_shape_and_broken_file_are_named(tmp_path: Path) -> None:
    write_weights(tmp_path, {"w": (2,)}, lambda _: torch.zeros(2))
    with pytest.raises(ConfigError, match=r"weight w .* \(2,\).*\(3,\)"):
        HfWeights(tmp_path).read("w", (3,))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        HfWeights(tmp_path)
