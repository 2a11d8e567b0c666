"""The weight path against raw Gloo, memcpy and kill -9: one agent, two trainer ranks, one to four generators, all real.

    python benchmarks/weightsync [--json [FILE]] [--only KEY ...] [--model-bytes N] [--kills N] [--long] ...

    sync_vs_gloo_broadcast            bandwidth of an update by broadcast, publish to loaded / of raw Gloo
    async_vs_sync_exposed             longest time that any role is blocked by an update, staged / broadcast
    async_trainer_stall_vs_memcpy     inside `publish` and `before_update`, staged / one copy of the rank's shards
    async_generator_stall_vs_memcpy   inside `load` / one copy of the model
    staged_copies_per_version         memory of the slots over all processes / slots that were written
    updates mixed_reads               versions while four receivers generate; outputs of other weights than they claim
    kills kills_survived              kill -9 in the middle of a transfer; after how many everybody went on in time
    delta_bytes_vs_full               real GRPO updates at lr 1e-6 in bfloat16
    node_pull_vs_gloo                 a version from node to node / raw Gloo with as many pairs (network namespaces)
    node_cpu_s_per_gb                 processor seconds of both agents per 10^9 bytes; node_cpu_floor_s_per_gb: raw Gloo
    node_pull_vs_link                 a version from node to node / a link of --link-gbit

Ratios of medians, measured in turn in the same processes. Figures are of the synthetic model with four receivers; the
135M-parameter model and one receiver are in the details. What exactly counts is in each part's file. Progress goes to
stderr. Exit status 1 only when weights were mixed or a kill was not survived; a missed target is printed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks import say_when
from benchmarks.json_option import add_json_option, report

PARTS = {
    "part_paths": ("sync_vs_gloo_broadcast", "async_vs_sync_exposed"),
    "part_stalls": (
        "async_trainer_stall_vs_memcpy", "async_generator_stall_vs_memcpy", "staged_copies_per_version",
    ),
    "part_updates": ("updates", "mixed_reads"),
    "part_kills": ("kills", "kills_survived"),
    "part_delta": ("delta_bytes_vs_full",),
    "part_nodes": ("node_pull_vs_gloo", "node_cpu_s_per_gb", "node_cpu_floor_s_per_gb", "node_pull_vs_link"),
}  # fmt: skip
KEYS = (
    "sync_vs_gloo_broadcast", "async_trainer_stall_vs_memcpy", "async_generator_stall_vs_memcpy",
    "async_vs_sync_exposed", "staged_copies_per_version", "updates", "mixed_reads", "kills", "kills_survived",
    "delta_bytes_vs_full", "node_pull_vs_gloo", "node_cpu_s_per_gb", "node_cpu_floor_s_per_gb", "node_pull_vs_link",
)  # fmt: skip
AT_LEAST = {
    "sync_vs_gloo_broadcast": 0.6, "updates": 100, "kills": 50, "node_pull_vs_gloo": 0.6, "node_pull_vs_link": 0.9,
}  # fmt: skip
AT_MOST = {
    "async_trainer_stall_vs_memcpy": 1.3,
    "async_generator_stall_vs_memcpy": 1.3,
    "async_vs_sync_exposed": 0.1,
    "staged_copies_per_version": 1.05,
    "mixed_reads": 0,
    "node_cpu_s_per_gb": 1.0,
}


def measure(keys: list[str], options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the parts that give these keys; returns figures and details."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {"seconds": {}}
    wanted: list[tuple[str, str]] = [(name, "run") for name, given in PARTS.items() if set(given) & set(keys)]
    if options.trace is not None:
        wanted.append(("part_stalls", "trace"))
    for name, function in wanted:
        began = time.monotonic()
        options.say(f"{name.removeprefix('part_')} ...")
        part: Callable[..., Any] = getattr(import_module(f"benchmarks.weightsync.{name}"), function)
        result = part(options)
        figures |= result.figures
        details |= result.details
        details["seconds"][f"{name}.{function}"] = time.monotonic() - began
    return figures, details


def table(figures: dict[str, Any]) -> str:
    """Return one line per figure, with its target."""
    lines = []
    for name in KEYS:
        value = figures.get(name)
        if value is None:
            continue
        if name == "kills_survived":
            wanted, met = f"== {figures['kills']}", value == figures["kills"]
        elif name in AT_LEAST:
            wanted, met = f">= {AT_LEAST[name]:g}", value >= AT_LEAST[name]
        elif name in AT_MOST:
            wanted, met = f"<= {AT_MOST[name]:g}", value <= AT_MOST[name]
        else:
            wanted, met = "", True
        lines.append(f"{name:32} {value:10.4g}   {wanted:8}  {'PASS' if met else 'FAIL'}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--only", nargs="*", choices=KEYS, metavar="KEY", default=list(KEYS), help="default: all")
    parser.add_argument(
        "--model-bytes",
        type=int,
        default=1_000_000_000,
        help="of the synthetic model, in bfloat16; updates take 25 MB of it at most, kills 50 MB",
    )
    parser.add_argument("--bucket-bytes", type=int, default=64 * 2**20, help="of timed transfers")
    parser.add_argument("--link-gbit", type=float, default=10.0, help="of the limited link between two nodes (Gb/s)")
    parser.add_argument("--kills", type=int, default=50, help="processes to kill")
    parser.add_argument("--long", action="store_true", help="three times the rounds and updates")
    parser.add_argument("--trace", type=Path, help="also write one staged update as a Chrome trace")
    given = parser.parse_args()
    from benchmarks.weightsync.options import Options

    with tempfile.TemporaryDirectory(prefix="weightsync-") as temporary:
        options = Options(
            given.model_bytes,
            given.bucket_bytes,
            given.long,
            given.kills,
            given.trace,
            Path(temporary),
            say_when,
            given.link_gbit,
        )
        figures, details = measure(given.only, options)
    details["machine"] = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    report(given.json, {**{key: figures.get(key) for key in KEYS}, "details": details}, table(figures))
    return 1 if figures.get("mixed_reads") or figures.get("kills") != figures.get("kills_survived") else 0


if __name__ == "__main__":
    sys.exit(main())
