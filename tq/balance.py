"""Sharing out work of unequal size: equal sums for ranks, bins under a budget. Pure arithmetic on integers."""

import heapq
from collections.abc import Sequence

_Subset = tuple[int, list[int]]  # (sum of weights, indices)


def split_evenly(weights: Sequence[int], num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Split weights into parts of nearly equal sum; the sums differ by the largest weight at most.

    The largest differencing method: partial partitions are joined, those with the widest spread first, the heaviest
    subset of one with the lightest of the other; a join never widens the larger spread, whence the bound.

    Args:
        weights: not negative.
        num_parts: at least 1.
        equal_counts: the parts' counts differ by 1 at most. The method then starts from runs of `num_parts` sorted
            weights, one for each part, instead of from single weights.

    Returns:
        Indices into `weights`, ascending, per part; parts in the order of their first index, empty ones last.

    Source: Karmarkar & Karp 1982; k parts and equal counts: Michiels et al. 2003 (balanced LDM).
    """
    # A part's count breaks ties between sums, so that weights of zero (unknown lengths) are spread out as well.
    scaled = [weight * (len(weights) + 1) + 1 for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: -scaled[i])
    step = num_parts if equal_counts else 1
    heap = []
    for k in range(0, len(order), step):
        subsets: list[_Subset] = [(scaled[i], [i]) for i in order[k : k + step]]
        subsets += [(0, [])] * (num_parts - len(subsets))
        heap.append((subsets[-1][0] - subsets[0][0], k, subsets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, k, wide = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(wide, reversed(other), strict=True)]
        joined.sort(key=lambda subset: -subset[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], k, joined))
    parts = [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted(parts, key=lambda part: part[0] if part else len(weights))


def split_by_tokens(tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` tokens; a row longer than that is alone in its own.

    First fit, longest first: at most 11/9 of the fewest possible micro-batches, and 6/9 of one.

    Args:
        tokens: length of each row.
        budget: at least 1.

    Returns:
        Positions of rows, ascending, per micro-batch; micro-batches in the order of their first row.

    Source: Johnson 1973; the bound: Dosa 2007.
    """
    loads: list[int] = []
    bins: list[list[int]] = []
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        k = next((k for k, load in enumerate(loads) if load + tokens[i] <= budget), len(bins))
        if k == len(bins):
            loads.append(0)
            bins.append([])
        loads[k] += tokens[i]
        bins[k].append(i)
    return sorted(sorted(rows) for rows in bins)
