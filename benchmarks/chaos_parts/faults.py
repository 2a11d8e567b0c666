"""Seeded faults: full disks, damaged files, stopped and vanished processes, users' code at its worst.

    cd benchmarks && python -m chaos_parts.faults [--seed N] [--only NAME ...] [--json FILE] [--keep DIR] [--list]

Each fault has a run of its own, and ends in recovery or, within 30 s, in an exit code that is not 0 and a last line
that names who and why. Keys: `faults faults_recovered faults_named hangs`, and `each` with a line per fault.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from chaos_parts import faults_of_disks, faults_of_hosts, faults_of_processes, faults_of_users_code
from chaos_parts.fault import Fault, Lab, Outcome, Seen

FAULTS: tuple[Fault, ...] = (
    *faults_of_users_code.FAULTS,
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
        only: names; none: all.
        keep: where runs go that did not end as they should; None: nowhere.
        say: gets a line per fault.
    Returns:
        `faults`: how many; `faults_recovered` and `faults_named`: of those, which ended as they should, by recovery or
        by a named exit; `hangs`: which did not end; `each`: what was expected and seen.
    """
    each = []
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
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


def _inject(fault: Fault, lab: Lab) -> Seen:
    try:
        return fault.inject(lab)
    except (TimeoutError, DistError) as error:  # the run is not where it should be, or gone
        return Seen(Outcome.WRONG, f"{type(error).__name__}: {error}")


def main() -> int:
    """Inject and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], choices=[fault.name for fault in FAULTS])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--keep", type=Path, help="copy runs that did not end as they should into this directory")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{fault.name:42} {fault.expected:10} {fault.what}" for fault in FAULTS))
        return 0
    report = inject_faults(options.seed, only=options.only, keep=options.keep, say=lambda text: print(text, flush=True))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print({name: value for name, value in report.items() if name != "each"})
    return 0 if report["faults_recovered"] + report["faults_named"] == report["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
