"""`asyncflow export`: a stopped run gets its Hugging Face directory, without devices or other processes."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.checkpoint_files import CheckpointMeta, damages, describe, files_below
from launcher.cli.commands import main
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.data.model_files import model_fingerprint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(name="model")
def _model(make_model_dir: Callable[..., Path]) -> Path:
    path = make_model_dir(tie_word_embeddings=True)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(name="trained")
def _trained(model: Path) -> dict[str, Tensor]:
    """Weights that differ from the initial ones."""
    return {name: value + 0.5 for name, value in load_file(model / "model.safetensors").items()}


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path: Path, model: Path, trained: dict[str, Tensor]) -> Path:
    """A run with checkpoints of steps 4 and 8 as a stop leaves them."""
    run_dir = tmp_path / "run"
    config = load_config(find_recipe(None), overrides=(f"model.path={model}",))
    for step in (4, 8):
        path = run_dir / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        config.save(path)
        weights = {name: value + step for name, value in trained.items()}
        dcp.save({"model": weights, "optimizer": {"m": torch.zeros(3)}}, checkpoint_id=path / "dcp")
        CheckpointMeta(
            step=step,
            lineage=0,
            model_fingerprint=model_fingerprint(model),
            data_hash="",
            num_ranks=1,
            saved_at=0.0,
            files=describe(path, files_below(path)),
        ).write(path)
    config.save(run_dir)
    return run_dir


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *(str(argument) for argument in arguments)])


def refused(*arguments: object, code: int = 2) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def check_weights(directory: Path, trained: dict[str, Tensor], step: int) -> None:
    weights = load_file(directory / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(weights[name].equal(value + step) for name, value in trained.items())
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(files_below(directory))


def test_newest_checkpoint_gets_its_export_as_if_its_run_had_written_it(
    run_dir: Path, trained: dict[str, Tensor]
) -> None:
    result = run(run_dir)
    path = run_dir / "checkpoints" / "step_000008"
    assert (result.exit_code, result.stdout) == (0, f"wrote {path / 'hf'}\n"), result.output
    check_weights(path / "hf", trained, 8)
    meta = CheckpointMeta.read(path)
    assert meta.has_export and damages(path, meta.files) == {}
    assert files_below(path) == sorted([*meta.files, "meta.json"]), "nothing else is left"
    assert not (run_dir / "checkpoints" / "step_000004" / "hf").exists()
    assert "is there already; to write another one, give --output DIR" in refused(run_dir)


@pytest.mark.parametrize("named", ["4", "step_000004", "path"])
def test_checkpoint_may_be_named_and_the_export_go_elsewhere(
    run_dir: Path, trained: dict[str, Tensor], tmp_path: Path, named: str
) -> None:
    path, target = run_dir / "checkpoints" / "step_000004", tmp_path / "models" / "mine"
    which = (path,) if named == "path" else (run_dir, "--checkpoint", named)
    before = files_below(run_dir)
    assert run(*which, "--output", target).exit_code == 0
    check_weights(target, trained, 4)
    assert [entry.name for entry in target.parent.iterdir()] == ["mine"]
    assert files_below(run_dir) == before
    assert refused(*which, "--output", target).startswith(f"--output: {target} exists")


def test_export_that_was_interrupted_is_made_anew(run_dir: Path, trained: dict[str, Tensor]) -> None:
    """Killed between the two last steps: in place, but not in `meta.json`."""
    path = run_dir / "checkpoints" / "step_000008"
    (path / "hf").mkdir()
    (path / "hf" / "model.safetensors").write_bytes(b"half of it")
    assert run(run_dir).exit_code == 0
    check_weights(path / "hf", trained, 8)


def test_damaged_export_is_written_anew(run_dir: Path, trained: dict[str, Tensor]) -> None:
    assert run(run_dir).exit_code == 0
    weights = run_dir / "checkpoints" / "step_000008" / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = run(run_dir)
    assert result.exit_code == 0 and "is used without its export" in result.stderr
    check_weights(weights.parent, trained, 8)


def test_what_a_killed_export_left_is_removed_but_not_under_a_live_one(
    run_dir: Path, trained: dict[str, Tensor]
) -> None:
    path = run_dir / "checkpoints" / "step_000008"
    left = path / ".hf-export-killed"
    left.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another `asyncflow export` writes it now" in refused(run_dir)
    assert left.is_dir()
    os.close(descriptor)
    assert run(run_dir).exit_code == 0
    assert not left.exists()
    check_weights(path / "hf", trained, 8)


def test_run_of_another_host_writes_its_own_exports(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.run.export.is_live", lambda _: True)
    assert "is running (on another host) and writes its exports itself; give --output DIR" in refused(run_dir)


def test_live_run_writes_its_own_exports(
    run_dir: Path, trained: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.export.running_launcher", lambda _: 17)
    assert "is running (launcher process 17) and writes its exports itself; give --output DIR" in refused(run_dir)
    assert run(run_dir, "--output", tmp_path / "mine").exit_code == 0
    check_weights(tmp_path / "mine", trained, 8)


def test_damaged_shards_are_never_exported(run_dir: Path, trained: dict[str, Tensor]) -> None:
    path = run_dir / "checkpoints" / "step_000008"
    shard = path / "dcp" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "__0_0.distcp was changed" in refused(path, code=1)
    result = run(run_dir)
    assert result.exit_code == 0 and "checkpoint passed over" in result.stderr
    check_weights(run_dir / "checkpoints" / "step_000004" / "hf", trained, 4)


def test_what_cannot_be_exported_is_one_line(run_dir: Path, model: Path, tmp_path: Path) -> None:
    assert "has those of steps 4, 8" in refused(run_dir, "--checkpoint", "5")
    assert refused(tmp_path / "none").startswith("RUN: ")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"hidden_size": ', '"hidden_size": 1'))
    assert "is not the model that" in refused(run_dir)
    (model / "config.json").write_text(config)
    model.rename(tmp_path / "moved")
    assert "takes the tokenizer and the element types of the weights from it" in refused(run_dir)
