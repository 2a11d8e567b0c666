"""All faults, one after the other; `benchmarks/faults.py` and the chaos benchmark inject them."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from benchmarks.chaos import (
    faults_of_disks,
    faults_of_doors,
    faults_of_hosts,
    faults_of_processes,
    faults_of_users_code,
)
from benchmarks.chaos.fault import Fault, Lab, Outcome, Seen

FAULTS: tuple[Fault, ...] = (
    *faults_of_users_code.FAULTS,
    *faults_of_doors.FAULTS,
    *faults_of_processes.FAULTS,
    *faults_of_disks.FAULTS,
    *faults_of_hosts.FAULTS,
)


def inject_faults(
    seed: int,
    *,
    only: Collection[str] = (),
    keep: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Inject one fault after the other.

    Args:
        seed: of what a fault leaves to chance.
        only: names, or patterns such as `reward_*`; none: all.
        keep: where runs go that did not end as they should; None: nowhere.
        say: gets a line per fault.
    Returns:
        `faults`: how many; `faults_recovered` and `faults_named`: of those, which ended as they should, by recovery or
        by a named exit; `hangs`: which did not end; `each`: what was expected and seen.
    """
    each: list[dict[str, Any]] = []
    chosen = chosen_faults(only)
    for fault in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as directory:
            seen = _inject(fault, Lab(Path(directory), random.Random(f"{seed} {fault.name}")))
            good = seen.outcome is fault.expected
            if keep is not None and not good:
                shutil.copytree(directory, keep / fault.name, dirs_exist_ok=True)
        report = {"fault": fault.name, "what": fault.what, "expected": fault.expected, "seen": seen.outcome}
        each.append({**report, "detail": seen.detail, "seconds": round(time.monotonic() - began, 1)})
        say(f"{'PASS' if good else 'FAIL'}  {fault.name}: {seen.outcome}, {seen.detail}")
    as_expected = [Outcome(one["seen"]) for one in each if one["seen"] == one["expected"]]
    return {
        "faults": len(each),
        "faults_recovered": as_expected.count(Outcome.RECOVERED),
        "faults_named": as_expected.count(Outcome.NAMED),
        "hangs": sum(one["seen"] == Outcome.HUNG for one in each),
        "each": each,
    }


def chosen_faults(only: Collection[str]) -> list[Fault]:
    """Return the faults that a name or pattern says; all if there is none."""
    return [fault for fault in FAULTS if not only or any(fnmatchcase(fault.name, each) for each in only)]


def _inject(fault: Fault, lab: Lab) -> Seen:
    try:
        return fault.inject(lab)
    except (TimeoutError, DistError) as error:  # the run is not where it should be, or gone
        return Seen(Outcome.WRONG, f"{type(error).__name__}: {error}")
