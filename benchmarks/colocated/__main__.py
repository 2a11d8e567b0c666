"""Roles that take turns on the same devices (`--roles rollout+actor:N`), beside roles with devices of their own.

    python benchmarks/colocated [--json [FILE]] [--short] [--only PART ...] [--kills N] [--seed N] [--predicted]
                                [--plot FILE]

    separate   colocated_vs_separate_max_abs    the parameters of a colocated run minus those of a separated one
               vllm_same_greedy_tokens          the responses of both, with vLLM, where it is installed
    turns      turn_overhead                    time that passing the turn takes, without copies, as a share of a step
    kills      kills skipped twice              kill -9 of the role that has the devices, and of the sleeper
    handover   handover_bus_x    bytes that a load takes from host memory where devices share theirs, by those elsewhere
    memory     colocated_resident_x swap_vs_memcpy vllm_order_refusals     what sleeping engines keep, and how fast
    ideal      colocated_of_ideal separated_of_ideal separated_x           `sim` engines against what is possible
               planner_wrong_signs                     how often the planner names the slower of two forms

What exactly a key means says the part's file. Progress goes to stderr. Exit status 1 when a part failed, or when
something was lost, done twice, or different.
"""

import argparse
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and `tests`

from benchmarks import need, say_when
from benchmarks.json_option import add_json_option, report

PARTS = ("separate", "turns", "kills", "handover", "memory", "ideal")
AT_MOST = {
    "colocated_vs_separate_max_abs": 0, "turn_overhead": 0.03, "skipped": 0, "twice": 0, "colocated_resident_x": 0.05,
    "swap_vs_memcpy": 1.3, "handover_bus_x": 0, "planner_wrong_signs": 0, "planner_wrong_signs_of_ideal": 0,
}  # fmt: skip
AT_LEAST = {
    "kills": 10, "colocated_of_ideal": 0.95, "separated_of_ideal": 0.95, "vllm_same_greedy_tokens": 1,
    "colocated_same_bits": 1,
}  # fmt: skip
MUST_BE_ZERO = ("colocated_vs_separate_max_abs", "skipped", "twice", "handover_bus_x", "planner_wrong_signs")


def measure(names: list[str], **options: Any) -> tuple[dict[str, float], list[str]]:
    """Run parts in order; returns figures and what went wrong. A part that fails does not end the others."""
    figures: dict[str, float] = {}
    problems: list[str] = []
    for name in names:
        say_when(f"{name} ...")
        try:
            figures |= import_module(f"benchmarks.colocated.part_{name}").run(**options)
        except Exception as error:  # noqa: BLE001 - the boundary of a part
            traceback.print_exc()
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return figures, problems


def table(figures: dict[str, float]) -> str:
    """Return one line per figure, with its target."""
    lines = []
    for name, value in figures.items():
        wanted, met = "", True
        if name in AT_LEAST:
            wanted, met = f">= {AT_LEAST[name]:g}", value >= AT_LEAST[name]
        elif name in AT_MOST:
            wanted, met = f"<= {AT_MOST[name]:g}", value <= AT_MOST[name]
        lines.append(
            f"{name:32} {value:10.4g}   {wanted:8}  {'' if not wanted else 'PASS' if met else 'FAIL'}".rstrip()
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--short", action="store_true", help="few kills and steps")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help="default: all")
    parser.add_argument("--kills", type=int, default=10, help="in the part `kills`")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parser.add_argument("--predicted", action="store_true", help="in the part `ideal`: only compare predictions")
    parser.add_argument("--plot", type=Path, help="in the part `ideal`: draw the ratios into this file")
    given = parser.parse_args()
    need("psutil")
    with tempfile.TemporaryDirectory(prefix="colocated-") as directory:
        figures, problems = measure(
            [part for part in PARTS if part in given.only],
            short=given.short, num_kills=given.kills, seed=given.seed, directory=Path(directory).resolve(),
            launched=not given.predicted, plot=given.plot,
        )  # fmt: skip
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    report(given.json, {**figures, "problems": problems, "machine": machine}, "\n".join([table(figures), *problems]))
    return 1 if problems or any(figures.get(key) for key in MUST_BE_ZERO) else 0


if __name__ == "__main__":
    sys.exit(main())
