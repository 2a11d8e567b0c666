"""What a trainer rank knows of its versions and of its agent: where the next copy goes, what is delivered. Pure.

    place(v) -> ASK -> TakeSlot ... -> grant -> place(v) -> the granted slot -> stage -> [sealed] -> arrived
             -> OWN_MEMORY while the agent is gone           (moved into a slot once it is back) -^
             -> NEEDLESS: the agent has it already

`weightsync.sender` holds its lock around every call, and keeps deadlines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from asyncflow.device import CopiesDone
from weightsync.shard_writer import Target
from weightsync.version import Version


class Where(Enum):
    """Where a version's copy goes, if not into a slot that was granted."""

    ASK = auto()
    """Into a slot that the agent is to be asked for now."""
    SOON = auto()
    """Into the slot that it was asked for; look again."""
    OWN_MEMORY = auto()
    """Into memory of this process; the agent gets it when it is back."""
    NEEDLESS = auto()
    """Nowhere: the agent has the version."""
    REFUSED = auto()
    """Nowhere: see `SenderState.refused`."""


@dataclass(frozen=True)
class Staged:
    """A version's copy.

    Attributes:
        version, target: what and where.
        slot: token of the agent's memory that holds it; None: it is this process's own.
        copied: the ends of the copies from the device, by bucket; one that is not there has ended.
    """

    version: Version
    target: Target
    slot: bytes | None
    copied: Mapping[int, CopiesDone] = field(default_factory=dict)


class SenderState:
    """The state of one rank's sender."""

    def __init__(self) -> None:
        self.staged: Staged | None = None
        """The newest copy."""
        self.refused: str | None = None
        """Why the agent refused what was published last."""
        self.no_room = ""
        """What the agent waits for before it can give a slot."""
        self._linked: bool | None = None  # None: not yet
        self._granted: Staged | None = None
        self._asked: Version | None = None
        self._complete: Version | None = None
        self._delivered: Version | None = None

    @property
    def undelivered(self) -> Version | None:
        """The staged version, until the agent has it."""
        if self.staged is None or self.staged.version == self._delivered:
            return None
        return self.staged.version

    def begin(self) -> None:
        """Another version is published: what was said of the last one counts no more."""
        self.refused = None
        self.no_room = ""

    def place(self, version: Version) -> Staged | Where:
        """Return where to copy a version; a slot that was granted is the caller's from now on."""
        if self._complete is not None and version <= self._complete:
            return Where.NEEDLESS
        if self._granted is not None and self._granted.version == version:
            granted, self._granted = self._granted, None
            return granted
        if self._linked is False:
            return Where.OWN_MEMORY
        if self.refused is not None:
            return Where.REFUSED
        if self._asked != version:
            self._asked = version
            return Where.ASK
        return Where.SOON

    def take_own_memory(self) -> Target | None:
        """Return this process's memory that the last copy is in, if it is not read and will not be; else None."""
        staged = self.staged
        if staged is None or staged.slot is not None or self._linked is not False:
            return None
        self.staged = None
        return staged.target

    def link(self) -> Staged | Version | None:
        """The agent can be asked; returns what to begin with: a copy to deliver, or a version to ask a slot for."""
        self._linked = True
        if self.staged is not None:
            self._asked = None
            return self.staged
        return self._asked

    def unlink(self) -> None:
        """The agent is gone, and with it all that it held."""
        self._linked = False
        self._granted = self._complete = self._delivered = None

    def grant(self, granted: Staged) -> None:
        """A slot is there; nothing is copied into it yet."""
        self._granted = granted
        self._asked = None

    def settle(self, *, complete: Version | None = None, refused: str | None = None) -> None:
        """The agent gave no slot: it has the version (and those before) already, or refuses it."""
        self._complete = complete or self._complete
        self.refused = refused
        self._asked = None

    def wait_on(self, reason: str) -> Version | None:
        """The agent has no room yet; returns the version that it is to be asked for again."""
        self.no_room = reason
        return self._asked

    def is_due(self, staged: Staged) -> bool:
        """Return whether a copy still is the newest one, and not delivered."""
        return staged is self.staged and staged.version != self._delivered

    def move(self, staged: Staged, moved: Staged) -> None:
        """A copy lies somewhere else now."""
        if self.staged is staged:
            self.staged = moved

    def arrived(self, version: Version) -> None:
        """The agent has this rank's part of a version."""
        self._delivered = version

    def take_ahead(self, version: Version) -> bool:
        """Return whether to ask for the slot of a version that is yet to come; it counts as asked then."""
        if self._granted is not None and self._granted.version < version:
            self._granted = None  # that version went another way
        if self._asked is not None or self._granted is not None:
            return False
        self._asked = version
        return True
