"""PPO as a user runs it: a critic in a role of its own, or trained by the actor; its death, and runs that go on."""

from pathlib import Path

import psutil
import pytest

from launcher.verify.verify_report import verify_run

from . import command

pytestmark = pytest.mark.timeout(900)
RECIPE = "quickstart-ppo-cpu"
SMALL = (
    "--set", "schedule.rollout_batch_size=8", "--set", "rollout.batch_size=32", "--set", "actor.micro_batch_size=8",
    "--set", "critic.micro_batch_size=8", "--set", "critic.num_critic_only_steps=2",
)  # fmt: skip


def test_ppo_learns_the_quickstart(tmp_path: Path) -> None:
    finished = command.run(RECIPE, "--run-dir", "run", "--steps", "25", cwd=tmp_path, deadline_s=600)
    assert finished.returncode == 0, finished.stderr
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    accuracy = [line["accuracy"] for line in metrics]
    assert accuracy[0] < 0.5
    assert max(accuracy) >= 0.85
    assert [line["num_updates"] for line in metrics[:3]] == [0, 1, 1]
    assert all(line["critic_num_updates"] == 1 for line in metrics)
    assert metrics[0]["value_mean"] == 0 < metrics[-1]["value_mean"], "the critic begins with nothing"
    command.check_ledger(tmp_path / "run", groups_per_step=64, last=25)


def test_dead_critic_takes_the_actor_back_to_the_checkpoint_of_both(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (*SMALL, "--set", "checkpoint.interval=3", "--roles", "rollout:1,actor:1,critic:2,ref:1")
    with command.started(RECIPE, "--run-dir", "run", "--steps", "14", *settings, cwd=tmp_path) as process:
        command.wait_until(lambda: (run_dir / "checkpoints" / "step_000003").exists(), "a checkpoint", deadline_s=400)
        rollout = pid_of(process.pid, run_dir, "rollout/0.log")
        actor = pid_of(process.pid, run_dir, "actor/0.log")
        command.kill(psutil.Process(pid_of(process.pid, run_dir, "critic/1.log")))
        command.wait_until(lambda: lineage(run_dir) == 1, "a step of the next lineage", deadline_s=400)
        assert pid_of(process.pid, run_dir, "rollout/0.log") == rollout, "rollouts keep their processes"
        assert pid_of(process.pid, run_dir, "actor/0.log") != actor
        _, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
    metrics = command.lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 15))
    assert [line["num_updates"] for line in metrics] == [0, 0] + [1] * 12
    assert all(line["critic_num_updates"] == 1 for line in metrics)
    command.check_ledger(run_dir, groups_per_step=8, last=14)
    forget_an_update(run_dir / "metrics.jsonl")
    report = verify_run(run_dir)
    assert not report.ok and "its critic counts 14 optimizer updates, the metrics 13" in report.as_text()


def test_a_run_goes_on_with_other_ranks_and_with_the_critic_elsewhere(tmp_path: Path) -> None:
    """Its rewards are charged for the divergence, so critic and actor_fwd are roles together or neither is."""
    settings = (*SMALL, "--set", "algorithm.kl_placement=reward")
    apart = "actor:1,critic:1,actor_fwd:1,advantages:1"
    for steps, trainers in ((2, "actor:1,critic:2,actor_fwd:1"), (4, "actor:2"), (6, apart)):
        roles = f"rollout:1,{trainers},ref:1"
        resume = ("--resume", "latest") if steps > 2 else (RECIPE, *settings)
        arguments = ("--run-dir", "run", "--steps", str(steps), "--roles", roles)
        finished = command.run(*resume, *arguments, cwd=tmp_path, deadline_s=400)
        assert finished.returncode == 0, finished.stderr
        command.check_ledger(tmp_path / "run", groups_per_step=8, last=steps)
    metrics = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["critic_num_updates"] for line in metrics] == [1] * 6
    assert [line["num_updates"] for line in metrics] == [0, 0, 1, 1, 1, 1]


