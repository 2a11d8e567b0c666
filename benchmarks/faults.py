"""Seeded faults: full disks, damaged files, stopped and vanished processes, users' code at its worst.

    python benchmarks/faults.py [--seed N] [--only NAME ...] [--json [FILE]] [--keep DIR] [--list]

Each fault has a run of its own, and ends in recovery or, within 30 s, in an exit code that is not 0 and a last line
that names who and why. Keys: `faults faults_recovered faults_named hangs`, and `each` with a line per fault. It mounts
small file systems that nobody else sees, so it needs user namespaces or root. Exit status 1 when one ends otherwise.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from benchmarks import need, say
from benchmarks.json_option import add_json_option, report

need("psutil")

from benchmarks.chaos.faults import chosen_faults, inject_faults  # noqa: E402


def main() -> int:
    """Inject and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="names, or patterns: 'reward_*'")
    add_json_option(parser)
    parser.add_argument("--keep", type=Path, help="copy runs that did not end as they should into this directory")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{fault.name:42} {fault.expected:10} {fault.what}" for fault in chosen_faults(options.only)))
        return 0
    for name in options.only:
        if not chosen_faults([name]):
            parser.error(f"--only: there is no fault {name!r}; see --list")
    found = inject_faults(options.seed, only=options.only, keep=options.keep, say=say)
    report(options.json, found, str({name: value for name, value in found.items() if name != "each"}))
    return 0 if found["faults_recovered"] + found["faults_named"] == found["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
