"""Which ready rows make a lease, and how a round is shared. Small pure objects; a task names its policy.

A *parcel* is the smallest thing handed out: one row, or, in a task with `whole_groups`, all rows of one group (so whole
groups work with every policy and need none of their own). A policy sees the ready parcels in queue order, lazily: what
it looks at is what it costs. Every pick takes the front parcel, so no parcel waits for ever.

    fifo            oldest first, equally many parcels to each rank
    token-budget    micro-batches under a token budget: passes over what does not fit
    token-balanced  ranks get equal numbers of tokens (Karmarkar-Karp)
    group-affinity  rows of one group go to one rank, though they are leased row by row
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncflow.errors import ConfigError
from tq.balance import split_evenly


class Parcel(NamedTuple):
    """Rows that are handed out together, in ascending order.

    Attributes:
        rows: at least one; the first one decides the place in the queue.
        tokens: length of all of them together.
    """

    rows: tuple[int, ...]
    tokens: int = 0


@dataclass(frozen=True)
class Want:
    """What a consumer asks for.

    Attributes:
        num_rows: at most so many rows, but at least one parcel.
        token_budget: at most so many tokens, but at least one parcel; 0: no budget.
        num_ranks: data-parallel ranks that share it (1: a lease of one consumer). The limits are for all of them.
    """

    num_rows: int
    token_budget: int = 0
    num_ranks: int = 1


class Policy(Protocol):
    """Decides which parcels go out together and to which ranks."""

    def pick(self, ready: Iterator[Parcel], want: Want) -> list[Parcel]:
        """Choose parcels from the front of the queue; at least one when there is any. What is not returned stays."""

    def deal(self, parcels: Sequence[Parcel], dealt: Sequence[int]) -> list[list[Parcel]]:
        """Share what `pick` chose among ranks; one list per rank, possibly empty, every parcel once.

        Args:
            parcels: in queue order.
            dealt: per rank, the tokens that it was given in the partition's earlier rounds.
        """


@dataclass(frozen=True)
class Fifo:
    """Oldest first; ranks get equally many parcels, in order."""

    def pick(self, ready: Iterator[Parcel], want: Want) -> list[Parcel]:
        """Take parcels in order until the next one would not fit."""
        chosen: list[Parcel] = []
        rows = tokens = 0
        for parcel in ready:
            rows += len(parcel.rows)
            tokens += parcel.tokens
            if chosen and (rows > want.num_rows or 0 < want.token_budget < tokens):
                break
            chosen.append(parcel)
            if rows == want.num_rows:
                break
        return chosen

    def deal(self, parcels: Sequence[Parcel], dealt: Sequence[int]) -> list[list[Parcel]]:
        """Give the first ranks the longer lists."""
        num_ranks = len(dealt)
        base, extra = divmod(len(parcels), num_ranks)
        shares = []
        start = 0
        for rank in range(num_ranks):
            end = start + base + (1 if rank < extra else 0)
            shares.append(list(parcels[start:end]))
            start = end
        return shares


@dataclass(frozen=True)
class TokenBudget:
    """Fills a token budget: a parcel that does not fit is passed over for a later one that does.

    Each rank's tokens stay within its share of the budget; only a parcel that is larger by itself exceeds it, alone
    or, where the budget of all ranks has room for it, beside other ranks' parcels.

    Attributes:
        window: looks at so many times the rows wanted, at least 1.
    """

    window: float = 2.0

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Iterator[Parcel], want: Want) -> list[Parcel]:
        """Take the front parcel, then those that fit where `deal` will put them."""
        chosen: list[Parcel] = []
        num_rows, loads, counts = 0, [0] * want.num_ranks, [0] * want.num_ranks
        for parcel in _front(ready, math.ceil(self.window * want.num_rows)):
            rank = _lightest(loads, counts)
            fits = not want.token_budget or (
                (loads[rank] + parcel.tokens) * want.num_ranks <= want.token_budget
                and sum(loads) + parcel.tokens <= want.token_budget
            )
            if chosen and not (fits and num_rows + len(parcel.rows) <= want.num_rows):
                continue
            chosen.append(parcel)
            num_rows += len(parcel.rows)
            loads[rank] += parcel.tokens
            counts[rank] += 1
        return chosen

    def deal(self, parcels: Sequence[Parcel], dealt: Sequence[int]) -> list[list[Parcel]]:
        """Give each parcel, in order, to the rank with the fewest tokens (of those, the fewest parcels).

        Tokens of two ranks differ by the largest parcel at most. Source: Graham 1966, list scheduling.
        """
        shares: list[list[Parcel]] = [[] for _ in dealt]
        loads = [0] * len(dealt)
        for parcel in parcels:
            rank = _lightest(loads, [len(share) for share in shares])
            shares[rank].append(parcel)
            loads[rank] += parcel.tokens
        return _evened_out(shares, dealt)


@dataclass(frozen=True)
class TokenBalanced:
    """Ranks get nearly equal numbers of tokens: they differ by the largest parcel at most.

    Attributes:
        window: looks at so many times the rows wanted, and takes those nearest in length to the front parcel; 1: takes
            the oldest, in order. A wider window balances better and reorders more.
        equal_counts: ranks also get equally many parcels, within one.
    """

    window: float = 1.0
    equal_counts: bool = True

    def __post_init__(self) -> None:
        _check_window(self.window)

    def pick(self, ready: Iterator[Parcel], want: Want) -> list[Parcel]:
        """Take the front parcel and, of the window, those nearest to it in length that fit."""
        seen = list(_front(ready, math.ceil(self.window * want.num_rows)))
        nearest = (
            sorted(seen[1:], key=lambda parcel: abs(parcel.tokens - seen[0].tokens)) if self.window > 1 else seen[1:]
        )
        return sorted(_fitting(seen[:1] + nearest, want))

    def deal(self, parcels: Sequence[Parcel], dealt: Sequence[int]) -> list[list[Parcel]]:
        """Share by the largest differencing method; see `balance.split_evenly`."""
        shares = split_evenly([parcel.tokens for parcel in parcels], len(dealt), equal_counts=self.equal_counts)
        return _evened_out([[parcels[i] for i in share] for share in shares], dealt)


@dataclass(frozen=True)
class GroupAffinity:
    """Rows of one group that are picked together go to one rank, though they are leased row by row.

    A group is `group_size` consecutive row indices, as the queue numbers them.

    Attributes:
        group_size: rows of a group.
        sticky: a group that is split over several rounds goes to the same rank in all of them (group number modulo
            ranks: balanced on average only); else the ranks' tokens are balanced in each round.
    """

    group_size: int
    sticky: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group-affinity: group_size {self.group_size} must be at least 1")

    def pick(self, ready: Iterator[Parcel], want: Want) -> list[Parcel]:
        """Take parcels in order."""
        return Fifo().pick(ready, want)

    def deal(self, parcels: Sequence[Parcel], dealt: Sequence[int]) -> list[list[Parcel]]:
        """Share whole groups; the ranks' tokens differ by the largest group at most, unless `sticky`."""
        groups: dict[int, list[Parcel]] = {}
        for parcel in parcels:
            groups.setdefault(parcel.rows[0] // self.group_size, []).append(parcel)
        numbers = list(groups)
        if self.sticky:
            places = [[i for i, n in enumerate(numbers) if n % len(dealt) == rank] for rank in range(len(dealt))]
        else:
            tokens = [sum(parcel.tokens for parcel in group) for group in groups.values()]
            places = split_evenly(tokens, len(dealt), equal_counts=False)
        shares = [[parcel for i in share for parcel in groups[numbers[i]]] for share in places]
        return shares if self.sticky else _evened_out(shares, dealt)


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {"fifo": Fifo, "token-budget": TokenBudget, "token-balanced": TokenBalanced, "group-affinity": GroupAffinity}
)
"""Policies that a configuration can name without saying where they are."""


