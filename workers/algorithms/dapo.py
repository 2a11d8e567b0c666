"""DAPO: decoupled clip and dynamic sampling policy optimisation.

The higher upper clip is `eps_clip_high`, the token-level loss `loss_normalization: token`. Dynamic sampling: groups
that teach nothing, since all their responses have the same reward, are taken out before they get here:

    responses of a group are scored -> rewards differ  -> put, as ever
                                   '-> all are equal   -> `QueueClient.filter_groups`: the group leaves the queue,
                                                          admission puts the next prompt into its step, and the ledger
                                                          gets a line

Source: Yu et al. 2025 (arXiv 2503.14476), section 3.

Legend of shapes: N responses.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from tq.batch import Column, PackedBatch
from workers.algorithms.advantages import group_advantages
from workers.algorithms.algorithm import Algorithm
from workers.algorithms.config import DAPOConfig
from workers.tasks.rollouts import drawn_per_row


class DAPO(Algorithm[DAPOConfig]):
    """GRPO's advantages, from rewards that fall for overlong responses."""

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per row, from `rewards` and, with a buffer, the drawn tokens of each."""
        reward_N = batch["rewards"].values.double()
        buffer = self._config.overlong_buffer_tokens
        if buffer:
            reward_N = reward_N + overlong_penalty(
                drawn_per_row(batch), max_tokens=self._max_response_tokens, buffer_tokens=buffer
            )
        reward_BG = reward_N.reshape(-1, group_size)
        return {"advantages": Column.of_scalars(group_advantages(reward_BG, eps=self._config.advantage_eps))}


def overlong_penalty(length_N: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return float64 [N]: 0 for responses shorter than the buffer's begin, then falling linearly, -1 at `max_tokens`.

    Args:
        length_N: integer [N], tokens of each response.
        max_tokens: L_max.
        buffer_tokens: L_cache, at least 1.
    Source: arXiv 2503.14476, eq. 13.
    """
    return ((max_tokens - buffer_tokens - length_N.double()) / buffer_tokens).clamp(-1, 0)


def uniform_groups(groups: Sequence[int], rewards: Sequence[float], *, group_size: int) -> frozenset[int]:
    """Return the ids of the whole groups that have several rewards, all of them equal.

    The process that scores asks: the rollout's outbox, or the role `reward`. It gets whole groups, and puts nothing of
    one before it is judged. Responses whose reward failed (NaN) are no part of the judgement; a group with fewer than
    two rewards shows no difference to judge, and is put: its advantages are zero, and the trainer counts the failures.
    Only after a crash in the middle of a put a part of a group may be all that is left to score; it is let through, and
    its advantages are zero if its rewards are equal.

    Args:
        groups: id of each response's group.
        rewards: of each response; NaN: there is none.
        group_size: G.
    Source: Yu et al. 2025, section 3.2.
    """
    members: dict[int, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        members.setdefault(group, []).append(reward)
    whole = {group: rewards for group, rewards in members.items() if len(rewards) == group_size}
    return frozenset(group for group, rewards in whole.items() if _teaches_nothing(rewards))


def _teaches_nothing(rewards: Sequence[float]) -> bool:
    known = [reward for reward in rewards if not math.isnan(reward)]
    return len(known) > 1 and min(known) == max(known)
