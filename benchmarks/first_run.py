"""What a new user waits for: start-up, the whole quickstart, the 14-process form, memory, --help and --dry-run.

    python benchmarks/first_run.py [--json [FILE]] [--repeat 3]

Runs the installed commands in a temporary directory, one after another, and prints medians:

    first_step_s        from the command to the first line in metrics.jsonl (s)
    total_s             the whole quickstart, to the command's end (s)
    accuracy            mean over the last 5 steps
    first_step_14_s     as first_step_s, with --roles rollout:8,actor:4,ref:2 (s)
    accuracy_14         as accuracy
    peak_memory_gb_14   largest sum of PSS over all processes of that run (GB)
    help_s, dry_run_s   whole command (s)
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from asyncflow.json_lines import LineReader
from benchmarks.json_option import add_json_option, report

COMMAND = Path(sys.executable).parent / "asyncflow-launch"
ROLES_14 = ("--roles", "rollout:8,actor:4,ref:2")
POLL_S = 0.02
MEMORY_EVERY_S = 1.0


@dataclass(frozen=True)
class Run:
    """One finished run."""

    first_step_s: float
    total_s: float
    accuracy: float
    peak_memory_gb: float


def run_quickstart(directory: Path, *arguments: str, watch_memory: bool = False) -> Run:
    """Run the quickstart to its end.

    Args:
        directory: new run directory.
        arguments: more options.
        watch_memory: sample PSS; costs a little time, so not together with timings that count.
    """
    metrics = directory / "metrics.jsonl"
    began = time.monotonic()
    process = subprocess.Popen(
        [COMMAND, "--run-dir", str(directory), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    first_step_s = 0.0
    peak = 0
    sampled_at = 0.0
    while process.poll() is None:
        now = time.monotonic()
        if not first_step_s and metrics.is_file() and metrics.stat().st_size:
            first_step_s = now - began
        if watch_memory and now - sampled_at > MEMORY_EVERY_S:
            peak = max(peak, sum(pss_bytes(pid) for pid in family(process.pid)))
            sampled_at = now
        time.sleep(POLL_S)
    total_s = time.monotonic() - began
    if process.returncode != 0:
        raise SystemExit(f"{COMMAND.name} ended with {process.returncode}: {process.stderr and process.stderr.read()}")
    first_step_s = first_step_s or total_s  # the last look came before the first step
    accuracy = statistics.mean(step["accuracy"] for step in LineReader(metrics).read()[-5:])
    return Run(first_step_s, total_s, accuracy, peak / 1e9)


def family(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    """Return a process's proportional share of memory; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def timed(*arguments: str) -> float:
    """Return the seconds of one command."""
    began = time.monotonic()
    subprocess.run([COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def median(repeat: int, measure: Callable[[], float]) -> float:
    """Return the median of several measurements."""
    return statistics.median(measure() for _ in range(repeat))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        plain = [run_quickstart(root / f"plain-{k}") for k in range(options.repeat)]
        large = [run_quickstart(root / f"large-{k}", *ROLES_14) for k in range(options.repeat)]
        watched = run_quickstart(root / "watched", *ROLES_14, "--steps", "10", watch_memory=True)
        figures["first_step_s"] = statistics.median(run.first_step_s for run in plain)
        figures["total_s"] = statistics.median(run.total_s for run in plain)
        figures["accuracy"] = statistics.median(run.accuracy for run in plain)
        figures["first_step_14_s"] = statistics.median(run.first_step_s for run in large)
        figures["accuracy_14"] = statistics.median(run.accuracy for run in large)
        figures["peak_memory_gb_14"] = watched.peak_memory_gb
        figures["help_s"] = median(options.repeat, lambda: timed("--help"))
        figures["dry_run_s"] = median(options.repeat, lambda: timed("--dry-run"))
    report(options.json, figures, "\n".join(f"{name:20} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
