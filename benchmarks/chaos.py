"""AsyncFlow under fire: kill -9 of everything that a run is made of, and what is left of the run afterwards.

python benchmarks/chaos.py [--json] [--short] [--only PART ...] [--kills N] [--seed N]
"""

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = {
    "kills": ("part_kills", "run"),
    "rollout": ("part_rollout", "run"),
    "actor": ("part_actor", "run"),
    "determinism": ("part_determinism", "run"),
    "elastic": ("part_elastic", "run"),
}


def find_packages() -> None:
    here = Path(__file__).resolve().parent
    others = [each for each in sys.path if Path(each or ".").resolve() not in (here, here.parent)]
    sys.path[:] = [*others, str(here.parent), str(here)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help="default: all")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    find_packages()
    from chaos_parts.options import Options

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    figures: dict[str, Any] = {}
    details = {}
    given.keep.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        module, function = PARTS[name]
        result = getattr(import_module(f"chaos_parts.{module}"), function)(
            Options(given.short, given.seed, given.kills, given.keep, say)
        )
        figures |= result.figures
        details |= result.details
    print(json.dumps({**figures, "details": details}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
