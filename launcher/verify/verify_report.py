"""`asyncflow verify`: prove from a run's directory that every group was trained once and every update made once.

    read_records (reads, once) -> CompleteSteps -> one check after another (all pure) -> Report

It never writes anything. It also works on a live run, for everything up to the last complete step.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.verify.ledger_checks import (
    check_admission,
    check_dead_letters,
    check_files,
    check_filtered,
    check_once,
    check_prompts,
    check_rows,
    check_staleness,
    check_tokens,
)
from launcher.verify.records import RunRecords, read_records, readers
from launcher.verify.steps import (
    Check,
    CompleteSteps,
    check_checkpoints,
    check_metrics,
    check_steps,
    check_updates,
)

_CHECKS: tuple[Callable[[CompleteSteps], Check], ...] = (
    check_steps,
    check_once,
    check_rows,
    check_admission,
    check_dead_letters,
    check_filtered,
    check_staleness,
    check_prompts,
    check_tokens,
    check_metrics,
    check_updates,
    check_checkpoints,
)


@dataclass(frozen=True)
class Report:
    """Outcomes of all checks, in order; they cover everything up to `last_step`."""

    run_dir: Path
    live: bool
    last_step: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong; 1: something is."""
        return 0 if self.ok else 1

    def as_json(self) -> str:
        checks = [{**asdict(check), "says": check.outcome, "ok": check.ok} for check in self.checks]
        fields = {"run_dir": str(self.run_dir), "live": self.live, "last_step": self.last_step, "ok": self.ok}
        return json.dumps({**fields, "checks": checks}, indent=2)

    def as_text(self) -> str:
        lines = [line for check in self.checks for line in check.as_lines()]
        return "\n".join([f"{self.run_dir}{' (running)' if self.live else ''}", *lines, self._summary_line()])

    def _summary_line(self) -> str:
        wrong = [check.name for check in self.checks if not check.ok]
        if wrong:
            return f"WRONG: {', '.join(wrong)}"
        if not self.last_step:
            return "ok: no step is complete yet"
        return f"ok: each group of steps 1 to {self.last_step} was trained once, in its step; each update was made once"


def verify_run(run_dir: Path) -> Report:
    """Read a run and check it.

    Raises:
        ConfigError: the directory is not a run, or one of its files cannot be read.
    """
    return verify_records(read_records(run_dir, readers()))


def verify_records(records: RunRecords) -> Report:
    """Check what was read."""
    steps = CompleteSteps.from_records(records)
    checks = (check_files(records), *(check(steps) for check in _CHECKS))
    return Report(records.run_dir, records.live, steps.last, checks)
