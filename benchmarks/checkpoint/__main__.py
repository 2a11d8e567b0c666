"""For how long saving holds training up: ours against a synchronous save, and against one copy of the state.

    python benchmarks/checkpoint [--json [FILE]] [--state-bytes N] [--ranks N] [--rounds N] [--directory DIR]

    stall_s               beginning to save, and waiting for the rest of the copy before the update
    stall_vs_sync         that / the time of `torch.distributed.checkpoint.save` with fsync
    stall_vs_memcpy       that / one copy of a rank's state to warm memory
    step_beside_vs_alone  a step while a checkpoint is written / without one
    written_s             from the beginning until the checkpoint is in place, with checksums
    write_bytes_per_s     of the state
    cpu_s_per_gb          processor time of a save, copy and checksums included, per GB of the state

Each round does everything in turn in the same processes; figures are ratios of medians over the rounds of the slowest
rank. Steps compute for about a second on every rank. Progress goes to stderr.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import add_json_option, report

_TIMEOUT_S = 1800.0


def measure(rank_module: Any, options: Any) -> dict[str, list[float]]:
    """Run the ranks; returns kind -> seconds of every round."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    run = rank_module.run_rank
    ranks = [context.Process(target=run, args=(rank, options, results)) for rank in range(options.num_ranks)]
    for rank in ranks:
        rank.start()
    try:
        measured: dict[str, list[float]] = results.get(timeout=_TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.join(timeout=30)
            rank.kill()
    return measured


def figures_of(measured: dict[str, list[float]], *, state_bytes: int, num_ranks: int) -> dict[str, float]:
    """Return the figures."""
    median = {kind: statistics.median(values) for kind, values in measured.items()}
    return {
        "stall_s": median["stall_s"],
        "sync_stall_s": median["sync_stall_s"],
        "memcpy_s": median["memcpy_s"],
        "stall_vs_sync": median["stall_s"] / median["sync_stall_s"],
        "stall_vs_memcpy": median["stall_s"] / median["memcpy_s"],
        "step_beside_vs_alone": median["step_beside_s"] / median["step_s"],
        "written_s": median["written_s"],
        "write_bytes_per_s": state_bytes / median["written_s"],
        "cpu_s_per_gb": median["cpu_s"] * num_ranks / (state_bytes / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--state-bytes", type=int, default=10**9, help="parameters and moments, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-s", type=float, default=1.0, help="about the length of a step")
    parser.add_argument("--directory", type=Path, help="where to save; default: a temporary directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncflow-", dir=given.directory) as directory:
        rank = import_module("benchmarks.checkpoint.rank")
        options = rank.Options(given.state_bytes, given.ranks, given.rounds, given.step_s, Path(directory))
        print(f"{given.rounds} rounds of {given.state_bytes / 1e9:.2f} GB on {given.ranks} ranks", file=sys.stderr)
        measured = measure(rank, options)
    figures = figures_of(measured, state_bytes=given.state_bytes, num_ranks=given.ranks)
    table = "\n".join(f"{name:22} {value:.4g}" for name, value in figures.items())
    report(given.json, {**figures, "rounds": measured}, table)


if __name__ == "__main__":
    main()
