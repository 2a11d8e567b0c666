"""AsyncFlow under fire: what is killed, stopped, filled up or preempted, and what is left of the run afterwards.

    python benchmarks/chaos [--json [FILE]] [--short] [--only PART ...] [--kills N] [--seed N] [--keep DIR]

    kills         kills skipped twice accuracy    kill -9 of every process of a run, in turn, at random moments
    rollout       detect_s_max recover_s_max      one of four rollouts is killed, another one stopped
    actor         actor_recover_s_max             a rank of the actor is killed
    determinism   sha_equal                       the parameters after a crash and without one
    elastic       skipped twice                   other numbers of ranks, instances and storage units go on
    faults        faults faults_recovered faults_named hangs     full disks, damaged files, users' code at its worst
    slurm         requeues skipped twice          preempted, requeued, resumed by a real Slurm on this machine

What exactly a key means says the part's file. `skipped` and `twice` are sums over the parts. Progress goes to stderr.
Exit status 1 when something was lost or done twice, when something hung, or when a part failed; a missed target of time
is printed. `--short` is what the tests run: a few kills and steps, to see that everything works.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks import need, say_when
from benchmarks.json_option import add_json_option, report

PARTS = ("kills", "rollout", "actor", "determinism", "elastic", "faults", "slurm")
KEYS = (
    "kills", "skipped", "twice", "accuracy", "detect_s_max", "recover_s_max", "actor_recover_s_max", "faults",
    "faults_recovered", "faults_named", "hangs", "sha_equal", "requeues",
)  # fmt: skip
SUMS = ("skipped", "twice")
AT_LEAST = {"kills": 50, "faults": 25, "requeues": 20, "sha_equal": True}
AT_MOST = {"skipped": 0, "twice": 0, "detect_s_max": 5, "recover_s_max": 10, "actor_recover_s_max": 15, "hangs": 0}


def measure(names: list[str], options: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Run parts in order; returns figures, details and what went wrong. A part that fails does not end the others."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {"seconds": {}}
    problems: list[str] = []
    for name in names:
        began = time.monotonic()
        options.say(f"{name} ...")
        try:
            result = import_module(f"benchmarks.chaos.part_{name}").run(options)
        except Exception as error:  # noqa: BLE001 - the boundary of a part
            traceback.print_exc()
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        sums = {key: figures.get(key, 0) + result.figures[key] for key in SUMS if key in result.figures}
        figures |= result.figures | sums
        details |= result.details
        problems += [f"{name}: {problem}" for problem in result.details[name].get("problems", ())]
        details["seconds"][name] = time.monotonic() - began
    return figures, details, problems


def table(figures: dict[str, Any]) -> str:
    """Return one line per figure, with its target."""
    lines = []
    for name in KEYS:
        value = figures.get(name)
        if value is None:
            continue
        wanted, met = "", True
        if name in AT_LEAST:
            wanted, met = f">= {AT_LEAST[name]:g}", value >= AT_LEAST[name]
        elif name in AT_MOST:
            wanted, met = f"<= {AT_MOST[name]:g}", value <= AT_MOST[name]
        lines.append(f"{name:22} {value:10.4g}   {wanted:8}  {'PASS' if met else 'FAIL'}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--short", action="store_true", help="few kills, faults and steps")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help="default: all")
    parser.add_argument("--kills", type=int, help="processes to kill in the part `kills`; default 50, short 8")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when, and of the faults")
    parser.add_argument("--keep", type=Path, help="leave the runs in this directory")
    given = parser.parse_args()
    need("psutil")
    from benchmarks.chaos.options import Options

    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    kept = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory(prefix="chaos-")
    with kept as directory:
        kills = given.kills or (8 if given.short else 50)
        options = Options(given.short, given.seed, kills, Path(directory).resolve(), say_when)
        figures, details, problems = measure([part for part in PARTS if part in given.only], options)
    details["machine"] = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    values = {**{key: figures.get(key) for key in KEYS}, "problems": problems, "details": details}
    report(given.json, values, "\n".join([table(figures), *problems]))
    harmed = any(figures.get(key) for key in ("skipped", "twice", "hangs")) or figures.get("sha_equal") is False
    return 1 if problems or harmed else 0


if __name__ == "__main__":
    sys.exit(main())
