"""`async_trainer_stall_vs_memcpy`, `async_generator_stall_vs_memcpy`, `staged_copies_per_version`; and the trace.

Four receivers generate all the time. In turn, both trainer ranks copy their own shards into warm private memory, cast
as the wire wants them (the baseline), and publish; what they wait for before their next update, a step of computing
later, counts as well. A generator that swaps also copies the model between two warm private memories, at the same
boundary and so beside the same background work: before every other load, after those in between. Samples of all ranks
and of all receivers count.
"""

import json
import statistics
from typing import Any

from benchmarks.transferqueue.part import Result
from benchmarks.transferqueue.samples import alternate
from benchmarks.weightsync.cluster import Cluster, ask
from benchmarks.weightsync.options import Options
from benchmarks.weightsync.shapes import Shapes, smollm2_shapes, synthetic_shapes
from benchmarks.weightsync.slot_pages import slot_pages
from benchmarks.weightsync.spans import chrome_trace

_ROUNDS = 6
_WARM_UP = 3
"""As many versions as there are slots: their pages are made then."""


def run(options: Options) -> Result:
    """Measure both models; the figures are the synthetic model's."""
    details: dict[str, Any] = {}
    for model, shapes in (("smollm2", smollm2_shapes()), ("synthetic", synthetic_shapes(options.model_bytes))):
        details[model] = _measure(shapes, options)
        told = ", ".join(f"{name} {value:.3f}" for name, value in details[model]["ratios"].items())
        options.say(f"stalls: {model}: {told}")
    return Result(details["synthetic"]["ratios"], {"stalls": details})


def trace(options: Options) -> Result:
    """Write one staged update as a Chrome trace."""
    assert options.trace is not None
    shapes = synthetic_shapes(options.model_bytes)
    with Cluster(shapes, bucket_bytes=options.bucket_bytes, traces=True) as cluster:
        for step in range(1, 2 + _WARM_UP):
            held_up = cluster.update(step, broadcast=False)
            cluster.wait_loaded(step)
            ask(cluster.trainers, "settle")
        processes = [*cluster.trainers, *cluster.receivers]
        names = [f"actor-0/{rank}" for rank in range(2)] + [f"rollout-{k}" for k in range(len(cluster.receivers))]
        spans = dict(zip(names, ask(processes, "spans"), strict=True))
        ended = max(load.ended for load in cluster.loads_of(step))
    began = min(begin for begin, _ in held_up)
    margin_s = 0.2 * (ended - began)
    options.trace.write_text(json.dumps(chrome_trace(spans, begin=began - margin_s, end=ended + margin_s)))
    options.say(f"trace: {options.trace} shows an update of {ended - began:.3f} s")
    return Result({}, {"trace": {"update_s": ended - began}})


def _measure(shapes: Shapes, options: Options) -> dict[str, Any]:
    with Cluster(shapes, bucket_bytes=options.bucket_bytes, baselines=True) as cluster:
        rounds = _Rounds(cluster)
        samples = alternate(
            {"copy": rounds.copy, "publish": rounds.publish}, rounds=options.rounds(_ROUNDS), warm_up=_WARM_UP
        )
        loads = [load for own in cluster.loads for load in own if load.version.step > _WARM_UP]
        region_bytes = cluster.plan().region_bytes
        num_slots = cluster.status().slot_bytes // region_bytes
        pages = slot_pages(cluster.pids(), region_bytes)
    trainer = {
        side: statistics.median(value for each in values.values() for value in each.values)
        for side, values in samples.items()
    }
    load_s, copy_s = (
        statistics.median(times) for times in zip(*[(each.seconds, each.copy_s) for each in loads], strict=True)
    )
    return {
        "ratios": {
            "async_trainer_stall_vs_memcpy": trainer["publish"] / trainer["copy"],
            "async_generator_stall_vs_memcpy": load_s / copy_s,
            "staged_copies_per_version": pages.pss_bytes / (region_bytes * num_slots),
        },
        "step_with_update_vs_without": statistics.median(rounds.step_s["with"])
        / statistics.median(rounds.step_s["without"]),
        "trainer_s": {side: {rank: each.report() for rank, each in values.items()} for side, values in samples.items()},
        "generator_s": {"load": load_s, "copy": copy_s, "loads": len(loads), "slowest": max(x.seconds for x in loads)},
        "slots": {"written": num_slots, "memories": pages.num_memories, "region_bytes": region_bytes},
    }


class _Rounds:
    """One round of each side; quantities are the ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._step = 0
        self.step_s: dict[str, list[float]] = {"with": [], "without": []}

    def copy(self) -> dict[str, float]:
        """The baseline of all ranks at once."""
        ask(self._cluster.trainers, "prepare", self._step + 1)
        copied = ask(self._cluster.trainers, "copy")
        self.step_s["without"] += [wait + work for wait, work in ask(self._cluster.trainers, "train")]
        return {f"rank_{rank}": seconds for rank, seconds in enumerate(copied)}

    def publish(self) -> dict[str, float]:
        """One version, until everybody has loaded it."""
        self._step += 1
        ask(self._cluster.trainers, "prepare", self._step)
        held_up = ask(self._cluster.trainers, "publish", self._step, False)
        trained = ask(self._cluster.trainers, "train")
        if not self._cluster.wait_loaded(self._step):
            raise SystemExit(f"stalls: not every receiver loaded step {self._step}")
        ask(self._cluster.trainers, "settle")
        self.step_s["with"] += [
            end - begin + wait + work for (begin, end), (wait, work) in zip(held_up, trained, strict=True)
        ]
        stalls = [end - begin + wait for (begin, end), (wait, _) in zip(held_up, trained, strict=True)]
        return {f"rank_{rank}": stall for rank, stall in enumerate(stalls)}
