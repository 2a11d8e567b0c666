"""Reads the rows of a lease; gives them back when their unit is gone."""

import contextlib
import threading
from collections.abc import Sequence

from asyncflow.errors import PeerRefused, Superseded, TransportError
from tq.batch import PackedBatch
from tq.client.patience import Patience
from tq.client.queue_client import QueueClient
from tq.messages import Granted

_RETRY_S = 0.1


def read_lease(
    client: QueueClient, granted: Granted, columns: Sequence[str], *, patience: Patience, closing: threading.Event
) -> PackedBatch | None:
    """Read columns of a lease's rows.

    Args:
        client: holds the lease.
        granted: the lease.
        columns: to read.
        patience: counts how long nothing could be read.
        closing: cuts the pause short that follows a failure.

    Returns:
        The rows; None when they cannot be read: they were given back, and come again once somebody has put them again.

    Raises:
        PeerRefused: a column is not written, or such.
        TransportError: this has gone on for too long.
    """
    try:
        batch = client.get(granted, columns)
    except PeerRefused:
        raise
    except TransportError as error:
        patience.unreadable(error)
        with contextlib.suppress(Superseded):
            client.give_back(granted.task, granted)
        closing.wait(_RETRY_S)
        return None
    patience.served()
    return batch
