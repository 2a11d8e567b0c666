"""What the workers of `test_launchers_over_hosts` do, beside `gang_entrypoints`; both are found through PYTHONPATH."""

import json
import os
from pathlib import Path

from gang_entrypoints import _report, _store, obey_phase


def train_over_nodes(run_dir: str, gang: str) -> None:
    """Each actor rank writes down its place; they leave when all have, and rank 0 says that all steps are done."""
    if gang != "actor":
        obey_phase(run_dir, gang)
        return
    store = _store(run_dir)
    _report(store, gang, "training")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = {name: int(os.environ[name]) for name in names}
    (Path(run_dir) / f"place-{place['RANK']}.json").write_text(json.dumps(place))
    store.set(f"seen/{place['RANK']}", "1")
    for rank in range(place["WORLD_SIZE"]):
        store.get(f"seen/{rank}")
    if place["RANK"] == 0:
        lines = [{"step": step, "lineage": 0, "reward_mean": step / 2} for step in (1, 2)]
        (Path(run_dir) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        store.set("done", "1")
