"""A whole run on `late`: launcher, roles, queue, weights on both paths; its metrics are those of the CPU."""

from pathlib import Path

import pytest

from tests.runs import command

SETTINGS = (
    *("deterministic=true", "schedule.mode=sync", "schedule.rollout_batch_size=8", "checkpoint.interval=2"),
    *("launcher.threads_per_worker=1", "checkpoint.export_hf=false"),
)
COMPARED = ("reward_mean", "response_tokens_mean", "loss", "kl", "entropy", "grad_norm")


def quickstart(cwd: Path, *settings: str) -> list[dict[str, float]]:
    options = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    roles = ("--roles", "rollout:2,actor:2,ref:1")
    done = command.run("--run-dir", "run", "--steps", "3", *roles, *options, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return [{name: line[name] for name in COMPARED} for line in command.lines(cwd / "run" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def of_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return quickstart(tmp_path_factory.mktemp("cpu"), "launcher.device=cpu")


@pytest.mark.parametrize("schedule", ["copies", "kernels"])
@pytest.mark.parametrize("path", ["staged", "broadcast"])
def test_a_run_equals_that_of_the_cpu(
    path: str,
    schedule: str,
    of_the_cpu: list[dict[str, float]],
    late_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (late_env | {"LATE_DEVICE_SCHEDULE": schedule}).items():
        monkeypatch.setenv(name, value)
    metrics = quickstart(tmp_path, "launcher.device=late", f"weightsync.path={path}")
    assert len(metrics) == len(of_the_cpu) == 3
    for one, other in zip(of_the_cpu, metrics, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-5)
    warnings = [file.read_text() for file in (tmp_path / "run").glob("logs/**/*") if file.is_file()]
    assert not any("not broadcast to all" in text for text in warnings), "a transfer broke, and nobody noticed"
