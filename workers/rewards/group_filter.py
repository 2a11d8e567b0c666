"""Which groups are trained on (`algorithm.group_filter`): refused ones leave the queue, and the next tasks replace
them.

    responses of a group are scored -> the filter keeps it    -> put, as usual
                                   '-> the filter refuses it  -> `Lease.filter`: the group leaves the queue, admission
                                                                 puts the next task into its step, and the ledger gets
                                                                 a line

`zero_variance` refuses groups whose rewards are all equal. A user's filter, `def keep(rewards: list[float]) -> bool`,
runs in a child process. Torch-free.
"""

import math
from array import array
from collections.abc import Sequence

from asyncflow.errors import UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.settings.algorithms import ZERO_VARIANCE, PolicyConfig

FIELD = "algorithm.group_filter"
ARGUMENTS = ("rewards",)
_TIMEOUT_S = 30.0


class GroupFilter:
    """Judges whole groups, in the process that scores: a rollout's outbox, or the role `reward`. The constructor raises
    ConfigError if a user's function does not exist, UserCodeNotStarted if its process fails twice."""

    def __init__(self, name: str, *, group_size: int) -> None:
        self._what = f"{FIELD}: {name}"
        self._group_size = group_size
        self._pool: CallPool | None = None
        if name == ZERO_VARIANCE:
            return
        self._pool = CallPool(
            Entry("workers.calls.user_function:importable", {"name": name, "field": FIELD, "arguments": ARGUMENTS}),
            what=self._what,
            limit="the deadline",
            timeout_s=_TIMEOUT_S,
            concurrency=1,
        )
        self._pool.until_ready()

    def refused(
        self, groups: Sequence[int], rewards: Sequence[float], turns: Sequence[Sequence[float]] = ()
    ) -> frozenset[int]:
        """Return the ids of whole groups that are not to be trained on.

        Responses whose reward failed (NaN) are ignored. A group without any reward (`zero_variance`: with fewer than
        two) cannot be judged, and is kept: its advantages are zero, and the trainer counts the failures. So is a
        partial group, which only a crash in the middle of a put leaves behind. Raises UserCodeFailed if the user's
        function raised, hung, or did not return a bool.

        Args:
            groups, rewards, turns: of each response: its group, its reward, the rewards of its turns.
            turns: empty unless turns are credited by themselves: equal sums of other turns teach something.
        """
        members: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            members.setdefault(group, []).append(place)
        refused = set()
        for group, places in members.items():
            known = [place for place in places if not math.isnan(rewards[place])]
            own = [rewards[place] for place in known]
            apart = [turns[place] if turns else (rewards[place],) for place in known]
            if len(places) == self._group_size and known and not self._keeps_group(own, apart):
                refused.add(group)
        return frozenset(refused)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _keeps_group(self, rewards: Sequence[float], turns: Sequence[Sequence[float]]) -> bool:
        if self._pool is None:
            # As advantages see them: sums of turns' rewards differ in their last digits.
            return len(turns) == 1 or len({tuple(array("f", own)) for own in turns}) > 1
        on = f"rewards {rewards}"
        kept = self._pool.call_and_wait(list(rewards), on=on)
        if not isinstance(kept, bool):
            raise UserCodeFailed(f"{self._what} returned {kept!r} on {on}; return True to train the group, else False")
        return kept


def load_group_filter(config: PolicyConfig, *, group_size: int) -> GroupFilter | None:
    """Return the run's filter, or None if all groups are trained on."""
    return None if config.group_filter is None else GroupFilter(config.group_filter, group_size=group_size)