def test_critic_of_its_own_and_inside_the_actor_end_with_the_same_bits(tmp_path: Path) -> None:
    """So do advantages in a role of their own, for which the values travel."""
    exact = ("--set", "deterministic=true", "--set", "schedule.mode=periodic", "--set", "algorithm.kl_placement=loss")
    places = (("own", "actor:1,critic:1"), ("inside", "actor:1"), ("apart", "actor:1,critic:1,advantages:2"))
    ends = []
    for name, trainers in places:
        roles = f"rollout:1,{trainers},ref:1"
        arguments = ("--run-dir", name, "--steps", "4", "--roles", roles, *SMALL, *exact)
        finished = command.run(RECIPE, *arguments, cwd=tmp_path, deadline_s=400)
        assert finished.returncode == 0, finished.stderr
        figures = [
            [line[key] for key in ("loss", "grad_norm", "critic_loss", "value_mean", "explained_variance")]
            for line in command.lines(tmp_path / name / "metrics.jsonl")
        ]
        model = tmp_path / name / "checkpoints" / "step_000004" / "hf" / "model.safetensors"
        ends.append((figures, model.read_bytes()))
    for figures, model in ends[1:]:
        assert figures == ends[0][0]
        assert model == ends[0][1]


def test_stop_in_the_middle_saves_actor_and_critic_of_one_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    updates = ("--set", "actor.num_mini_batches=2", "--set", "actor.ppo_epochs=2")
    with command.started(RECIPE, "--run-dir", "run", "--steps", "1000", *SMALL, *updates, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 4, "step 4", deadline_s=400)
        process.terminate()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 75, err
    last = command.last_step(run_dir)
    assert (run_dir / "checkpoints" / f"step_{last:06d}" / "critic").is_dir()
    assert all(line["critic_num_updates"] == 4 for line in command.lines(run_dir / "metrics.jsonl"))
    command.check_ledger(run_dir, groups_per_step=8, last=last)


def test_run_with_advantages_apart_survives_their_death_and_the_critics_and_a_stop(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (*SMALL, "--set", "checkpoint.interval=2", "--set", "checkpoint.export_hf=false")
    roles = ("--roles", "rollout:1,actor:2,critic:2,ref:1,advantages:1")
    with command.started(RECIPE, "--run-dir", "run", "--steps", "1000", *settings, *roles, cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3", deadline_s=400)
        actor = pid_of(process.pid, run_dir, "actor/0.log")
        command.kill(psutil.Process(pid_of(process.pid, run_dir, "advantages/0.log")))
        reached = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) >= reached + 3, "three more steps", deadline_s=400)
        assert pid_of(process.pid, run_dir, "actor/0.log") == actor, "only the dead role starts again"
        command.kill(psutil.Process(pid_of(process.pid, run_dir, "critic/1.log")))
        command.wait_until(lambda: lineage(run_dir) == 1, "a step of the next lineage", deadline_s=400)
        process.terminate()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 75, err
        assert command.HUNG not in err
    last = command.last_step(run_dir)
    assert (run_dir / "checkpoints" / f"step_{last:06d}" / "critic").is_dir()
    command.check_ledger(run_dir, groups_per_step=8, last=last)


def forget_an_update(metrics: Path) -> None:
    """Say of the first step that the critic was not trained."""
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([first.replace('"critic_num_updates": 1', '"critic_num_updates": 0'), *others]))


def pid_of(launcher: int, run_dir: Path, log: str) -> int:
    """Return the process that writes this log."""
    target = run_dir / "logs" / log
    (pid,) = (one.pid for one in command.descendants(launcher) if _output(one.pid) == str(target))
    return pid


def _output(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def lineage(run_dir: Path) -> int:
    metrics = command.lines(run_dir / "metrics.jsonl")
    return metrics[-1]["lineage"] if metrics else 0
