"""Rows of a replica on `late`: those that go from device to device against those that Gloo brings."""

import sys
import tempfile
from pathlib import Path

from tests.device.processes import build_late, environment, run_ranks

RANKS = 3
SCHEDULES = ("copies", "kernels")


def run(**_: int) -> dict[str, float]:
    """Return whether all rounds of all ranks have the same bits, in both of the device's schedules."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        env = environment(build_late(work))
        said = {one: run_ranks(env, work / one, "rows", one, num_ranks=RANKS) for one in SCHEDULES}
    for schedule, ranks in said.items():
        print(f"rows, {schedule}: {ranks}", file=sys.stderr)
    equal = all(
        ranks is not None and all(rank["values"] and not rank["different"] for rank in ranks) for ranks in said.values()
    )
    return {"replica_device_equal": float(equal)}
