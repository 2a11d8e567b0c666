"""Which ready rows make a lease, and how a round is split among ranks. Small pure objects; a task names its policy.

An *item* is the smallest thing handed out: one row, or, in a task with `whole_groups`, all rows of one group (so whole
groups work with every policy and need none of their own). A policy sees the ready items in queue order, lazily: it
pays only for what it looks at. Every pick takes the front item, so no item waits forever.

    fifo            oldest first, equally many items to each rank
    token-budget    micro-batches under a token budget: skips what does not fit
    token-balanced  ranks get equal numbers of tokens (Karmarkar-Karp)
    group-affinity  rows of one group go to one rank, although they are leased row by row
"""

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncflow.errors import ConfigError, one_line
from asyncflow.registry import Registry

# Dividing work of unequal size: equal sums for ranks, bins under a budget. Pure arithmetic on integers.

_Subset = tuple[int, list[int]]  # (sum of weights, indices)


def split_evenly(weights: Sequence[int], num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Split non-negative weights into parts of nearly equal sum; the sums differ by the largest weight at most.

    Returns indices into `weights`, ascending, per part; parts in the order of their first index, empty ones last. With
    `equal_counts` the parts' sizes differ by 1 at most.

    Source: Karmarkar & Karp 1982; k parts and equal counts: Michiels et al. 2003 (balanced LDM).
    """
    # A part's count breaks ties between sums, so that weights of zero (unknown lengths) are spread out as well.
    scaled = [weight * (len(weights) + 1) + 1 for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: -scaled[i])
    # For equal counts, start from runs of `num_parts` sorted weights, one weight per part, instead of single weights.
    step = num_parts if equal_counts else 1
    heap = []
    for k in range(0, len(order), step):
        subsets: list[_Subset] = [(scaled[i], [i]) for i in order[k : k + step]]
        subsets += [(0, [])] * (num_parts - len(subsets))
        heap.append((subsets[-1][0] - subsets[0][0], k, subsets))
    heapq.heapify(heap)
    # Largest differencing method: join the partial partitions of widest spread, the heaviest subset of one with the
    # lightest of the other. A join never widens the larger spread, hence the bound.
    while len(heap) > 1:
        _, k, wide = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(wide, reversed(other), strict=True)]
        joined.sort(key=lambda subset: -subset[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], k, joined))
    parts = [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted(parts, key=lambda part: part[0] if part else len(weights))


def split_by_tokens(tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` tokens (at least 1); a longer row is alone in its own.

    Returns row positions, ascending, per micro-batch; micro-batches in the order of their first row. First fit, longest
    first: at most 11/9 of the fewest possible micro-batches, plus 6/9. Source: Johnson 1973; the bound: Dosa 2007.
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


class Item(NamedTuple):
    """Rows that are handed out together, ascending, at least one; the first one decides the place in the queue.

    `tokens` is the length of all of them together.
    """

    rows: tuple[int, ...]
    tokens: int = 0


@dataclass(frozen=True)
class Want:
    """What a consumer asks for; the limits are for all ranks together.

    At most `num_rows` rows and `token_budget` tokens (0: no budget), but at least one item. `num_ranks` data-parallel
    ranks share it; 1: a lease of one consumer.
    """

    num_rows: int
    token_budget: int = 0
    num_ranks: int = 1


class Policy(Protocol):
    """Decides which items go out together and to which ranks."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Choose items from the front of the queue; at least one when there is any. What is not returned stays."""

    def assign(self, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
        """Split what `pick` chose (in queue order) among ranks: one list per rank, possibly empty, every item once.

        `assigned`: tokens that each rank was given in the partition's earlier rounds.
        """


@dataclass(frozen=True)
class Fifo:
    """Oldest first; ranks get equally many items, in order."""

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Take items in order until the next one would not fit."""
        chosen: list[Item] = []
        rows = tokens = 0
        for item in ready:
            rows += len(item.rows)
            tokens += item.tokens
            if chosen and (rows > want.num_rows or 0 < want.token_budget < tokens):
                break
            chosen.append(item)
            if rows == want.num_rows:
                break
        return chosen

    def assign(self, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
        """Assign contiguous runs; the first ranks get the longer ones."""
        num_ranks = len(assigned)
        base, extra = divmod(len(items), num_ranks)
        rank_slices = []
        start = 0
        for rank in range(num_ranks):
            end = start + base + (1 if rank < extra else 0)
            rank_slices.append(list(items[start:end]))
            start = end
        return rank_slices


@dataclass(frozen=True)
class TokenBudget:
    """Fills a token budget: skips an item that does not fit in favour of a later one that does.

    Each rank's tokens stay within its slice of the budget. Only an item larger than a slice exceeds it, alone or, where
    the budget of all ranks has room for it, beside other ranks' items. `window` (at least 1) is how many times the
    wanted rows it looks at.
    """

    window: float = 2.0

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Take the front item, then those that fit where `assign` will put them."""
        chosen: list[Item] = []
        num_rows, loads, counts = 0, [0] * want.num_ranks, [0] * want.num_ranks
        for item in _front(ready, math.ceil(self.window * want.num_rows)):
            rank = _lightest(loads, counts)
            fits = not want.token_budget or (
                (loads[rank] + item.tokens) * want.num_ranks <= want.token_budget
                and sum(loads) + item.tokens <= want.token_budget
            )
            if chosen and not (fits and num_rows + len(item.rows) <= want.num_rows):
                continue
            chosen.append(item)
            num_rows += len(item.rows)
            loads[rank] += item.tokens
            counts[rank] += 1
        return chosen

    def assign(self, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
        """Give each item, in order, to the rank with the fewest tokens (among those, the fewest items).

        Tokens of two ranks differ by the largest item at most. Source: Graham 1966, list scheduling.
        """
        rank_slices: list[list[Item]] = [[] for _ in assigned]
        loads = [0] * len(assigned)
        for item in items:
            rank = _lightest(loads, [len(rank_slice) for rank_slice in rank_slices])
            rank_slices[rank].append(item)
            loads[rank] += item.tokens
        return _evened_out(rank_slices, assigned)


@dataclass(frozen=True)
class TokenBalanced:
    """Ranks get nearly equal numbers of tokens: they differ by the largest item at most.

    Attributes:
        window: how many times the wanted rows it looks at; takes those nearest in length to the front item. 1: takes
            the oldest, in order. A wider window balances better and reorders more.
        equal_counts: ranks also get equally many items, within one.
    """

    window: float = 1.0
    equal_counts: bool = True

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        """Take the front item and those of the window nearest to it in length that fit."""
        seen = list(_front(ready, math.ceil(self.window * want.num_rows)))
        nearest = sorted(seen[1:], key=lambda item: abs(item.tokens - seen[0].tokens)) if self.window > 1 else seen[1:]
        return sorted(_fitting(seen[:1] + nearest, want))

    def assign(self, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
        rank_slices = split_evenly([item.tokens for item in items], len(assigned), equal_counts=self.equal_counts)
        return _evened_out([[items[i] for i in rank_slice] for rank_slice in rank_slices], assigned)


@dataclass(frozen=True)
class GroupAffinity:
    """Rows of one group that are picked together go to one rank, although they are leased row by row.

    Attributes:
        group_size: a group is this many consecutive row indices, as the queue numbers them.
        sticky: a group that is split over several rounds goes to the same rank in all of them (group number modulo
            ranks: balanced only on average); otherwise the ranks' tokens are balanced in each round.
    """

    group_size: int
    sticky: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group-affinity: group_size {self.group_size} must be at least 1")

    def pick(self, ready: Iterator[Item], want: Want) -> list[Item]:
        return Fifo().pick(ready, want)

    def assign(self, items: Sequence[Item], assigned: Sequence[int]) -> list[list[Item]]:
        """Assign whole groups; unless `sticky`, the ranks' tokens differ by the largest group at most."""
        groups: dict[int, list[Item]] = {}
        for item in items:
            groups.setdefault(item.rows[0] // self.group_size, []).append(item)
        numbers = list(groups)
        if self.sticky:
            places = [[i for i, n in enumerate(numbers) if n % len(assigned) == rank] for rank in range(len(assigned))]
        else:
            tokens = [sum(item.tokens for item in group) for group in groups.values()]
            places = split_evenly(tokens, len(assigned), equal_counts=False)
        rank_slices = [[item for i in rank_slice for item in groups[numbers[i]]] for rank_slice in places]
        return rank_slices if self.sticky else _evened_out(rank_slices, assigned)


POLICIES = Registry(
    "asyncflow.policies",
    {
        "fifo": "tq.policies:Fifo",
        "token-budget": "tq.policies:TokenBudget",
        "token-balanced": "tq.policies:TokenBalanced",
        "group-affinity": "tq.policies:GroupAffinity",
    },
)
"""What `tq.policy` may say, before its settings."""


def resolve_policy(text: str) -> str:
    """Return a configuration's policy as `module:Class`, with its settings; raises ValueError, for Pydantic."""
    name, settings = _parts(text)
    return POLICIES.resolve_name(name) + settings


def policy_name(text: str) -> str:
    """Return the name without its settings."""
    return text.partition("(")[0].strip()


def load_policy(text: str) -> Policy:
    """Return the policy that a configuration names.

    `text` is a name of `POLICIES`, or `module:Class` for one of the user's own; then, in parentheses, settings with
    JSON values: `token-balanced(window=2, equal_counts=false)`, `my_package.policies:Newest`.

    Raises:
        ConfigError: no such policy, or it cannot be made with these settings.
    """
    try:
        name, settings = _parts(text)
        module, _, attribute = POLICIES.locate_class(name).partition(":")
    except ValueError as error:
        raise ConfigError(f"policy {text!r}: {error}") from error
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # it may be a user's module
        raise ConfigError(f"policy {name!r} cannot be imported: {one_line(error)}") from error
    if not all(callable(getattr(found, method, None)) for method in ("pick", "assign")):
        raise ConfigError(f"policy {name!r}: {found!r} has no methods pick and assign (see tq.policies.Policy)")
    given = _settings(text, settings[1:-1])
    try:
        policy: Policy = found(**given)
    except ConfigError:
        raise
    except Exception as error:  # it may be a user's class
        raise ConfigError(f"policy {text!r}: {one_line(error)}") from error
    return policy


def _parts(text: str) -> tuple[str, str]:
    """Return the name, and its settings in parentheses or ""; raises ValueError."""
    match = re.fullmatch(r"([\w.:-]+)\s*(\(.*\))?", text.strip())
    if match is None:
        raise ValueError("write a name, or name(setting=value, ...)")
    return match[1], match[2] or ""


def _settings(policy: str, text: str) -> dict[str, Any]:
    settings = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = item.partition("=")
        try:
            settings[key.strip()] = msgspec.json.decode(value.strip())
        except ValueError as error:
            message = f"policy {policy!r}: {item!r} is not of the form setting=value, with a value as in JSON"
            raise ConfigError(f'{message} (2, false, "text")') from error
    return settings


def _check_window(window: float) -> None:
    if not 1 <= window < math.inf:
        raise ConfigError(f"window {window} must be at least 1 and finite: it is a multiple of the rows wanted")


def _front(ready: Iterator[Item], num_rows: int) -> Iterator[Item]:
    seen = 0
    for item in ready:
        yield item
        seen += len(item.rows)
        if seen >= num_rows:
            return


def _evened_out(rank_slices: list[list[Item]], assigned: Sequence[int]) -> list[list[Item]]:
    """Give the heaviest slice to the rank that was assigned the least so far, and so on; ties in order."""
    # What rounds leave uneven must not add up over a partition, in which ranks need not wait for each other.
    heaviest = sorted(rank_slices, key=lambda rank_slice: -sum(item.tokens for item in rank_slice))
    ranks = sorted(range(len(assigned)), key=lambda rank: assigned[rank])
    given = dict(zip(ranks, heaviest, strict=True))
    return [given[rank] for rank in range(len(assigned))]


def _lightest(loads: Sequence[int], counts: Sequence[int]) -> int:
    return min(range(len(loads)), key=lambda rank: (loads[rank], counts[rank]))


def _fitting(items: Iterable[Item], want: Want) -> list[Item]:
    chosen: list[Item] = []
    rows = tokens = 0
    for item in items:
        too_many = rows + len(item.rows) > want.num_rows or 0 < want.token_budget < tokens + item.tokens
        if chosen and too_many:
            continue
        chosen.append(item)
        rows += len(item.rows)
        tokens += item.tokens
    return chosen


# A task of a queue as controllers know it: plain data, made from configs when the queue starts.


@dataclass(frozen=True)
class StalenessRule:
    """How old the weights may be that generate what a step trains: (s - 1) - v <= `bound`, for step s and version v.

    Step s trains the weights that step s - 1 made, so a sample of these is not stale.
    """

    bound: int

    @staticmethod
    def age(step: int, version: int) -> int:
        """Return the staleness, in step `step`, of what weights `version` generated."""
        return step - 1 - version

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be generated at the same time."""
        return self.bound + 1

    def oldest_version(self, step: int) -> int:
        """Return the oldest weights that may generate for a step."""
        return max(0, step - 1 - self.bound)

    def newest_step(self, version: int) -> int:
        """Return the last step that weights may generate for."""
        return version + 1 + self.bound


@dataclass(frozen=True)
class StepSpec:
    """Steps of a training gang that are not its partitions: each takes `num_rows` rows of several partitions.

    A row is handed out at most `lateness` steps after its partition.
    """

    num_rows: int
    lateness: int


@dataclass(frozen=True)
class TaskSpec:
    """What a controller must know about a task.

    Attributes:
        inputs: columns that must be written before a row is ready.
        outputs: columns that the task writes for every row; any others are learned.
        whole_groups: a group is handed out only when all its rows are ready, and is never split.
        max_staleness: rows of step s go only to consumers whose weights are of a version v with (s - 1) - v <=
            max_staleness; None: weights do not matter.
        version_interval: consumers compute only with weights of every Nth step (0, N, 2N, ...) and cannot use those in
            between. With `max_staleness` N - 1 a row goes to those of the last such step before its own.
        barrier: rows of a partition are handed out only when all of them are ready (`sync`).
        in_order: rows go out in ascending order, as many as requested or the partition's rest; a fetch waits for the
            next ones. Which rows go out together then does not depend on when they became ready.
        keeps_leases: leases survive a lost channel; they end only with the whole gang (the trainer).
        max_deliveries: a row that comes back this often makes its group a dead letter; 0: never.
        policy: which ready rows make a lease, and how a round is shared.
        steps: of a gang whose rounds come from several partitions; None: a partition is a step.
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str] = frozenset()
    whole_groups: bool = False
    max_staleness: int | None = None
    version_interval: int = 1
    barrier: bool = False
    in_order: bool = False
    keeps_leases: bool = False
    max_deliveries: int = 0
    policy: Policy = field(default_factory=Fifo)
    steps: StepSpec | None = None

    def newest_step(self, version: int) -> int | None:
        """Return the last step of which consumers with weights `version` get rows; None: any."""
        return None if self.max_staleness is None else StalenessRule(self.max_staleness).newest_step(version)

    def usable_version(self, newest: int) -> int:
        """Return the newest weights, up to `newest`, that the task's consumers can compute with."""
        return newest // self.version_interval * self.version_interval


@dataclass(frozen=True)
class Offer:
    """What a partition has to give: rows that are ready now, and rows not handed out yet, ready or not."""

    partition: int
    num_ready: int
    num_left: int


def choose(spec: StepSpec, step: int, num_assigned: int, offers: Sequence[Offer], full: int) -> Offer | None:
    """Return where the next round of a step comes from, for steps that train what is finished first; None: wait.

    The offer returned has as many rows ready as may be taken; a full round has `full` rows. `offers`: partitions with
    rows left, oldest first.

    A step takes `spec.num_rows` rows (`num_assigned` so far), the oldest partition first that has a full round ready.
    Rows of a partition that may not get any later (`lateness`) are due: once they fill the room left in the step,
    nothing else is taken.

        lateness 1, step 4      3: 8 rows left, 4 ready     4: 16 left, 4 ready     5: 16 left, 12 ready
        rounds of 8, room 16    due: 8                      not full                -> a round of 5, then wait for 3

    Partitions up to a step have at least as many rows left as the step has room for, so it never needs later ones and
    can always be completed. What is due fits: all older partitions are assigned, and a partition is as large as a step.
    """
    room = spec.num_rows - num_assigned
    newest_due = step - spec.lateness
    due = sum(offer.num_left for offer in offers if offer.partition <= newest_due)
    for offer in offers:
        size = min(full, room if offer.partition <= newest_due else room - due)
        is_rest = offer.num_ready == offer.num_left
        if size > 0 and offer.num_ready and (offer.num_ready >= size or is_rest):
            return Offer(offer.partition, min(size, offer.num_ready), offer.num_left)
    return None
