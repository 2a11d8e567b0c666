"""Safetensors directories: several files, rows, errors."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncflow.errors import ConfigError
from workers.data.model_files import INDEX_FILE
from workers.engines.hf.weights import HfWeights, copy_without_weights, write_weights


def test_weights_come_back_from_several_files(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(4, 5) for i in range(5)}
    write_weights(tmp_path, dict.fromkeys(weights, (4, 5)), lambda name: weights[name], file_bytes=170)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    read = HfWeights(tmp_path)
    for name, tensor in weights.items():
        assert read.read_rows(name, (4, 5), 0, 4).equal(tensor)
        assert read.read_rows(name, (4, 5), 1, 3).equal(tensor[1:3])
        assert read.read_rows(name, (4, 5), 4, 4).shape == (0, 5)
    assert read.find_name("other", ("w3",)) == "w3" and read.dtype("w3") == torch.float32


def test_wrong_shape_and_broken_file_are_named(tmp_path: Path) -> None:
    write_weights(tmp_path, {"w": (2,)}, lambda _: torch.zeros(2))
    with pytest.raises(ConfigError, match=r"weight w .* \(2,\).*\(3,\)"):
        HfWeights(tmp_path).read_rows("w", (3,), 0, 3)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"^critic.path: .*model\.safetensors is not a complete safetensors file"):
        HfWeights(tmp_path, key="critic.path")


def test_weights_are_those_of_the_model_whatever_lies_beside(tmp_path: Path) -> None:
    write_weights(tmp_path, {"w": (2,)}, lambda _: torch.ones(2))
    for name in ("model_old.safetensors", "a.safetensors", "model-00001-of-00002.safetensors"):
        save_file({"w": torch.zeros(2), "v": torch.zeros(2)}, tmp_path / name)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    weights = HfWeights(tmp_path)
    assert weights.read_rows("w", (2,), 0, 2).equal(torch.ones(2)) and "v" not in weights


def test_copy_of_a_directory_is_no_adapter(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "adapter_config.json", "adapter_model.safetensors", "model.safetensors", INDEX_FILE):
        (source / name).write_text("{}")
    copy_without_weights(source, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v": torch.ones(2)}, r"^critic.path: .* holds v, for which Model has no weight"),
        ({"w": torch.ones(2, dtype=torch.int8)}, r"^critic.path: .* is quantized: w has elements of type I8"),
        ({"tied": torch.zeros(2)}, r"^critic.path: .* holds w and, with other values, tied"),
    ],
)
def test_tensor_that_is_not_used_as_what_it_is_is_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor], message: str
) -> None:
    stored = {"w": torch.ones(2), "tied": torch.ones(2), "old.inv_freq": torch.ones(1), "head": torch.ones(3)}
    names = {"w": ("tied",), "not there": ()}
    for extra in ({}, changed):
        save_file({**stored, **extra}, tmp_path / "model.safetensors")
        weights = HfWeights(tmp_path, key="critic.path")
        if extra:
            with pytest.raises(ConfigError, match=message):
                weights.check_used(names, model="Model", unused=["head"], ignored=re.compile("inv_freq"))
        else:
            weights.check_used(names, model="Model", unused=["head"], ignored=re.compile("inv_freq"))
    with pytest.raises(ConfigError, match="holds head, old.inv_freq"):
        save_file(stored, tmp_path / "model.safetensors")
        HfWeights(tmp_path).check_used(names, model="Model")
