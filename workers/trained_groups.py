"""Which groups a checkpoint's weights were trained on, and which were filtered out until then, as the surviving lines
of `ledger.jsonl` say. Torch-free.

Mostly those that the steps up to the checkpoint's were admitted with; not where some were in quarantine, or with
`schedule.fill: first_ready`.
"""

from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.json_lines import read_lines
from tq.config import ScheduleConfig
from workers.ledger_file import LEDGER_FILE, LedgerKey


def trained_groups(run_dir: Path, schedule: ScheduleConfig, *, completed: int) -> frozenset[int]:
    """Return the ids of the groups that steps 1 .. `completed` trained.

    Args:
        run_dir: with the ledger; lines of later steps, and a last line that was torn, do not count.
        schedule: of the run.
        completed: step of the checkpoint.

    Raises:
        ConfigError: the ledger cannot be read, or does not name as many groups as that many steps have.
    """
    path = run_dir / LEDGER_FILE
    if not schedule.lateness and not path.exists():  # a checkpoint that was copied without its run
        return frozenset(range(completed * schedule.rollout_batch_size))
    ledger = read_lines(path, lambda _: LedgerKey)
    if ledger.wrong:
        raise ConfigError(f"{ledger.where(ledger.wrong[0][0])}: names no step and group; repair the line")
    groups = {line.group for _, line in ledger.lines if line.step <= completed and not line.replaced}
    expected = completed * schedule.rollout_batch_size
    if len(groups) != expected:
        raise ConfigError(
            f"{path}: names {len(groups)} groups of steps 1 to {completed}, not {expected}, so nobody knows which "
            f"ones are left; restore the file, or start a new run from the checkpoint's hf/ (--set model.path=...)"
        )
    return frozenset(groups)


def filtered_groups(run_dir: Path, *, completed: int) -> frozenset[int]:
    """Return the ids of the groups that were filtered out, as known when step `completed` was finished.

    Raises:
        ConfigError: the ledger cannot be read.
    """
    ledger = read_lines(run_dir / LEDGER_FILE, lambda _: LedgerKey)
    return frozenset(line.group for _, line in ledger.lines if line.step <= completed and line.filtered)
