"""TransferQueue against its peer, raw Gloo, memcpy, many clients and kill -9.

    python benchmarks/transferqueue [--json [FILE]] [--peer-python PATH] [--only PART ...] [--faults N] [--quick]
                                       [--before TREE]

Parts and the figures that they give (`x`: times the peer's; all are ratios of medians over alternating rounds):

    peer       put_rows_16_x get_rows_16_x put_rows_64_x get_rows_64_x put_bytes_288mb_x get_bytes_288mb_x
    offhost    offhost_vs_gloo          the slower of put and get of 64 MB without shared memory
    samehost   samehost_vs_memcpy       the slower of put and get of 64 MB through shared memory
    latency    latency_vs_gloo_rtt      one row, from its put to its data at a consumer that waits
    control    control_1m_vs_10k        a request for 64 rows with 1,000,000 rows against 10,000
    wire       wire_bytes_vs_payload    whole messages against the values in them
    scale      -                        64 clients; 1, 2, 4 units; 1,000 simulated clients
    replica    -                        requests with and without fetch-once-per-replica
    journal    journal_put_1_ms journal_put_64_x journal_put_16mb_x   what it costs that rows outlive their unit
    faults     faults rows_lost rows_untold rows_twice rows_corrupt

The peer needs an environment of its own: python -m venv PEER; PEER/bin/pip install torch==2.13.0 transferqueue ray
Exit status 1 only when rows were lost, told or untold, acked twice or damaged; a missed target is printed.
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
from benchmarks.json_option import add_json_option, report, write_json
from benchmarks.transferqueue.part import Result, Settings

PARTS = {
    "wire": ("wire_bytes", "run"),
    "control": ("control_cost", "run"),
    "latency": ("latency", "run"),
    "samehost": ("transfers", "run_samehost"),
    "offhost": ("transfers", "run_offhost"),
    "peer": ("against_peer", "run"),
    "scale": ("many_clients", "run"),
    "replica": ("replica_requests", "run"),
    "journal": ("journal_price", "run"),
    "faults": ("faults", "run"),
}
AT_LEAST = {
    "put_rows_16_x": 8.0,
    "get_rows_16_x": 8.0,
    "put_rows_64_x": 8.0,
    "get_rows_64_x": 8.0,
    "put_bytes_288mb_x": 5.0,
    "get_bytes_288mb_x": 5.0,
    "offhost_vs_gloo": 0.6,
    "samehost_vs_memcpy": 0.5,
    "faults": 200.0,
}
AT_MOST = {
    "journal_put_1_ms": 0.3,
    "journal_put_64_x": 1.05,
    "journal_put_16mb_x": 1.05,
    "latency_vs_gloo_rtt": 5.0,
    "control_1m_vs_10k": 1.5,
    "wire_bytes_vs_payload": 1.01,
    "rows_lost": 0.0,
    "rows_untold": 0.0,
    "rows_twice": 0.0,
    "rows_corrupt": 0.0,
}
FATAL = ("rows_lost", "rows_untold", "rows_twice", "rows_corrupt")


def measure(names: list[str], settings: Settings, save: Callable[[Result], None]) -> Result:
    """Run parts in order; `save` gets what is there after each."""
    total = Result()
    for name in names:
        module, function = PARTS[name]
        began = time.monotonic()
        settings.say(f"{name} ...")
        result: Result = getattr(import_module(f"benchmarks.transferqueue.{module}"), function)(settings)
        total.figures |= result.figures
        total.details |= result.details
        total.details.setdefault("seconds", {})[name] = time.monotonic() - began
        save(total)
    return total


def table(figures: dict[str, float]) -> str:
    """Return one line per figure, with its target."""
    lines = []
    for name, value in figures.items():
        if name in AT_LEAST:
            wanted, met = f">= {AT_LEAST[name]:g}", value >= AT_LEAST[name]
        else:
            wanted, met = f"<= {AT_MOST[name]:g}", value <= AT_MOST[name]
        lines.append(f"{name:22} {value:10.4g}   {wanted:8}  {'PASS' if met else 'FAIL'}")
    return "\n".join(lines)


def values(result: Result) -> dict[str, Any]:
    """Return figures and details as one JSON object."""
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load": os.getloadavg()}
    return {**result.figures, "details": {**result.details, "machine": machine}}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--peer-python", type=Path, help="interpreter with the peer; without it its part is skipped")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help="default: all")
    parser.add_argument("--before", type=Path, help="tree that part journal compares with; else this one without it")
    parser.add_argument("--faults", type=int, default=200, help="how often to kill")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that everything works")
    options = parser.parse_args()

    def save(result: Result) -> None:
        write_json(options.json, values(result))  # parts take long: what is measured stays

    with tempfile.TemporaryDirectory(prefix="transferqueue-") as temporary:
        faults = min(options.faults, 20) if options.quick else options.faults
        settings = Settings(options.quick, options.peer_python, faults, Path(temporary), say_when, options.before)
        result = measure([name for name in PARTS if name in options.only], settings, save)
    report(options.json, values(result), table(result.figures))
    return 1 if any(result.figures.get(name) for name in FATAL) else 0


if __name__ == "__main__":
    sys.exit(main())
