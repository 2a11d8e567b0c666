"""Dynamic sampling: which groups teach nothing, since all their answers have the same reward. Pure.

    answers of a group are scored -> rewards differ  -> put, as ever
                                 '-> all are equal   -> `QueueClient.filter_groups`: the group leaves the queue,
                                                        admission puts the next prompt into its step, and the ledger
                                                        gets a line

Who scores asks: the rollout's outbox, or the role `reward`. Whole groups come to it, and it lets nothing of one out
before it has judged it. Only after a crash in the middle of a put a part of a group may be all that is left to score;
it is let through, and its advantages are zero if its rewards are equal.

Source: Yu et al. 2025 (arXiv 2503.14476), section 3.2.
"""

from collections.abc import Sequence


def uniform_groups(groups: Sequence[int], rewards: Sequence[float], *, group_size: int) -> frozenset[int]:
    """Return the ids of the whole groups whose rewards are all equal.

    Args:
        groups: id of each answer's group.
        rewards: of each answer.
        group_size: G.
    """
    members: dict[int, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        members.setdefault(group, []).append(reward)
    return frozenset(group for group, known in members.items() if len(known) == group_size and min(known) == max(known))
