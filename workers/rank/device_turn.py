"""A rank's end of the devices' turn, in a role that shares its devices with another one (`roles: rollout+actor`).

    ask() ...... granted -> held: the gang may allocate ... wanted: the other side waits ... free memory -> give()

The launcher decides (`launcher.process.device_turn`). All ranks of a gang make the same calls, and its rank 0 speaks
for them; a thread of each listens, so that nothing polls. Messages are sealed items of queues in the job store,
numbered so that an item that a stranger pushes again does not count a second time.

    queue `turn`                     JSON of `TurnMessage`: a gang asks, or gives    rank 0 -> launcher
    queue `turn/GANG/ATTEMPT/RANK`   the same: it may allocate, or is wanted         launcher -> each rank
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

import torch.distributed as dist

from asyncflow.errors import SealBroken
from asyncflow.sealed_store import SealedStore
from weightsync.version import Version

if TYPE_CHECKING:  # the launcher imports this file
    from workers.rank.context import WorkerContext

logger = logging.getLogger(__name__)

INBOX = "turn"
WAITING = "waiting for the devices"
"""The state of a rank that has asked; while it starts, the detail of that state."""

_NO_DEADLINE = timedelta(days=20)
_LOOK_S = 0.5  # how often a wait checks whether the run stops (s)


class Word(StrEnum):
    ASKED = "asked"
    GIVEN = "given"
    GRANTED = "granted"
    WANTED = "wanted"
    WANTED_AT_ONCE = "wanted at once"
    CLOSED = "closed"  # the launcher, to itself: nobody listens any more


@dataclass(frozen=True)
class TurnMessage:
    """What a gang says, or is told.

    Attributes:
        gang, attempt: the gang, and which start of it.
        number: counts the messages to the launcher, and those to this start of the gang.
        version: (lineage, step) of the newest weights that the other side should load; None: it publishes none.
    """

    word: Word
    gang: str
    attempt: int
    number: int
    version: tuple[int, int] | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> "TurnMessage":
        fields = json.loads(text)
        version = None if fields["version"] is None else tuple(fields["version"])
        return TurnMessage(**{**fields, "word": Word(fields["word"]), "version": version})


def told_queue(gang: str, attempt: int, rank: int) -> str:
    return f"{INBOX}/{gang}/{attempt}/{rank}"


class TurnHolder:
    """One rank's end; used by one thread.

    Args:
        speak: a client of the job store for this thread; `listen`: for the listening one.
        news: set whenever the launcher says something.
        meet: returns once all ranks of the gang have called it.
    """

    def __init__(
        self,
        speak: SealedStore,
        listen: SealedStore,
        *,
        gang: str,
        attempt: int = 0,
        rank: int = 0,
        news: threading.Event,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = speak
        self._gang, self._attempt, self._rank = gang, attempt, rank
        self._news = news
        self._meet = meet
        self._number = 0
        self._changed = threading.Condition()
        self._held = self._asked = self._wanted = self._at_once = False
        self._version: Version | None = None
        listen.set_timeout(_NO_DEADLINE)
        threading.Thread(target=self._listen, args=(listen,), name="turn", daemon=True).start()

    @property
    def held(self) -> bool:
        """The gang may have device memory."""
        return self._held

    @property
    def asked(self) -> bool:
        """The gang has asked and waits."""
        return self._asked

    @property
    def wanted(self) -> bool:
        """The gang has the devices, and the other side waits for them."""
        return self._held and self._wanted

    @property
    def wanted_at_once(self) -> bool:
        """The same, by a trainer that starts again: what the gang does is void."""
        return self._held and self._at_once

    @property
    def version(self) -> Version | None:
        """The newest version that the other side had published when it gave the devices away; None: there is none."""
        return self._version

    def ask(self) -> None:
        """Ask for the devices, unless the gang has them or has asked."""
        with self._changed:
            if self._held or self._asked:
                return
            self._asked = True
        self._say(Word.ASKED)

    def wait(self, stop: threading.Event | None = None) -> bool:
        """Wait until the gang has the devices; False: `stop` was set first."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._held, _LOOK_S):
                    return True
            if stop is not None and stop.is_set():
                return False

    def give(self, published: Version | None = None) -> None:
        """Give the devices away: this rank has freed its memory there. `published`: the newest version that the other
        side should load; None: this gang publishes none."""
        with self._changed:
            self._held = self._wanted = False
        self._meet()
        self._say(Word.GIVEN, published)

    def _say(self, word: Word, version: Version | None = None) -> None:
        if self._rank == 0:
            said = TurnMessage(word, self._gang, self._attempt, self._number, version)
            self._store.queue_push(INBOX, said.to_json())
            self._number += 1

    def _listen(self, store: SealedStore) -> None:
        heard = -1
        while True:
            try:
                told = TurnMessage.from_json(store.queue_pop(told_queue(self._gang, self._attempt, self._rank)))
            except SealBroken as error:
                logger.error("%s; it is ignored", error)
                continue
            except dist.DistError:  # the job store is gone, and the heartbeat ends this process
                return
            if told.number > heard:
                heard = told.number
                self._note(told)

    def _note(self, told: TurnMessage) -> None:
        with self._changed:
            if told.word is Word.GRANTED:
                self._held, self._asked, self._wanted, self._at_once = True, False, False, False
                self._version = None if told.version is None else Version(*told.version)
            else:
                self._wanted = True
                self._at_once = told.word is Word.WANTED_AT_ONCE
            self._changed.notify_all()
        self._news.set()


