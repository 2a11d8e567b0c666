"""Putting new rows on some unit, however often a unit dies or an answer is lost on the way."""

from collections.abc import Callable

from asyncflow.errors import PeerRefused, PutPending, RowsExist, Superseded, TransportError
from tq.client.services import QueueServices
from tq.client.unit_loads import UnitLoads


def put_somewhere(services: QueueServices, loads: UnitLoads, put: Callable[[str], None], timeout_s: float) -> None:
    """Try units, the emptiest first, until one has taken the rows.

    Args:
        services: which units are up.
        loads: what they hold.
        put: puts the rows on a unit.
        timeout_s: for all attempts.

    Raises:
        RowsExist, PeerRefused: they were there before the first attempt, or were refused.
        TransportError: no unit took them in time, or another put of one of them did not end in time.
    """
    unsure: set[str] = set()
    """Units that may have taken the rows though their answer did not come."""
    ask_again: set[str] = set()

    def attempt() -> None:
        if not services.units():
            services.beats.beat(services.directory.lead)
        units = services.units()
        unit = loads.emptiest({name: units[name] for name in ask_again & units.keys()} or units, unsure)
        ask_again.clear()
        try:
            put(unit)
        except RowsExist as error:
            if not unsure:
                raise
            if unit not in unsure:  # an earlier attempt got through, or died and a controller does not know it yet
                ask_again.update(unsure)
                raise TransportError(str(error)) from error
        except PutPending as error:  # what becomes of it decides whether they exist
            raise TransportError(str(error)) from error
        except (PeerRefused, Superseded):
            raise
        except TransportError:
            unsure.add(unit)
            raise

    services.patiently(attempt, services.deadline(timeout_s))
