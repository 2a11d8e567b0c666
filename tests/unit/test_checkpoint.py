"""Saving and restoring by one rank: what is left after an interruption, and what a full or broken disk says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncflow.errors import CheckpointError
from workers.checkpoint import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it says of one rank


class FakeEngine:
    """One parameter, in place of a model."""

    def __init__(self) -> None:
        self.weight = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


@pytest.fixture(autouse=True)
def _single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointer(run_dir: Path, *, keep_last: int = 2) -> Checkpointer:
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    return Checkpointer(run_dir, keep_last=keep_last, export_hf=False)


def save(saver: Checkpointer, engine: FakeEngine, *steps: int) -> None:
    for step in steps:
        engine.weight.fill_(step)
        saver.save(engine, step=step, meta={"lineage": 0})  # type: ignore[arg-type]  # a fake


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep_last", "left"), [(1, [3]), (2, [2, 3]), (5, [1, 2, 3])])
def test_the_newest_are_kept(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    save(checkpointer(tmp_path, keep_last=keep_last), FakeEngine(), 1, 2, 3)
    assert names(tmp_path) == [f"step_{step:06d}" for step in left]


def test_restored_is_what_was_saved(tmp_path: Path) -> None:
    saver, engine = checkpointer(tmp_path), FakeEngine()
    save(saver, engine, 4)
    random = torch.rand(2)
    engine.weight.fill_(0)
    meta = saver.restore(engine, tmp_path / "checkpoints" / "step_000004")  # type: ignore[arg-type]  # a fake
    assert (meta["step"], meta["lineage"], meta["num_ranks"]) == (4, 0, 1)
    assert engine.weight.tolist() == [4.0] * 3
    assert torch.rand(2).equal(random)


def test_next_start_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    save(checkpointer(tmp_path), FakeEngine(), 3)
    half = tmp_path / "checkpoints" / ".step_000006.tmp" / "dcp"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half of it")
    checkpointer(tmp_path)
    assert names(tmp_path) == ["step_000003"]


def test_interrupted_removal_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpointer(tmp_path, keep_last=1)
    save(saver, FakeEngine(), 1)
    monkeypatch.setattr("workers.checkpoint.shutil.rmtree", lambda *_, **__: None)
    save(saver, FakeEngine(), 2)
    assert names(tmp_path) == [".step_000001.tmp", "step_000002"]


def test_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(CheckpointError, match=r"step_000001: cannot be written \(NotADirectoryError: .* MB are free"):
        save(saver, FakeEngine(), 1)


def test_failed_save_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("of the\nengine")

    saver = checkpointer(tmp_path, keep_last=1)
    save(saver, FakeEngine(), 1)
    with pytest.raises(CheckpointError, match=r"\(RuntimeError: of the engine; "):
        save(saver, Broken(), 2)
    assert names(tmp_path) == [".step_000002.tmp", "step_000001"]
