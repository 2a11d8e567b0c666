"""The one reply that every service may give."""

from enum import StrEnum

import msgspec


class RefusedKind(StrEnum):
    """Why a request was refused."""

    INVALID = "invalid"
    SUPERSEDED = "superseded"


class Refused(msgspec.Struct, tag=True):
    """The request was not carried out; nothing changed."""

    kind: RefusedKind
    message: str
