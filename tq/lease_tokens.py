"""Lease tokens: numbers that only ever grow, over restarts of a controller and of the whole queue.

    lineage (11 bits) | start of the controller (12 bits) | count (40 bits)

A queue that begins anew for the next lineage knows nothing of the leases before, and refuses puts under them.
"""

from asyncflow.errors import TransportError

_COUNT_BITS = 40
_START_BITS = 12
_LINEAGE_BITS = 11


def first_token(lineage: int, start: int = 0) -> int:
    """Return a number below all tokens of a controller's start, and not below those of earlier ones.

    Args:
        lineage: of the queue.
        start: counts the controller's starts in it from 1; 0: before all of them.

    Raises:
        TransportError: so often nothing can be started again.
    """
    if lineage >= 1 << _LINEAGE_BITS or start >= 1 << _START_BITS:
        raise TransportError(
            f"the queue was started {lineage} times, and its controller {start} times since, which is more than lease "
            f"tokens can tell apart; start the command again with --resume"
        )
    return (lineage << _START_BITS | start) << _COUNT_BITS
