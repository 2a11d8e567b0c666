"""Which groups a checkpoint's weights were trained on, read from the surviving lines of `ledger.jsonl`. Torch-free.

Mostly those that the steps up to the checkpoint's were admitted with; not where some were in quarantine, or with
`schedule.fill: first_ready`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from asyncflow.errors import ConfigError
from tq.config import ScheduleConfig

LEDGER_FILE = "ledger.jsonl"


def trained_groups(run_dir: Path, schedule: ScheduleConfig, *, completed: int) -> frozenset[int]:
    """Return the ids of the groups that steps 1 .. `completed` trained.

    Args:
        run_dir: with the ledger; lines of later steps, and a last line that was torn, do not count.
        schedule: of the run.
        completed: step of the checkpoint.

    Raises:
        ConfigError: the ledger cannot be read, or does not name as many groups as that many steps have.
    """
    ledger = run_dir / LEDGER_FILE
    if not schedule.lateness and not ledger.exists():  # a checkpoint that was copied without its run
        return frozenset(range(completed * schedule.rollout_batch_size))
    groups = {group for step, group in _lines(ledger) if step <= completed}
    expected = completed * schedule.rollout_batch_size
    if len(groups) != expected:
        raise ConfigError(
            f"{ledger}: names {len(groups)} groups of steps 1 to {completed}, not {expected}, so nobody knows which "
            f"ones are left; restore the file, or start a new run from the checkpoint's hf/ (--set model.path=...)"
        )
    return frozenset(groups)


def _lines(ledger: Path) -> Iterator[tuple[int, int]]:
    """Yield (step, group)."""
    lines = ledger.read_bytes().splitlines() if ledger.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield int(record["step"]), int(record["group"])
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(f"{ledger}:{number}: names no step and group; repair the line") from error
