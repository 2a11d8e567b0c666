"""Broadcasts to a generator of two ranks on `late`: collectives of its model that are in flight meanwhile."""

import sys
import tempfile
from pathlib import Path

from tests.device.processes import build_late, environment, run_ranks

SCHEDULES = ("copies", "kernels")


def run(**_: int) -> dict[str, float]:
    """Return the counts of both ranks in both schedules of the device, and of one in which the engine is not paused."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        env = environment(build_late(work))
        found = [_count(env, work / schedule, schedule) for schedule in SCHEDULES]
        unpaused = _count(env | {"WITHOUT_PAUSE": "1"}, work / "unpaused", "copies")
    return {
        "tp_broadcast_collectives_in_flight": sum(each["in_flight"] for each in found),
        "tp_broadcast_transfers": sum(each["came"] for each in found),
        "tp_broadcast_tokens": sum(each["tokens"] for each in found),
        "tp_broadcast_in_flight_unpaused": unpaused["in_flight"],
    }


def _count(env: dict[str, str], directory: Path, schedule: str) -> dict[str, int]:
    said = run_ranks(env, directory, "paused", schedule, num_ranks=2)
    print(f"paused, {schedule}: {said}", file=sys.stderr)
    if said is None or sum(said[1]["wrong"]):
        raise SystemExit(f"a generator of two ranks on late: {said}")
    return {name: sum(counts) for name, counts in said[1].items()}
