"""Whole runs of the quickstart on a device: launcher, roles, queue, weights on both paths."""

from pathlib import Path

from tests.runs import command

SETTINGS = (
    *("deterministic=true", "schedule.mode=sync", "schedule.rollout_batch_size=8", "checkpoint.interval=2"),
    *("launcher.threads_per_worker=1", "checkpoint.export_hf=false"),
)
COMPARED = ("reward_mean", "response_tokens_mean", "loss", "kl", "entropy", "grad_norm")
ROLES = "rollout:2,actor:2,ref:1"
CASES = {
    "staged": (ROLES, "weightsync.path=staged"),
    "broadcast": (ROLES, "weightsync.path=broadcast"),
    "resumed": (ROLES, "weightsync.path=staged"),
    "ppo": ("rollout:1,actor:1,critic:1", "algorithm.name=ppo", "algorithm.kl_coef=0"),
    "colocated": ("rollout+actor:2,ref:1", "weightsync.path=staged"),
}
"""Name of a run -> its roles and settings."""


def run_of(case: str, cwd: Path, *, device: str) -> list[dict[str, float]]:
    """Run three steps in `cwd / run`, the third after a resume if the case says so; return what each step measured."""
    roles, *settings = CASES[case]
    options = [word for one in (*SETTINGS, f"launcher.device={device}", *settings) for word in ("--set", one)]
    start = ["--run-dir", "run", "--roles", roles, *options]
    _run(cwd, *start, "--steps", "2" if case == "resumed" else "3")
    if case == "resumed":
        _run(cwd, "--run-dir", "run", "--resume", "latest", "--steps", "3")
    lines = command.lines(cwd / "run" / "metrics.jsonl")
    assert len(lines) == 3
    return [{name: line[name] for name in COMPARED} for line in lines]


def _run(cwd: Path, *arguments: str) -> None:
    done = command.run(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
