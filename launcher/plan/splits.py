"""How many ranks each role gets: splits of a number of devices. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence

from launcher.plan.scenario import rollout_ranks
from workers.settings.run import RunConfig

SIZED = ("rollout", "actor", "ref", "critic")
"""Roles that a plan sizes; all others stay as configured."""


def splits(config: RunConfig, totals: Sequence[int], share: float | None) -> Iterator[dict[str, int]]:
    """Yield roles: all replicas of the actor over which the batch divides, and the rest shared by work.

    Args:
        config: with its layouts.
        totals: devices of the sized roles together.
        share: of rollout's and reference's devices that are the reference's; None: the run has none.
    """
    replica = config.actor.megatron.ranks_per_copy if config.actor.engine == "megatron" else 1
    instance = rollout_ranks(config)
    fixed = {role: number for role, number in config.roles.items() if role not in SIZED}
    for total, replicas in itertools.product(totals, _divisors(config.schedule.rollout_batch_size)):
        actor = replicas * replica
        for critic in _critics(config, actor):
            for ref in (0,) if share is None else _copies(config, total - actor - critic, share):
                rollout = (total - actor - critic - ref) // instance * instance
                if config.rollout.engine == "openai":  # one feeds all servers
                    rollout = min(rollout, 1)
                if rollout > 0:
                    own = {"rollout": rollout, "actor": actor, "ref": ref, "critic": critic}
                    yield {role: number for role, number in (own | fixed).items() if number or role in fixed}


def _copies(config: RunConfig, room: int, share: float) -> Sequence[int]:
    """Return numbers of the reference's ranks: none (the actor hosts one that is not sharded), and those around their
    share of the work."""
    copy = config.ranks_per_copy("ref")
    none = {0} if copy == 1 or config.actor.tri_model else set()
    if room < 2:
        return sorted(none)
    best = room * share / copy
    near = {math.floor(best), math.ceil(best), math.ceil(best) + 1}
    return sorted(none | {number * copy for number in near if 1 <= number * copy < room})


def _critics(config: RunConfig, actor: int) -> Sequence[int]:
    """Return numbers of the critic's ranks: none (an actor of FSDP2 hosts it), and those around the actor's, whose work
    is alike, over which the batch divides."""
    if not config.algorithm.has_critic:
        return (0,)
    divisors = _divisors(config.schedule.rollout_batch_size)
    own = [number for number in divisors if actor <= 2 * number <= 4 * actor]
    own = own or [max(number for number in divisors if number <= actor)]
    hosts, alone = config.actor.engine == "fsdp", not config.schedule.lateness
    return [*([0] if hosts else []), *(own if alone else [])]


def _divisors(groups: int) -> list[int]:
    return [number for number in range(1, groups + 1) if groups % number == 0]
