"""Turns that receivers take to be in the next broadcast. Pure.

A broadcast starts once all the receivers that joined are ready.

    receivers  Join (parks) ..................... Transfer(epoch, members) -> group, broadcast -> Join (parks) ...
    trainer    ............. Begin (parks) ...... Transfer(epoch, members) -> group, broadcast

A group is built once per epoch. An epoch ends when a member leaves, comes, is late, or reports that its group broke,
and with the trainer.
"""

import secrets
from dataclasses import dataclass, field

from weightsync.messages import Transfer
from weightsync.version import Version


@dataclass(frozen=True)
class _Begin:
    call: object
    session: object
    version: Version
    plan: str
    deadline: float


@dataclass
class Rounds:
    """The broadcasts of one lead agent."""

    token: str = field(default_factory=lambda: secrets.token_hex(4))
    """Keeps its epochs apart from those of an agent that had this place before."""
    _number: int = 0
    _members: dict[object, str] = field(default_factory=dict)
    _ready: dict[object, object] = field(default_factory=dict)
    _begin: _Begin | None = None
    _trainer: object = None

    def join(self, call: object, session: object, name: str, broken: str) -> list[tuple[object, Transfer]]:
        """A receiver is ready; returns the calls to answer.

        Args:
            call, session: whom to answer.
            name: of the receiver.
            broken: epoch whose group broke, or "".
        """
        for former in [each for each, other in self._members.items() if other == name and each != session]:
            self._leave(former)  # it came back before the end of its old channel was seen
        if session not in self._members:
            self._members[session] = name
            self._number += 1
        self._break(broken)
        self._ready[session] = call
        return self._start()

    def begin(
        self, call: object, session: object, version: Version, plan: str, *, broken: str, deadline: float
    ) -> list[tuple[object, Transfer]]:
        """The trainer wants to broadcast; members that are not ready by `deadline` are left out."""
        self._break(broken)
        if session != self._trainer:  # another process has no group yet
            self._trainer = session
            self._number += 1
        self._begin = _Begin(call, session, version, plan, deadline)
        return self._start()

    def closed(self, session: object) -> list[tuple[object, Transfer]]:
        """A client is gone."""
        if self._begin is not None and self._begin.session == session:
            self._begin = None
        self._leave(session)
        return self._start()

    def tick(self, now: float) -> list[tuple[object, Transfer]]:
        """Time passed."""
        if self._begin is None or self._begin.deadline > now:
            return []
        for session in [each for each in self._members if each not in self._ready]:
            self._leave(session)
        return self._start()

    @property
    def _epoch(self) -> str:
        return f"{self.token}.{self._number}"

    def _leave(self, session: object) -> None:
        self._ready.pop(session, None)
        if self._members.pop(session, None) is not None:
            self._number += 1

    def _break(self, epoch: str) -> None:
        if epoch == self._epoch:
            self._number += 1

    def _start(self) -> list[tuple[object, Transfer]]:
        if self._begin is None or len(self._ready) < len(self._members):
            return []
        begin, self._begin = self._begin, None
        ready, self._ready = self._ready, {}
        transfer = Transfer(self._epoch, begin.version, sorted(self._members.values()), begin.plan)
        return [(call, transfer) for call in (begin.call, *ready.values())]
