"""What is known of a group that went into quarantine: why, and which one took its place. Plain data, torch-free."""

import msgspec


class QuarantineCause(msgspec.Struct, frozen=True):
    """Why a group is in quarantine.

    Attributes:
        task: that failed on it; "": nobody who knew is left.
        deliveries: how often one of its rows came back from that task.
    """

    task: str = ""
    deliveries: int = 0


UNKNOWN = QuarantineCause()


class Refill(msgspec.Struct, frozen=True):
    """Group `group` takes the place of group `replaced`, which is in quarantine, in `step`.

    Attributes:
        group, replaced: ids.
        step: that both were admitted for.
        cause: of the quarantine.
    """

    group: int
    step: int
    replaced: int
    cause: QuarantineCause = UNKNOWN
