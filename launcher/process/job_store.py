"""The job store: a TCPStore in the head launcher, and the keys through which launcher and workers communicate.

    phase              run | evaluate | stop | exit                             launcher -> workers
    save               how often the user asked for a checkpoint                launcher -> actor rank 0
    pause              no | pausing (no step is admitted) | paused (all that     launcher -> workers
                       were admitted are trained)
    status/GANG/RANK   JSON of `launcher.process.progress.Status`, about twice a second  worker -> launcher
    warning/GANG/RANK  JSON: trouble that the run survives; text "": none        worker -> launcher
    first/reward_failure   why a response could not be scored, the first time     worker -> launcher
    reward_failure         the same, the last time                               worker -> actor, launcher
    first/rollout_failure, rollout_failure   the same for rollouts                worker -> actor, controller, launcher
    first/tokens, first_prompts   what the launcher's tokenizer makes of these    launcher -> worker
                       prompts; there if gangs are started by hand
    done               b"1" when the last step is trained and saved              actor rank 0 -> launcher
    turn, turn/...     queues of colocated roles: `workers.rank.device_turn`      both ways
    left/GANG/RANK     set by a rank when it leaves; a value that starts with    worker -> launcher
                       `error:` carries the failure

Values are sealed (`asyncflow.sealed_store`). A value that this job did not write is skipped: every value here is
repeated or dispensable.

Imports torch, so import it only after the config is accepted. One client per thread: a blocked call stalls all others
on the same client.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncflow.agreement import Identity
from asyncflow.errors import SealBroken
from asyncflow.job import LOOPBACK, NO_PAUSE, GangSpec, error_in
from asyncflow.sealed_store import SealedStore, connect_store, serve_store
from launcher.process.device_turn import TurnAsked, TurnEvent, TurnGiven, TurnGranted, TurnInstruction
from launcher.process.progress import STARTING, Status, Statuses
from launcher.process.run_events import FAILED, GangExited, Phase
from tq.unit.row_journal import JournalMemory
from workers.rank.device_turn import INBOX, TurnMessage, Word, told_queue

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=60)
_NO_DEADLINE = timedelta(days=20)
_FAILURES = ("rollout", "reward")
"""Kinds of failures that a run survives; see `workers.rank.context`."""


class JobStoreClient:
    """The job store's address and a client of it. `secret` is the job's (hex); `client`: None makes a new one."""

    def __init__(self, host: str, port: int, secret: str, client: TCPStore | None = None) -> None:
        self.host = host
        self.port = port
        self._secret = bytes.fromhex(secret)
        self._store = SealedStore(self.open_client() if client is None else client, self._secret)

    def open_client(self) -> TCPStore:
        """Return another connection, for a thread of its own; it does not seal what it reads and writes."""
        return connect_store(self.host, self.port, TIMEOUT)

    def open_sealed(self) -> SealedStore:
        """Return another client, for a thread of its own."""
        return SealedStore(self.open_client(), self._secret)

    def last_words(self, gang: str, rank: int) -> str | None:
        """Return what a rank said when it left; None: it has not. Any thread may call it, since it does not block."""
        key = f"left/{gang}/{rank}"
        words = self._store.get_existing([key]).get(key)
        return None if words is None else words.decode(errors="replace")

    def keep_journal(self, unit: str) -> JournalMemory:
        """Return memory in which a storage unit of this node records its rows, for its next attempt to find."""
        return JournalMemory(self._store, unit)


class JobStore(JobStoreClient):
    """The server, and the main thread's client; raises OSError if the port is taken. `secret` is the job's (hex)."""

    def __init__(self, secret: str, host: str = LOOPBACK, port: int = 0) -> None:
        server, port = serve_store(host, TIMEOUT, port)
        super().__init__(host, port, secret, server)
        self._told_failures: set[str] = set()
        self._num_saves = 0
        self._store.set("save", "0")
        self.set_pause(NO_PAUSE)
        # Key -> the text that `new_warnings` last saw.
        self._warnings: dict[str, str] = {}

    def set_phase(self, phase: Phase) -> None:
        self._store.set("phase", phase.value)

    def request_save(self) -> None:
        """Ask the trainer for a checkpoint at the end of its step."""
        self._num_saves += 1
        self._store.set("save", str(self._num_saves))

    def set_pause(self, pause: str) -> None:
        self._store.set("pause", pause)

    def announce_tokens(self, prompts: Sequence[Any], identity: Identity) -> None:
        """Have every worker compare what its tokenizer makes of a run's first prompts (`token_identity`) with this."""
        self._store.set("first_prompts", json.dumps(prompts))
        self._store.set_first("first/tokens", json.dumps([f"the launcher ({sys.executable})", identity]))

    def is_done(self) -> bool:
        """Return whether the last step is trained and saved."""
        return bool(self._store.get_existing(["done"]))

    def forget_reports(self, gang: GangSpec) -> None:
        """Drop what the ranks of a gang reported before they ended, because the gang starts again."""
        for rank in range(gang.num_ranks):
            self._store.delete_key(f"left/{gang.name}/{rank}")
            # Otherwise the previous attempt's status would count as at work.
            status = {"state": STARTING, "time": time.time()}
            self._store.set(f"status/{gang.name}/{rank}", json.dumps(status))

    def new_warnings(self, ranks: Iterable[tuple[str, int]]) -> list[str]:
        """Return new warnings of these (gang, rank), and which ended; two round trips after the first call."""
        keys = {f"warning/{gang}/{rank}": gang for gang, rank in ranks}
        # Create missing keys: `get_existing` reads in one go only if all exist.
        for key in keys.keys() - self._warnings.keys():
            with contextlib.suppress(SealBroken):  # not written by this job; `get_existing` reports it
                self._store.set_first(key, json.dumps({"text": ""}))
            self._warnings[key] = ""
        new = []
        for key, said in self._store.get_existing(list(keys)).items():
            text = str(json.loads(said)["text"])
            if text != self._warnings[key]:
                self._warnings[key] = text
                new.append(text or f"{keys[key]}: that is over")
        return new

    def first_failures(self) -> dict[str, str]:
        """Return why something of each kind (`reward`, `rollout`) first failed; each kind is returned once."""
        keys = {f"first/{kind}_failure": kind for kind in _FAILURES if kind not in self._told_failures}
        new = {keys[key]: said.decode() for key, said in self._store.get_existing(list(keys)).items()} if keys else {}
        self._told_failures.update(new)
        return new

    def last_failures(self) -> dict[str, str]:
        """Return why something of each kind last failed."""
        keys = {f"{kind}_failure": kind for kind in _FAILURES if kind in self._told_failures}
        return {keys[key]: said.decode() for key, said in self._store.get_existing(list(keys)).items()} if keys else {}

    def read_statuses(self, ranks: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Status]:
        """Return the newest status of each (gang, rank) that has one; two round trips once all have."""
        keys = {f"status/{gang}/{rank}": (gang, rank) for gang, rank in ranks}
        return {
            keys[key]: Status.from_json(json.loads(said)) for key, said in self._store.get_existing(list(keys)).items()
        }

    def exit_of(self, gang: GangSpec, statuses: Statuses) -> GangExited | None:
        """Return how a gang that the user started ended; None while its ranks live.

        It ended when all ranks said that they left, or one failed or is gone without a word.
        """
        words = {rank: self.last_words(gang.name, rank) for rank in range(gang.num_ranks)}
        for rank, word in words.items():
            if error := error_in(word):
                return GangExited(gang.name, FAILED, error, rank, time.time())
        for rank, word in words.items():
            status = statuses.get((gang.name, rank))
            # The user starts these gangs on node 0, so their processes are visible in /proc.
            if word is None and status is not None and status.pid > 0 and not Path(f"/proc/{status.pid}").exists():
                return GangExited(gang.name, FAILED, "its process is gone", rank, time.time())
        return GangExited(gang.name, 0, at=time.time()) if None not in words.values() else None


