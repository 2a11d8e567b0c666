"""The one reply that every service may give: no. An error becomes a `Refused` here and the same error there."""

from enum import StrEnum

import msgspec

from asyncflow.errors import AsyncFlowError, PeerRefused, PutPending, QueueFull, RowsExist, Superseded, TransportError


class RefusedKind(StrEnum):
    """Why a request was refused."""

    INVALID = "invalid"
    SUPERSEDED = "superseded"
    FULL = "full"
    EXISTS = "exists"
    PENDING = "pending"


class Refused(msgspec.Struct, tag=True):
    """The request was not carried out; nothing changed."""

    kind: RefusedKind
    message: str


_ERRORS: dict[RefusedKind, type[TransportError]] = {
    RefusedKind.SUPERSEDED: Superseded,
    RefusedKind.FULL: QueueFull,
    RefusedKind.EXISTS: RowsExist,
    RefusedKind.PENDING: PutPending,
    RefusedKind.INVALID: PeerRefused,
}


def refused(error: AsyncFlowError) -> Refused:
    """Return the reply that says so."""
    kind = next((kind for kind, cls in _ERRORS.items() if isinstance(error, cls)), RefusedKind.INVALID)
    return Refused(kind, str(error))


def refusal(reply: Refused, service: str) -> TransportError:
    """Return the error to raise for it."""
    return _ERRORS[reply.kind](f"{service}: {reply.message}")
