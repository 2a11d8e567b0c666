"""Part `journal`: what it costs that a unit notes its rows where they outlive it. Two queues take puts in turn.

The other side is this tree without a journal, or, with `--before`, a tree from before there was one.
"""

import json
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # the other process may run another tree
    from benchmarks.transferqueue.json_process import JsonProcess
    from benchmarks.transferqueue.part import Result, Settings
    from benchmarks.transferqueue.samples import Samples, alternate

_MB = 2**20
CASES = {"1": (1, 64, 8), "64": (64, 64 * 256, 4), "16mb": (64, 16 * _MB, 1)}
"""Case -> rows and bytes of a put, puts in a round."""
_ROUNDS = 300


def run(settings: "Settings") -> "Result":
    """Measure puts and acks of both sides in turn."""
    figures: dict[str, float] = {}
    details: dict[str, Any] = {}
    with _queue(settings, "with", None) as ours, _queue(settings, "without", settings.before) as other:
        for case in CASES:
            samples = _in_turn({"with": ours, "without": other}, case, settings.rounds(_ROUNDS))
            ratios = {what: samples["with"][what].median / samples["without"][what].median for what in ("put", "ack")}
            medians = {side: {what: taken.median * 1e3 for what, taken in of.items()} for side, of in samples.items()}
            details[case] = {"ms": medians, "ratio": ratios}
            settings.say(f"journal: {case}: {details[case]}")
            if case == "1":
                figures["journal_put_1_ms"] = medians["with"]["put"] - medians["without"]["put"]
            else:
                figures[f"journal_put_{case}_x"] = ratios["put"]
    return Result(figures, {"journal": details})


def _in_turn(queues: "dict[str, JsonProcess]", case: str, rounds: int) -> "dict[str, dict[str, Samples]]":
    """Each goes first in half of the rounds: the one that does finds the machine as others left it."""
    halves = []
    for names in (["with", "without"], ["without", "with"]):
        measures = {name: partial(_round, queues[name], case) for name in names}
        halves.append(alternate(measures, rounds=-(-rounds // 2), warm_up=2))
    return {
        name: {what: Samples(halves[0][name][what].values + halves[1][name][what].values) for what in ("put", "ack")}
        for name in queues
    }


def _round(queue: "JsonProcess", case: str) -> dict[str, float]:
    taken = queue.ask({"case": case})
    return {what: statistics.median(times) for what, times in taken.items()}


def _queue(settings: "Settings", name: str, tree: Path | None) -> "JsonProcess":
    path = [] if tree is None else ["env", f"PYTHONPATH={tree.resolve()}"]
    journal = "journal" if name == "with" or tree is not None else "none"
    command = [*path, sys.executable, "-P", str(Path(__file__)), journal]
    return JsonProcess(command, directory=Path(settings.directory), log=Path(settings.directory) / f"{name}.log")


def _serve(journal: str) -> None:
    """The other process: a queue, and a client that puts into it when it is asked to."""
    import torch

    import tq
    from tq import local

    if journal == "none":
        vars(local)["JournalMemory"] = lambda store, unit: nullcontext()
    torch.set_num_threads(1)
    with tq.start({"train": ["x"]}, num_units=1) as queue, queue.client("me") as client:
        print(json.dumps({"tree": tq.__file__}), flush=True)
        for line in sys.stdin:
            rows, num_bytes, times = CASES[json.loads(line)["case"]]
            values = torch.zeros(rows, num_bytes // rows // 4)
            taken: dict[str, list[float]] = {"put": [], "ack": []}
            for _ in range(times):
                began = time.perf_counter()
                client.put_rows({"x": values})
                taken["put"].append(time.perf_counter() - began)
                lease = client.fetch("train", num_rows=rows, timeout_s=60)
                began = time.perf_counter()
                assert isinstance(lease, tq.Lease) and lease.ack()
                taken["ack"].append(time.perf_counter() - began)
            print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