def open_turn(
    context: "WorkerContext", news: threading.Event, *, meet: Callable[[], object] = lambda: None
) -> TurnHolder | None:
    """Return this rank's end of the turn; None: its role has devices of its own. See `TurnHolder`."""
    if context.gang.role not in context.config.colocated:
        return None
    return TurnHolder(
        context.sealed_store(), context.sealed_store(), gang=context.gang.name, attempt=context.attempt,
        rank=context.rank, news=news, meet=meet,
    )  # fmt: skip


def wait_for_devices(
    context: "WorkerContext", turn: TurnHolder, *, stop: threading.Event | None = None, span: str = "wait for devices"
) -> bool:
    """Ask, and wait until the gang has the devices, or `stop` is set; returns whether it has them. The status says so
    meanwhile. `span`: of the timeline; another one inside of a span that counts as a wait."""
    turn.ask()
    with context.waiting_for_devices(WAITING), context.timeline.span(span):
        return turn.wait(stop)


class YieldRule:
    """When a trainer that waits for rows gives the devices away: how long the queue may be silent before. Pure.

    Rows that are ready come within milliseconds; beyond that a request is parked. All ranks of a gang are granted a
    round together and read it at about the same time: when one has its part, the others get theirs, unless a storage
    unit died in between and the rows have to be generated again.
    """

    PARKED_S = 0.02
    SKEW_S = 1.0

    def __init__(self, said: Sequence[tuple[bool, float, bool]]) -> None:
        """`said`: of every rank, whether it has a round, how long the queue has not answered its request (s; infinite:
        it never asks), and whether it knows that the devices are wanted."""
        self._said = said

    @property
    def all_have_rounds(self) -> bool:
        return all(ready for ready, _, _ in self._said)

    @property
    def is_wanted(self) -> bool:
        return any(wanted for _, _, wanted in self._said)

    @property
    def should_yield(self) -> bool:
        """Whether to give the devices away."""
        # Ranks that get their rounds from another one know nothing of the queue.
        asking = [(ready, seconds) for ready, seconds, _ in self._said if seconds < math.inf]
        limit_s = self.SKEW_S if any(ready for ready, _ in asking) else self.PARKED_S
        silent_s = min((seconds for ready, seconds in asking if not ready), default=0.0)
        return self.is_wanted and silent_s >= limit_s
