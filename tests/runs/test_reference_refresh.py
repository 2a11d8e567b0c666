"""The reference follows the policy every N steps, and a resumed run goes on with the right one."""

import math
from pathlib import Path

import pytest

from . import command

DETERMINISTIC = (
    "--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--set", "schedule.mode=sync",
    "--set", "rollout.samples_per_step=0", "--set", "algorithm.kl_coef=0.1",
)  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("roles", "shards"), [("rollout:1,actor:1,ref:1", 1), ("rollout:1,actor:1,ref:2", 2), ("rollout:1,actor:1", 1)]
)
def test_refreshed_reference_survives_a_resume(tmp_path: Path, roles: str, shards: int) -> None:
    shared = ("--set", "ref.engine=fsdp", "--set", f"ref.shards={shards}") if shards > 1 else ()
    every_3 = (
        *DETERMINISTIC,
        *shared,
        "--roles",
        roles,
        "--set",
        "algorithm.ref_update_interval=3",
        "--set",
        "weightsync.max_updating=1",
    )
    whole = command.run("--run-dir", "whole", "--steps", "8", *every_3, cwd=tmp_path)
    first = command.run("--run-dir", "parts", "--steps", "5", *every_3, cwd=tmp_path)
    second = command.run("--resume", "latest", "--run-dir", "parts", "--steps", "8", cwd=tmp_path)
    assert (whole.returncode, first.returncode, second.returncode) == (0, 0, 0), second.stderr
    assert (tmp_path / "parts" / "checkpoints" / "step_000005" / "reference").is_dir()
    expected = command.lines(tmp_path / "whole" / "metrics.jsonl")
    resumed = command.lines(tmp_path / "parts" / "metrics.jsonl")
    assert [line["step"] for line in resumed] == list(range(1, 9))
    for one, other in zip(expected, resumed, strict=True):
        assert math.isclose(one["kl"], other["kl"], rel_tol=1e-3, abs_tol=1e-6), one["step"]
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3), one["step"]
    # The reference of steps 4 and 7 is the policy that wrote their responses: no divergence yet.
    assert [line["step"] for line in expected if line["kl"] < 1e-6] == [1, 4, 7]
