"""How fast a schedule could be: a discrete-event bound with free transfers, free swaps and processes without overhead.

Samples start in data order, each in the slot that is free first, once weights exist that may start them; are scored in
order of arrival on the reference rank that is free first; and are trained in rounds, in order of arrival, split evenly.
`sequential` does one thing at a time: generate all, then score all, then train all.
"""

import heapq
import statistics

from benchmarks.ablation.workloads import Workload
from workers.engines.sim.decode_times import SimLengths


def step_s(
    workload: Workload, *, max_staleness: int, seed: int, steps: int, skip: int, sequential: bool = False
) -> float:
    """Return the mean seconds per step over steps skip + 1 ... steps."""
    lengths = SimLengths(workload.sim_config(), samples_per_step=workload.samples, seed=seed)
    sim = workload.sim_config()
    cluster = workload.cluster
    slots, refs, ends = [0.0] * workload.slots, [0.0] * cluster.ref, [0.0]
    for step in range(1, steps + 1):
        tokens = [
            lengths.response_length(index) for index in range((step - 1) * workload.samples, step * workload.samples)
        ]
        gate = ends[max(0, step - 1 - max_staleness)]
        generated = []
        for size in tokens:
            end = max(heapq.heappop(slots), gate) + size * sim.decode_s_per_token
            heapq.heappush(slots, end)
            generated.append((end, size))
        generated.sort()
        if sequential:
            work = sum(tokens) * (sim.ref_s_per_token / cluster.ref + sim.train_s_per_token / cluster.actor)
            ends.append(generated[-1][0] + work)
            continue
        scored = []
        for arrived, size in generated:
            rank = min(range(cluster.ref), key=refs.__getitem__)
            refs[rank] = max(refs[rank], arrived) + size * sim.ref_s_per_token
            scored.append((refs[rank], size))
        scored.sort()
        trained = ends[-1]
        for first in range(0, len(scored), cluster.round):
            rows = scored[first : first + cluster.round]
            trained = max(trained, rows[-1][0]) + sum(size for _, size in rows) * sim.train_s_per_token / cluster.actor
        ends.append(trained)
    return statistics.fmean(after - before for before, after in zip(ends[skip:], ends[skip + 1 :], strict=False))
