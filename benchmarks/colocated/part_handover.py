"""What crosses the bus to a device when a colocated rollout loads weights: counted, with and without shared device
memory.

On `late`, the fake device of `tests/device` (needs g++): a trainer of two ranks, and generators of one rank and of two.

    handover_bus_x     bytes that the generators take from host memory in a load / the same without shared device memory
    handover_bytes_a_load     bytes that a generator of one rank takes in either case
"""

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

handover_mode: Any = import_module("tests.device.handover_mode")
processes: Any = import_module("tests.device.processes")


def run(**_: object) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="late-") as work:
        env = processes.environment(processes.build_late(Path(work)))
        os.environ.pop("LATE_DEVICE_IPC", None)
        without, having = (
            _bytes_from_host(env | more, Path(work) / name)
            for name, more in (("without", {}), ("with", {"LATE_DEVICE_IPC": "1"}))
        )
    return {"handover_bus_x": having / without, "handover_bytes_a_load": handover_mode.NUM_BYTES}


def _bytes_from_host(env: dict[str, str], directory: Path) -> int:
    said = processes.run_ranks(env, directory, "handover", num_ranks=4)
    assert said is not None, "a rank failed"
    one, ranks = said[handover_mode.ONE], said[handover_mode.OF_RANKS]
    assert (one["wrong"], ranks["wrong"]) == (0, 0), "a version did not arrive whole"
    return int(sum(on_host for _, on_host in one["loads"]) + ranks["sum"][1])
