"""Dynamic sampling: which groups teach nothing, since all their responses have the same reward. Pure.

    responses of a group are scored -> rewards differ  -> put, as ever
                                   '-> all are equal   -> `QueueClient.filter_groups`: the group leaves the queue,
                                                          admission puts the next prompt into its step, and the ledger
                                                          gets a line

The process that scores asks: the rollout's outbox, or the role `reward`. It gets whole groups, and puts nothing of one
before it is judged. Responses whose reward failed (NaN) are no part of the judgement; a group with fewer than two
rewards shows no difference to judge, and is put: its advantages are zero, and the trainer counts the failures. Only
after a crash in the middle of a put a part of a group may be all that is left to score; it is let through, and its
advantages are zero if its rewards are equal.

Source: Yu et al. 2025 (arXiv 2503.14476), section 3.2.
"""

import math
from collections.abc import Sequence


def uniform_groups(groups: Sequence[int], rewards: Sequence[float], *, group_size: int) -> frozenset[int]:
    """Return the ids of the whole groups that have several rewards, all of them equal.

    Args:
        groups: id of each response's group.
        rewards: of each response; NaN: there is none.
        group_size: G.
    """
    members: dict[int, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        members.setdefault(group, []).append(reward)
    whole = {group: rewards for group, rewards in members.items() if len(rewards) == group_size}
    return frozenset(group for group, rewards in whole.items() if _teaches_nothing(rewards))


def _teaches_nothing(rewards: Sequence[float]) -> bool:
    known = [reward for reward in rewards if not math.isnan(reward)]
    return len(known) > 1 and min(known) == max(known)
