"""Checkpoints of whole runs: other numbers of everything may go on from one; a full disk costs a warning."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import command

SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "algorithm.kl_coef=0.01")
MANY = ("--roles", "rollout:4,actor:2,ref:1", "--set", "tq.num_storage_units=3")
FEW = ("--roles", "rollout:2,actor:1", "--set")
DETERMINISTIC = ("--set", "deterministic=true", "--set", "schedule.mode=periodic", "--set", "checkpoint.interval=0")


@pytest.mark.timeout(900)
def test_loss_goes_on_with_half_the_ranks_and_any_number_of_units(tmp_path: Path) -> None:
    """Compared with a run that was never stopped, from which they differ by the order in which two ranks add up; with
    as many ranks as before there is no difference at all."""
    arguments = (*SMALL, *MANY, *DETERMINISTIC)
    for name, steps in (("whole", "6"), ("one", "4")):
        done = command.run("--run-dir", name, "--steps", steps, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for name in ("five", "same"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    same = command.run("--resume", "same", "--steps", "6", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    weights = [
        tmp_path / name / "checkpoints" / "step_000006" / "hf" / "model.safetensors" for name in ("whole", "same")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    expected = command.lines(tmp_path / "whole" / "metrics.jsonl")
    for name, units in (("one", 1), ("five", 5)):
        done = command.run("--resume", name, "--steps", "6", *FEW, f"tq.num_storage_units={units}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        command.check_ledger(tmp_path / name, groups_per_step=8, last=6)
        resumed = command.lines(tmp_path / name / "metrics.jsonl")
        assert [line["lineage"] for line in resumed] == [0] * 4 + [1] * 2
        for one, other in zip(expected, resumed, strict=True):
            for key in ("loss", "kl", "grad_norm", "reward_mean"):
                assert abs(one[key] - other[key]) < 1e-5, (name, one["step"], key)


def test_finished_samples_of_the_queue_are_used_by_other_numbers_of_everything(tmp_path: Path) -> None:
    ahead = ("--set", "schedule.max_staleness=2", "--set", "checkpoint.interval=2")
    first = command.run("--run-dir", "run", "--steps", "5", *SMALL, *MANY, *ahead, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = command.run(
        "--resume", "run/checkpoints/step_000004", "--steps", "8", *FEW, "tq.num_storage_units=5", cwd=tmp_path
    )
    assert second.returncode == 0, second.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=8)
    told = (tmp_path / "run" / "logs" / "controller" / "0.log").read_text()
    assert "finished samples of the checkpoint are used" in told
    versions = [line["versions"] for line in command.lines(tmp_path / "run" / "ledger.jsonl") if line["step"] == 5]
    assert min(oldest for oldest, _ in versions) < 4, "generated before the checkpoint, trained after it"


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """Put a file system of its own under a directory."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(path: Path) -> None:
    """Leave no room on the disk that `path` is on."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def failures(run_dir: Path) -> int:
    metrics = command.lines(run_dir / "metrics.jsonl")
    return metrics[-1]["checkpoint_failures"] if metrics else 0


def steps_saved(run_dir: Path, pattern: str = "*step_*") -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob(pattern))


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount")
@pytest.mark.parametrize("room_again", [True, False])
def test_full_disk_costs_a_warning_and_only_the_last_save_must_succeed(tmp_path: Path, room_again: bool) -> None:
    run_dir = tmp_path / "run"
    arguments = (*SMALL, "--roles", "rollout:2,actor:2", "--set", "checkpoint.interval=10")
    with command.started("--run-dir", "run", "--steps", "100000", *arguments, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 1, "step 1")
        with small_disk(run_dir / "checkpoints", "40m"):
            command.wait_until(lambda: bool(steps_saved(run_dir, "step_*")), "the first checkpoint")
            ballast = run_dir / "checkpoints" / "ballast"
            fill(ballast)
            command.wait_until(lambda: failures(run_dir) >= 2, "saves that fail")
            assert process.poll() is None
            left, complete = steps_saved(run_dir), steps_saved(run_dir, "step_*")
            assert complete
            if room_again:
                ballast.unlink()
                command.wait_until(lambda: set(steps_saved(run_dir)).isdisjoint(left), "newer checkpoints")
            process.terminate()
            _, err = process.communicate(timeout=60)
            last = command.last_step(run_dir)
            if room_again:
                assert process.returncode == 75, err
                assert f"step_{last:06d}" in steps_saved(run_dir)
            else:
                assert process.returncode == 1
                line = err.splitlines()[-1]
                assert "actor rank" in line and "No space left on device" in line
                assert f"to {last} are lost; correct that and resume" in line
                assert steps_saved(run_dir, "step_*") == complete
    command.check_ledger(run_dir, groups_per_step=8, last=last)
