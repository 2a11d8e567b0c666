"""`sync_vs_gloo_broadcast` and `async_vs_sync_exposed`: raw Gloo, the broadcast path and the staged path in turn.

The broadcast path is run as the synchronous schedule runs it: generators stop, the trainer publishes, generators wait
and load. Its time is that from the first rank's call of `publish` until the last generator has loaded; raw Gloo's, from
the first send to the last receiver's end, in the same processes, generators stopped as well, one bucket or four at a
time: what is faster counts. Both move each sender's buckets to all receivers, so the ratio of bandwidths is that of the
times.

Blocked, or exposed, is for each update the longest of:
    a trainer rank      inside `publish`, and before its next update, a step of computing later, inside `before_update`
    a generator         broadcast: from the first call of `publish` until it has loaded, since it has nothing to do
                        staged: inside `load`, since it generates until then
What a generator of the synchronous schedule waits *before* the transfer (for training) is not part of it.
The details have the processor time of all processes during raw and broadcast, too: it hardly depends on the machine's
other load, and bounds the ratio where cores are fewer than processes.
"""

from functools import partial
from typing import Any

from benchmarks.transferqueue.part import Result
from benchmarks.transferqueue.samples import Measure, Samples, alternate
from benchmarks.weightsync.cluster import Cluster, ask, hear, tell
from benchmarks.weightsync.options import Options
from benchmarks.weightsync.shapes import Shapes, num_parameters, smollm2_shapes, synthetic_shapes

_ROUNDS = 5
_WARM_UP = 2


def run(options: Options) -> Result:
    """Measure both models with one receiver and with four; the figures are the synthetic model's with four."""
    details: dict[str, Any] = {}
    figures: dict[str, float] = {}
    for model, shapes in (("smollm2", smollm2_shapes()), ("synthetic", synthetic_shapes(options.model_bytes))):
        for num_receivers in (1, 4):
            samples, found = _compare(shapes, num_receivers, options)
            details[f"{model}_{num_receivers}_receivers"] = found
            figures = {
                "sync_vs_gloo_broadcast": found["sync_vs_gloo_broadcast"],
                "async_vs_sync_exposed": found["async_vs_sync_exposed"],
            }
            told = ", ".join(f"{side} {samples[side]['total_s'].median:.3f} s" for side in ("raw", "broadcast"))
            options.say(f"paths: {model}, {num_receivers} receivers: {told}, {_numbers(figures)}")
    return Result(figures, {"paths": details})


def _compare(
    shapes: Shapes, num_receivers: int, options: Options
) -> tuple[dict[str, dict[str, Samples]], dict[str, Any]]:
    with Cluster(shapes, bucket_bytes=options.bucket_bytes, num_receivers=num_receivers) as cluster:
        tell([*cluster.receivers, *cluster.trainers], "connect_raw", cluster.plan())
        hear([*cluster.receivers, *cluster.trainers])
        rounds = _Rounds(cluster)
        sides: dict[str, Measure] = {
            "raw": rounds.raw,
            "raw_4": partial(rounds.raw, 4),
            "broadcast": rounds.broadcast,
            "staged": rounds.staged,
        }
        samples = alternate(sides, rounds=options.rounds(_ROUNDS), warm_up=_WARM_UP)
        plan = cluster.plan()
    median = {side: {what: found.median for what, found in values.items()} for side, values in samples.items()}
    raw = min((median["raw"], median["raw_4"]), key=lambda each: each["total_s"])
    return samples, {
        "bytes": 2 * num_parameters(shapes),
        "buckets": len(plan.buckets),
        "sync_vs_gloo_broadcast": raw["total_s"] / median["broadcast"]["total_s"],
        "cpu_raw_vs_broadcast": raw["cpu_s"] / max(median["broadcast"]["cpu_s"], 1e-3),
        "async_vs_sync_exposed": median["staged"]["exposed_s"] / median["broadcast"]["exposed_s"],
        "samples": {side: {what: each.report() for what, each in values.items()} for side, values in samples.items()},
    }


class _Rounds:
    """One round of each side."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._step = 0

    def raw(self, at_a_time: int = 1) -> dict[str, float]:
        """Broadcast without the weight path, so many buckets at a time."""
        cluster = self._cluster
        ask(cluster.receivers, "pause")
        cpu_s = cluster.cpu_s()
        tell(cluster.receivers, "raw", at_a_time)
        tell(cluster.trainers, "raw", at_a_time)
        sent, received = hear(cluster.trainers), hear(cluster.receivers)
        cpu_s = cluster.cpu_s() - cpu_s
        ask(cluster.receivers, "resume")
        return {"total_s": max(end for _, end in received) - min(begin for begin, _ in sent), "cpu_s": cpu_s}

    def broadcast(self) -> dict[str, float]:
        """One synchronous update."""
        cluster = self._cluster
        self._step += 1
        ask(cluster.receivers, "pause")
        ask(cluster.trainers, "prepare", self._step)
        cpu_s = cluster.cpu_s()
        tell(cluster.receivers, "take", self._step)
        tell(cluster.trainers, "publish", self._step, True)
        held_up, taken = hear(cluster.trainers), hear(cluster.receivers)
        cpu_s = cluster.cpu_s() - cpu_s
        assert all(by_broadcast for _, by_broadcast in taken), "not everybody took part in the broadcast"
        ask(cluster.trainers, "settle")
        ask(cluster.receivers, "resume")
        began, ended = min(begin for begin, _ in held_up), max(end for end, _ in taken)
        trainer_s = max(end - begin for begin, end in held_up)
        total_s = ended - began
        return {"total_s": total_s, "cpu_s": cpu_s, "trainer_s": trainer_s, "exposed_s": max(trainer_s, total_s)}

    def staged(self) -> dict[str, float]:
        """One update while all generate."""
        cluster = self._cluster
        self._step += 1
        held_up = cluster.update(self._step, broadcast=False)
        waited = [wait for wait, _ in ask(cluster.trainers, "train")]
        if not cluster.wait_loaded(self._step):
            raise SystemExit(f"paths: not every receiver loaded step {self._step}")
        ask(cluster.trainers, "settle")
        loads = cluster.loads_of(self._step)
        began, ended = min(begin for begin, _ in held_up), max(load.ended for load in loads)
        trainer_s = max(end - begin + wait for (begin, end), wait in zip(held_up, waited, strict=True))
        load_s = max(load.seconds for load in loads)
        return {
            "total_s": ended - began, "trainer_s": trainer_s, "load_s": load_s, "exposed_s": max(trainer_s, load_s),
        }  # fmt: skip


def _numbers(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
