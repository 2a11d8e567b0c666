"""A run ends in every way that users end runs, and goes on where it was."""

import contextlib
import math
import signal
from pathlib import Path

import psutil
import pytest

from asyncflow.checkpoint_files import CheckpointMeta

from . import command

SHARED_MEMORY = Path("/dev/shm")
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0")
NO_RESTARTS = ("--set", "launcher.max_restarts=0", "--set", "launcher.max_global_restarts=0")
DETERMINISTIC = (
    *SMALL, "--roles", "rollout:1,actor:1,ref:1", "--set", "schedule.mode=sync", "--set", "rollout.samples_per_step=0",
)  # fmt: skip


@pytest.mark.timeout(900)
def test_resume_continues_optimizer_cursor_and_metrics(tmp_path: Path) -> None:
    whole = command.run("--run-dir", "whole", "--steps", "8", *DETERMINISTIC, cwd=tmp_path)
    first = command.run("--run-dir", "parts", "--steps", "4", *DETERMINISTIC, cwd=tmp_path)
    second = command.run("--resume", "latest", "--run-dir", "parts", "--steps", "8", cwd=tmp_path)
    assert (whole.returncode, first.returncode, second.returncode) == (0, 0, 0), second.stderr
    expected = command.lines(tmp_path / "whole" / "metrics.jsonl")
    resumed = command.lines(tmp_path / "parts" / "metrics.jsonl")
    assert [line["step"] for line in resumed] == list(range(1, 9))
    assert [line["lineage"] for line in resumed] == [0] * 4 + [1] * 4
    for one, other in zip(expected, resumed, strict=True):
        assert math.isclose(one["reward_mean"], other["reward_mean"], rel_tol=1e-6)
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3)
    command.check_ledger(tmp_path / "parts", groups_per_step=8, last=8)


def test_other_numbers_of_ranks_may_resume(tmp_path: Path) -> None:
    first = command.run("--run-dir", "run", "--steps", "3", "--roles", "rollout:2,actor:2,ref:1", *SMALL, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    roles = ("--roles", "rollout:1,actor:1", "--set", "tq.num_storage_units=3")
    second = command.run("--resume", "run", "--steps", "6", *roles, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_saves_the_last_step_and_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        family = command.descendants(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=command.DEADLINE_S)
        assert process.returncode == 75, err
        assert command.HUNG not in out + err
        assert "--resume" in out
        assert "has no hf/ (the run was stopped); a resume adds it, or `asyncflow export" in out
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of all processes")
    last = command.last_step(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    assert not (run_dir / "job.json").exists()
    stopped = run_dir / "checkpoints" / f"step_{last:06d}"
    assert not CheckpointMeta.read(stopped).has_export
    resumed = command.run("--resume", "latest", "--run-dir", "run", "--steps", str(last + 2), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert CheckpointMeta.read(stopped).has_export, "made beside training"
    assert CheckpointMeta.read(run_dir / "checkpoints" / f"step_{last + 2:06d}").has_export, "as at every normal end"
    command.check_ledger(run_dir, groups_per_step=8, last=last + 2)


def test_signal_to_every_process_of_a_run_stops_it_like_one_to_the_launcher(tmp_path: Path) -> None:
    """Slurm signals all processes of a step: TERM when it preempts the job, USR1 as `srun` hands it on."""
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        family = command.descendants(process.pid)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
            process.send_signal(number)
        out, err = process.communicate(timeout=command.DEADLINE_S)
    assert (process.returncode, err) == (75, "")
    assert out.splitlines()[-1].startswith("stopped (step ")
    command.check_ledger(run_dir, groups_per_step=8, last=command.last_step(run_dir))


def test_kill_of_the_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(tmp_path / "run") >= 2, "step 2")
        family = command.descendants(process.pid)
        names = [path for one in family for path in shared_memory(one)]
        process.kill()
        command.wait_until(lambda: not any(one.is_running() for one in family), "the end of workers")
    command.wait_until(lambda: not any(path.exists() for path in names), "the end of shared memory")


def shared_memory(process: psutil.Process) -> list[Path]:
    """Return the named pieces of shared memory that a process maps; what is not named ends with it."""
    mapped = [Path(one.path) for one in process.memory_maps()]
    return [path for path in mapped if path.is_relative_to(SHARED_MEMORY)]


@pytest.mark.parametrize("role", ["rollout-1", "actor", "controller-0"])
def test_killed_worker_that_may_not_start_again_ends_the_run_and_is_named(tmp_path: Path, role: str) -> None:
    run_dir = tmp_path / "run"
    with command.started("--run-dir", "run", "--steps", "100000", *SMALL, *NO_RESTARTS, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 2, "step 2")
        command.kill_gang(process.pid, run_dir, role)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert role.split("-")[0] in err.splitlines()[-1]
        assert "SIGKILL" in err.splitlines()[-1]
    command.check_ledger(run_dir, groups_per_step=8, last=command.last_step(run_dir))
