"""A run whose only generator is a process outside, which is killed again and again with prompts in hand."""

import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
GENERATOR = Path(__file__).parents[2] / "examples" / "external_generator.py"
GROUPS = 8
KILLS = 10
LEASES = 3
"""A generator is killed with so many-th lease in hand, so that the run gets on, and weights change, meanwhile."""


def measure(steps: int) -> dict[str, float]:
    """Return the figures of this part."""
    from tests.support.run_files import ledger_faults  # the script makes it importable

    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / "run"
        settings = ("--set", f"schedule.rollout_batch_size={GROUPS}", "--set", "checkpoint.interval=0")
        roles = ("--roles", "rollout:0,actor:1,reward:1", "--steps", str(steps), "--run-dir", str(run_dir))
        launched = subprocess.Popen([COMMAND, *roles, *settings], stdout=subprocess.DEVNULL)
        try:
            while not (run_dir / "job.json").exists() and launched.poll() is None:
                _pause(launched)
            kills = sum(_killed(run_dir) for _ in range(KILLS))
            last = subprocess.Popen([sys.executable, GENERATOR, run_dir], stdout=subprocess.DEVNULL)
            try:
                code = launched.wait()
            finally:
                last.kill()
                last.wait()
        finally:
            launched.kill()
            launched.wait()
        faults = ledger_faults(run_dir, groups_per_step=GROUPS, last=steps)
    return {"external_generator_kills": kills, "exit_code": code, "skipped": faults.skipped, "twice": faults.twice}


def _pause(process: "subprocess.Popen[bytes]", seconds: float = 0.1) -> None:
    """Wait a little, or until a process ends."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _killed(run_dir: Path) -> bool:
    """Start a generator and kill it with a lease in hand; returns whether it had one."""
    process = subprocess.Popen([sys.executable, GENERATOR, run_dir], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    in_hand = [process.stdout.readline() for _ in range(LEASES)]
    process.kill()
    process.communicate()
    return in_hand[-1].startswith("in hand")
