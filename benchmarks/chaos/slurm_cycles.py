"""Preempted by Slurm again and again: signal, checkpoint, exit 75, requeue, resume; the ledger is exact each time.

    python benchmarks/chaos/slurm_cycles.py [--cycles 20] [--json FILE]

`benchmarks/chaos` calls `preempt_cycles`. A real Slurm runs on this host (`local_slurm.py`), and its job is one of
`asyncflow sbatch`. Slurm's delay of two minutes before a job that was requeued starts again is skipped.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.local_slurm import COMMAND, LocalSlurm, local_slurm
from tests.support.processes import wait_until
from tests.support.run_files import last_step, ledger_faults

GROUPS_PER_STEP = 8
OPTIONS = (
    "--run-dir", "run", "--steps", "1000000", "--time", "infinite", "--cpus-per-task", "1", "--max-requeues", "1000",
    "--set", f"schedule.rollout_batch_size={GROUPS_PER_STEP}", "--set", "checkpoint.interval=0",
    "--set", "checkpoint.export_hf=false",
)  # fmt: skip
MOST_STEPS = 6
"""A cycle trains 0 to so many steps before the signal. 0: it comes with the launch, or while workers start."""


@dataclass(frozen=True)
class Cycle:
    """One start of the job until it was in the queue again.

    Attributes:
        first, last: the steps that the run had finished when it started and when it was stopped.
        stop_s: from the signal until Slurm had the job back (s).
        skipped, twice: groups in the ledger, see `ledger_faults`.
    """

    first: int
    last: int
    stop_s: float
    skipped: int
    twice: int


def preempt_cycles(number: int, *, seed: int = 0) -> dict[str, Any]:
    """Preempt one job `number` times, let it finish, and compare the ledger after each cycle and at the end.

    Returns:
        `cycles requeues restarts_counted skipped twice steps stop_s_max wall_s finished`; skipped and twice are the
        largest numbers of groups seen.
    """
    began, draw = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory, local_slurm(nodes=2) as slurm:
        cwd = Path(directory)
        run_dir = cwd / "run"
        job = slurm.submit(*OPTIONS, cwd=cwd)
        cycles = []
        for count in range(1, number + 1):
            steps, early = draw.randint(0, MOST_STEPS), draw.random() < 0.5
            cycles.append(_cycle(slurm, job, run_dir, steps=steps, early=early, count=count))
            print(f"cycle {count}: {cycles[-1]}", file=sys.stderr, flush=True)
        slurm.cancel(job)
        slurm.wait_for(job, "CANCELLED")
        restarts = int(slurm.facts(job)["Restarts"])
        last = last_step(run_dir) + 2
        finished = _finish(slurm, cwd, last)
        faults = ledger_faults(run_dir, groups_per_step=GROUPS_PER_STEP, last=last)
        slurm.call(str(COMMAND), "verify", str(run_dir))  # raises when it finds something
    return {
        "cycles": [asdict(cycle) for cycle in cycles],
        "requeues": len(cycles),
        "restarts_counted": restarts,
        "skipped": max(faults.skipped, *(cycle.skipped for cycle in cycles)),
        "twice": max(faults.twice, *(cycle.twice for cycle in cycles)),
        "steps": last,
        "stop_s_max": max(cycle.stop_s for cycle in cycles),
        "wall_s": time.monotonic() - began,
        "finished": finished,
    }


def _cycle(slurm: LocalSlurm, job: int, run_dir: Path, *, steps: int, early: bool, count: int) -> Cycle:
    """Wait for so many steps of this start, send the signal, and see the job queued and started again."""
    slurm.wait_for(job, "RUNNING")
    wait_until(lambda: slurm.has_srun(job), "the step")
    first = last_step(run_dir)
    if steps or not early:
        wait_until((run_dir / "job.json").is_file, "the workers' start")
    wait_until(lambda: last_step(run_dir) >= first + steps, f"step {first + steps}")
    signalled = time.monotonic()
    slurm.preempt(job)
    wait_until(lambda: int(slurm.facts(job)["Restarts"]) >= count, f"requeue {count}")
    stop_s = time.monotonic() - signalled
    last = last_step(run_dir)
    faults = ledger_faults(run_dir, groups_per_step=GROUPS_PER_STEP, last=last)
    slurm.wait_for_restart(job, count)
    return Cycle(first, last, round(stop_s, 2), faults.skipped, faults.twice)


def _finish(slurm: LocalSlurm, cwd: Path, last: int) -> bool:
    """Submit the same script again, to train up to step `last`."""
    words = slurm.call("sbatch", "--parsable", "run/run.sbatch", "--resume", "latest", "--steps", str(last), cwd=cwd)
    return slurm.wait_for(int(words), "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = preempt_cycles(options.cycles, seed=options.seed)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    exact = figures["finished"] and figures["skipped"] == figures["twice"] == 0
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
