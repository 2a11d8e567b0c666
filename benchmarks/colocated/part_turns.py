"""`turn_overhead`: what passing the turn costs beside the copies, as a share of a step of 4 s.

A `sync` run with `sim` engines whose switches take no time, 2 ranks of each role. From the timelines: a passing lasts
from the end of the last `sleep` of one side to the beginning of the first `wake up` of the other, so it is messages
and the launcher; added is how long a holder looks whether its request is parked, before it gives the turn away. A step
has two passings; given is the median over steps.
"""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import say_when
from benchmarks.chaos.launched_run import LaunchedRun, overrides
from workers.rank.device_turn import YieldRule

STEP_S = 4.0
STEPS, SHORT_STEPS = 12, 4
_DEADLINE_S = 900.0


def run(*, directory: Path, short: bool = False, **_: Any) -> dict[str, float]:
    """Run; read the timelines."""
    steps = SHORT_STEPS if short else STEPS
    settings = overrides(
        rollout__engine="sim", actor__engine="sim", algorithm__kl_coef=0, schedule__mode="sync", checkpoint__interval=0
    )
    with LaunchedRun(directory / "turns") as launched:
        launched.start("quickstart", "--roles", "rollout+actor:2", "--steps", str(steps), *settings)
        launched.end_with(0, deadline_s=_DEADLINE_S)
        passings = passings_s(launched.run_dir)
    say_when(f"turns: {len(passings)} passings, median {statistics.median(passings):.4f} s, worst {max(passings):.4f}")
    each = statistics.median(passings) + YieldRule.PARKED_S
    return {"turn_overhead": 2 * each / STEP_S, "turn_passing_ms": 1000 * statistics.median(passings)}


def passings_s(run_dir: Path) -> list[float]:
    """Return how long each passing of the turn took (s)."""
    events = []  # (time, falls asleep, side)
    for path in (run_dir / "timeline").glob("*.jsonl"):
        side = path.name.partition("-")[0]
        if side in ("rollout", "actor"):
            for line in path.read_text().splitlines():
                span = json.loads(line)
                if span.get("name") == "sleep":
                    events.append((span["end"], True, side))
                elif span.get("name") == "wake up":
                    events.append((span["start"], False, side))
    events.sort()
    return [
        woke - slept
        for (slept, falls_asleep, one), (woke, still_falls, other) in itertools.pairwise(events)
        if falls_asleep and not still_falls and one != other
    ]
