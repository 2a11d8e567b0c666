"""`updates` and `mixed_reads`: many versions over both paths while four receivers generate.

Every burst of a generator is an output that claims a version; it comes with digests of the whole weights that the
engine held then. The trainer's ranks say what the digests of that version are, from their masters (`masters`).
"""

import random
import threading
import time

from benchmarks.transferqueue.part import Result
from benchmarks.weightsync.cluster import Cluster, ask
from benchmarks.weightsync.options import Options
from benchmarks.weightsync.shapes import synthetic_shapes

_UPDATES = 100
_MODEL_BYTES = 25_000_000
_BUCKET_BYTES = 1 << 20
_BROADCAST_EVERY = 4
_LONGEST_PAUSE_S = 0.1
_CONTROL_S = 20.0


def run(options: Options) -> Result:
    """Publish, compare; then damage one engine to see that the comparison finds it."""
    chance, pause = random.Random(0), threading.Event()
    num_updates = options.rounds(_UPDATES)
    shapes = synthetic_shapes(min(_MODEL_BYTES, options.model_bytes))
    with Cluster(shapes, bucket_bytes=_BUCKET_BYTES, proves=True) as cluster:
        for step in range(1, num_updates + 1):
            cluster.update(step, broadcast=step % _BROADCAST_EVERY == 0)
            pause.wait(chance.uniform(0, _LONGEST_PAUSE_S))
            if step % 10 == 0:
                cluster.collect()
        complete = cluster.wait_loaded(num_updates)
        num_mixed, num_outputs = cluster.num_mixed(), len(cluster.outputs)
        ask(cluster.receivers[:1], "damage")
        deadline = time.monotonic() + _CONTROL_S
        while cluster.num_mixed() == num_mixed and time.monotonic() < deadline:
            cluster.collect()
        caught = cluster.num_mixed() > num_mixed
    if not complete or not caught:
        raise SystemExit(f"updates: the last version arrived: {complete}; a flipped bit was noticed: {caught}")
    loads = [len(own) for own in cluster.loads]
    options.say(f"updates: {num_updates}, loads {loads}, {num_outputs} outputs, {num_mixed} mixed")
    details = {"loads": loads, "outputs": num_outputs, "by_broadcast": num_updates // _BROADCAST_EVERY}
    return Result({"updates": num_updates, "mixed_reads": num_mixed}, {"updates": details})