def load_policy(text: str) -> Policy:
    """Return the policy that a configuration names.

    Args:
        text: a name of `POLICIES`, or `module:Class` for one of the user's own; then, in parentheses, its settings with
            JSON values: `token-balanced(window=2, equal_counts=false)`, `my_package.policies:Newest`.

    Raises:
        ConfigError: no such policy, or it cannot be made with these settings.
    """
    match = re.fullmatch(r"([\w.:-]+)\s*(?:\((.*)\))?", text.strip())
    if match is None:
        raise ConfigError(f"policy {text!r}: write a name, or name(setting=value, ...); names: {' '.join(POLICIES)}")
    name, settings = match[1], match[2] or ""
    found = _find_policy(name)
    if not all(callable(getattr(found, method, None)) for method in ("pick", "deal")):
        raise ConfigError(f"policy {name!r}: {found!r} has no methods pick and deal (see tq.policies.Policy)")
    try:
        policy: Policy = found(**_settings(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy {text!r}: {error}") from error
    return policy


def _find_policy(name: str) -> Any:
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown policy {name!r}: use one of {' '.join(POLICIES)}, or module:Class{hint}")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be imported: {error}") from error


def _settings(text: str) -> dict[str, Any]:
    settings = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = item.partition("=")
        settings[key.strip()] = msgspec.json.decode(value.strip())
    return settings


def _check_window(window: float) -> None:
    if not 1 <= window < math.inf:
        raise ConfigError(f"window {window} must be at least 1 and finite: it counts in rows wanted")


def _front(ready: Iterator[Parcel], num_rows: int) -> Iterator[Parcel]:
    seen = 0
    for parcel in ready:
        yield parcel
        seen += len(parcel.rows)
        if seen >= num_rows:
            return


def _evened_out(shares: list[list[Parcel]], dealt: Sequence[int]) -> list[list[Parcel]]:
    """Give the heaviest share to the rank that was dealt the least so far, and so on; all else being equal, in order.

    So what rounds leave uneven does not add up over a partition, where ranks need not wait for each other in between.
    """
    heaviest = sorted(shares, key=lambda share: -sum(parcel.tokens for parcel in share))
    ranks = sorted(range(len(dealt)), key=lambda rank: dealt[rank])
    given = dict(zip(ranks, heaviest, strict=True))
    return [given[rank] for rank in range(len(dealt))]


def _lightest(loads: Sequence[int], counts: Sequence[int]) -> int:
    return min(range(len(loads)), key=lambda rank: (loads[rank], counts[rank]))


def _fitting(parcels: Iterable[Parcel], want: Want) -> list[Parcel]:
    chosen: list[Parcel] = []
    rows = tokens = 0
    for parcel in parcels:
        too_many = rows + len(parcel.rows) > want.num_rows or 0 < want.token_budget < tokens + parcel.tokens
        if chosen and too_many:
            continue
        chosen.append(parcel)
        rows += len(parcel.rows)
        tokens += parcel.tokens
    return chosen