class TurnMessages:
    """The launcher's end of the devices' turn: a thread hears what gangs say, the main thread tells them.

    Args:
        gangs: those that take turns.
        heard: called by the thread with every event.
    """

    def __init__(self, store: JobStoreClient, gangs: Iterable[GangSpec], heard: Callable[[TurnEvent], None]) -> None:
        self._gangs = {gang.name: gang for gang in gangs}
        self._heard = heard
        self._store = store.open_sealed()
        self._told: Counter[tuple[str, int]] = Counter()
        self._said: dict[tuple[str, int], int] = {}
        listen = store.open_sealed()
        listen.set_timeout(_NO_DEADLINE)
        self._thread = threading.Thread(target=self._listen, args=(listen,), name="turn", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; before the interpreter ends, which a thread inside of a store's call would abort."""
        self._store.queue_push(INBOX, TurnMessage(Word.CLOSED, "", 0, 0).to_json())
        self._thread.join(TIMEOUT.total_seconds())

    def send(self, instruction: TurnInstruction) -> None:
        """Tell every rank of a gang."""
        gang, attempt = instruction.gang, instruction.attempt
        number = self._told[gang, attempt]
        self._told[gang, attempt] += 1
        if isinstance(instruction, TurnGranted):
            told = TurnMessage(Word.GRANTED, gang, attempt, number, instruction.version)
        else:
            told = TurnMessage(Word.WANTED_AT_ONCE if instruction.urgent else Word.WANTED, gang, attempt, number)
        for rank in range(self._gangs[gang].num_ranks):
            self._store.queue_push(told_queue(gang, attempt, rank), told.to_json())

    def _listen(self, store: SealedStore) -> None:
        while True:
            try:
                said = TurnMessage.from_json(store.queue_pop(INBOX))
            except SealBroken as error:
                logger.error("%s; it is ignored", error)
                continue
            except dist.DistError:  # the store is closed: the run is over
                return
            if said.word is Word.CLOSED:
                return
            source = said.gang, said.attempt
            # A stranger may push again what was said before.
            if said.number <= self._said.get(source, -1):
                continue
            self._said[source] = said.number
            if said.word is Word.ASKED:
                self._heard(TurnAsked(*source))
            elif said.word is Word.GIVEN:
                self._heard(TurnGiven(*source, said.version))
