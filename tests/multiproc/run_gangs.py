"""A launcher process for `test_gang`: `python run_gangs.py RUN_DIR ENTRYPOINT ROLLOUTS ACTOR_RANKS LAUNCHER_JSON`."""

import json
import signal
import sys
import time
from pathlib import Path

from asyncflow.job import GangSpec
from launcher.run.run_job import run_job
from workers.settings.run import RunConfig


def gangs(rollouts: int, actor_ranks: int) -> tuple[GangSpec, ...]:
    """Return one controller, one storage unit, rollouts and an actor."""
    return (
        GangSpec("controller", "controller", 0, 1, ("cpu",)),
        GangSpec("storage-0", "storage", 0, 1, ("cpu",)),
        *(GangSpec(f"rollout-{index}", "rollout", index, 1, ("cpu",)) for index in range(rollouts)),
        GangSpec("actor", "actor", 0, actor_ranks, ("cpu",) * actor_ranks),
    )


def config(launcher: str) -> RunConfig:
    """Return a configuration of which only the launcher's part, given as JSON, counts."""
    return RunConfig.model_validate(
        {
            "steps": 2,
            "roles": {},
            "model": {"path": "none"},
            "data": {"path": "none"},
            "schedule": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "rollout": {"max_response_tokens": 1},
            "launcher": json.loads(launcher),
        }
    )


def main() -> int:
    started_at = time.time()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup, which ignores it for good
    run_dir, entrypoint, rollouts, actor_ranks, launcher = sys.argv[1:]
    return run_job(
        config(launcher),
        gangs(int(rollouts), int(actor_ranks)),
        Path(run_dir),
        resume_from="",
        lineage=0,
        started_at=started_at,
        entrypoint=f"gang_entrypoints:{entrypoint}",
    )


if __name__ == "__main__":
    sys.exit(main())
