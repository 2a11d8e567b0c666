"""What is known of a group that left its step, and where admission stands. Plain data, torch-free."""

import msgspec


class RemovalCause(msgspec.Struct, frozen=True, array_like=True):
    """Why a group is a dead letter: a task failed on it too often, or a filter found its rewards useless.

    Attributes:
        task: that failed on it, or judged it; "": not known any more.
        deliveries: how often one of its rows came back from that task.
        filtered: it was judged: it is fine, and would teach nothing.
    """

    task: str = ""
    deliveries: int = 0
    filtered: bool = False


UNKNOWN = RemovalCause()


class Refill(msgspec.Struct, frozen=True, array_like=True):
    """Group `group` takes the place of group `replaced`, which is a dead letter, in `step`.

    Attributes:
        group, replaced: ids.
        step: that both were admitted for.
        cause: of the dead letter.
    """

    group: int
    step: int
    replaced: int
    cause: RemovalCause = UNKNOWN


class AdmissionMark(msgspec.Struct):
    """Where admission stands; durable before a group is put, and part of every checkpoint.

    Attributes:
        version: newest weights.
        next_step: the next one to admit.
        refills: in order of their ids.
    """

    version: int
    next_step: int
    refills: list[Refill] = []
