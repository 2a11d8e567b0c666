"""One launcher of a run on several nodes: `python run_launcher.py RUN_DIR ENTRYPOINT NODES RANK LAUNCHER_JSON`.

Every node has an actor rank and a rollout; node 0 the controller, the last one the storage unit.
"""

import signal
import sys
import time
from pathlib import Path

from run_gangs import config

from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.job import GangSpec
from launcher.nodes.node_run import NodeRun
from launcher.nodes.options import NodePlace
from launcher.run.run_job import run_job


def gangs(count: int) -> tuple[GangSpec, ...]:
    """Return the run's gangs."""
    return (
        GangSpec("controller", "controller", 0, 1, ("cpu",)),
        GangSpec("storage-0", "storage", 0, 1, ("cpu",), (count - 1,)),
        *(GangSpec(f"rollout-{node}", "rollout", node, 1, ("cpu",), (node,)) for node in range(count)),
        GangSpec("actor", "actor", 0, count, ("cpu",) * count, tuple(range(count))),
    )


def main() -> int:
    started_at = time.time()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    run_dir, entrypoint, count, rank, launcher = sys.argv[1:]
    place = NodePlace(int(count), int(rank))
    settings = config(launcher)
    try:
        if not place.is_head:
            return NodeRun(place, Path(run_dir), settings.launcher, entrypoint=entrypoint).start()
        Path(run_dir).mkdir(exist_ok=True)
        return run_job(
            settings,
            gangs(place.count),
            Path(run_dir),
            resume_from="",
            lineage=0,
            started_at=started_at,
            entrypoint=entrypoint,
            place=place,
        )
    except AsyncFlowError as error:
        print(f"Error: {error}")
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
