"""What is known about a group that left its step, and where admission stands. Plain data, torch-free."""

import secrets

import msgspec

from asyncflow.errors import TransportError


class RemovalCause(msgspec.Struct, frozen=True, array_like=True):
    """Why a group is a dead letter: a task failed on it too often, or a filter found its rewards useless."""

    task: str = ""  # the one that failed on it, or judged it; "": no longer known
    deliveries: int = 0  # how often one of its rows came back from that task
    filtered: bool = False  # it was judged: it is fine, but would teach nothing


UNKNOWN = RemovalCause()


class Refill(msgspec.Struct, frozen=True, array_like=True):
    """Group `group` takes the place of the dead-letter group `replaced` in `step`, for which both were admitted."""

    group: int
    step: int
    replaced: int
    cause: RemovalCause = UNKNOWN


class AdmissionMark(msgspec.Struct):
    """Where admission stands; durable before a group is put, and part of every checkpoint.

    `version`: newest weights; `next_step`: the next one to admit; `refills`: in order of their ids.
    """

    version: int
    next_step: int
    refills: list[Refill] = []


# Lease tokens: numbers that only ever grow, across restarts of a controller and of the whole queue.
#
#     lineage (11 bits) | start of the controller (12 bits) | count (40 bits)
#
# A queue that begins anew for the next lineage knows nothing about earlier leases, and refuses puts under them.

_COUNT_BITS = 40
_START_BITS = 12
_LINEAGE_BITS = 11


def first_token(lineage: int, start: int = 0) -> int:
    """Return a number below all tokens of a controller's start, and not below those of earlier starts.

    `start` counts the controller's starts in this lineage from 1; 0: before all of them.

    Raises:
        TransportError: more starts than tokens can tell apart.
    """
    if lineage >= 1 << _LINEAGE_BITS or start >= 1 << _START_BITS:
        raise TransportError(
            f"the queue was started {lineage} times, and its controller {start} times since, which is more than lease "
            f"tokens can tell apart; start the command again with --resume"
        )
    return (lineage << _START_BITS | start) << _COUNT_BITS


# What a consumer is called where its leases are known: its name and its incarnation. Pure.
#
# trainer@5ba7898b          others may have the same name at the same time
# rollout-0/0@2.5ba7898b    the process is there once under its name, and this is its third start: what was there
#                           before is gone, however that end may have gone unnoticed


def new_owner(name: str, attempt: int | None = None) -> str:
    """Return the name of a new incarnation. `attempt` counts its starts; None: others may have the same name."""
    incarnation = secrets.token_hex(4)
    return f"{name}@{incarnation}" if attempt is None else f"{name}@{attempt}.{incarnation}"


def replaces(owner: str, other: str) -> bool:
    """Whether `other` must be gone because `owner` is there."""
    name, attempt = _parts(owner)
    other_name, other_attempt = _parts(other)
    return name == other_name and attempt is not None and other_attempt is not None and attempt > other_attempt


def _parts(owner: str) -> tuple[str, int | None]:
    name, _, incarnation = owner.rpartition("@")
    attempt, dot, _ = incarnation.partition(".")
    return name, int(attempt) if dot and attempt.isdigit() else None
