"""A put/get storm in which processes are killed at random: `storm(...)` returns what happened to every row.

Producers and consumers (scoring, looking, training) work on a queue of three units. Processes get SIGKILL: a client, a
unit, a controller, all controllers at once, all of them with a unit. `LocalQueue` starts services again, this file the
clients. Kills do not wait: they come faster than services start again, unless `one_by_one` is asked for; then one
process at a time dies, and a service only once the one killed before is back.

    for kill in 1 .. n:  wait a moment, kill somebody  ->  finish: producers stop, all rows are acked  ->  judge
"""

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tq
from asyncflow.errors import TransportError
from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.storm_clients import LOOK, SCORE, TRAIN, consume, produce
from benchmarks.transferqueue.storm_ledger import Kill, Verdict, accounts, judge, read_ledger
from benchmarks.transferqueue.storm_rows import INPUTS, OUTPUTS

TASKS = {
    SCORE: tq.TaskConfig(name=SCORE, inputs=INPUTS, outputs=OUTPUTS),
    LOOK: tq.TaskConfig(name=LOOK, inputs=INPUTS),
    TRAIN: tq.TaskConfig(name=TRAIN, inputs=(*INPUTS, *OUTPUTS)),
}
TASKS_BY_INPUTS = {name: task.inputs for name, task in TASKS.items()}
"""The short form: the queue learns what tasks write."""
CONFIG = tq.QueueConfig(request_timeout_s=20, lease_timeout_s=3, unit_grace_s=0.5, max_live_rows=2000, max_deliveries=0)
_BACK_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LOOK_S = 2.0
VICTIMS = {"client": 3, "unit": 2, "controller": 2, "controllers": 2, "controllers and unit": 2, "services": 1}
"""Who is killed together -> how often."""


@dataclass
class StormReport:
    """What a storm showed.

    Attributes:
        verdict: over all rows; `drained` and no fault in it is what is wanted.
        drained: all rows were acked before the deadline.
        kills: who was killed together -> how often.
        back_s: unit, controller -> seconds from a kill until the service worked again.
        seconds: of the whole storm.
        untold: confirmed rows that were neither acked nor in the queue nor told as lost, and stayed so.
        miscounted: rows that the controllers counted too few or too many of at the end, in the worst task.
        stats: the controllers' counts at the end.
    """

    verdict: Verdict = field(default_factory=Verdict)
    drained: bool = False
    kills: Counter[str] = field(default_factory=Counter)
    back_s: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    untold: int = 0
    miscounted: int = 0
    stats: str = ""

    @property
    def faultless(self) -> bool:
        """Every row was acked exactly once per task, none was damaged, and none was ever missing."""
        verdict = self.verdict
        wrong = verdict.lost or verdict.twice or verdict.corrupt or self.untold or self.miscounted
        return self.drained and verdict.rows > 0 and not wrong

    def summary(self) -> dict[str, Any]:
        """Return plain values."""
        back = {kind: {"median": statistics.median(times), "worst": max(times)} for kind, times in self.back_s.items()}
        own = {"drained": self.drained, "kills": dict(self.kills), "back_s": back, "seconds": self.seconds}
        own |= {"untold": self.untold, "miscounted": self.miscounted}
        return {**vars(self.verdict), **own, "stats": self.stats}


def storm(
    directory: Path,
    *,
    kills: int,
    seed: int = 0,
    num_units: int = 3,
    num_controllers: int = 2,
    num_producers: int = 2,
    num_consumers: int = 2,
    declares_outputs: bool = True,
    one_by_one: bool = False,
    pause_s: float = 1.5,
    put_every_s: float = 0.01,
    work_s: float = 0.0,
    drain_timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> StormReport:
    """Run one.

    Args:
        directory: for ledgers and logs of the services; exists and is empty.
        kills: how often to kill.
        seed: of the order of victims and of the moments.
        num_units, num_controllers: services.
        num_producers: processes that put.
        num_consumers: processes per task.
        declares_outputs: False: tasks are declared by their inputs only.
        one_by_one: kill one process at a time, a service only when the one before works again.
        pause_s: between two kills; between two of `one_by_one` at most.
        put_every_s: how long a producer pauses after a put.
        work_s: how long a consumer works on a lease until producers are done, so that rows gather.
        drain_timeout_s: for all rows to be acked at the end.
        say: gets progress.
    """
    began = time.monotonic()
    tasks: Mapping[str, Sequence[str] | tq.TaskConfig] = TASKS if declares_outputs else TASKS_BY_INPUTS
    with tq.start(
        tasks, num_units=num_units, num_controllers=num_controllers, config=CONFIG, log_dir=directory
    ) as queue:
        running = _Storm(queue, directory, random.Random(seed), num_producers, num_consumers, (put_every_s, work_s))
        try:
            (running.kill_one_by_one if one_by_one else running.kill_together)(kills, pause_s, say)
            running.drain(drain_timeout_s, say)
        finally:
            running.end()
    report = running.report
    records = (record for path in sorted(directory.glob("*.ledger")) for record in read_ledger(path))
    report.verdict = judge(records, tasks=TASKS, writers={SCORE}, kills=running.service_kills)
    report.seconds = time.monotonic() - began
    return report


class _Storm:
    """The clients, who may be killed, and who was."""

    def __init__(
        self,
        queue: tq.LocalQueue,
        directory: Path,
        chance: random.Random,
        num_producers: int,
        num_consumers: int,
        pauses_s: tuple[float, float],
    ) -> None:
        self.report = StormReport()
        self.service_kills: list[Kill] = []
        self._queue = queue
        self._directory = directory
        self._random = chance
        self._pause = threading.Event()
        put_every_s, self._work_s = pauses_s
        self._starters: dict[str, Callable[[], Child]] = {}
        for slot in range(num_producers):
            self._starters[f"producer-{slot}"] = lambda slot=slot: self._start(  # type: ignore[misc]
                produce, f"producer-{slot}", slot, put_every_s
            )
        for task in TASKS:
            for number in range(num_consumers):
                name = f"{task}-{number}"
                self._starters[name] = lambda name=name, task=task: self._start(  # type: ignore[misc]
                    consume, name, task, self._random.randrange(2**31), self._work_s
                )
        self._clients = {name: start() for name, start in self._starters.items()}
        self._killed: tuple[str, int, float] | None = None

    def kill_together(self, number: int, pause_s: float, say: Callable[[str], None]) -> None:
        """Kill some processes at once, again and again; whatever is down just then is down already."""
        kinds, weights = list(VICTIMS), list(VICTIMS.values())
        for count in range(1, number + 1):
            self._pause.wait(pause_s)
            kind = self._random.choices(kinds, weights)[0]
            self.report.kills[kind] += 1
            if kind == "client":
                self._kill_client()
            else:
                self._kill_services(kind)
            if count % 10 == 0 or count == number:
                say(f"faults: {count} of {number} kills, the last one of {kind}")
        self._queue.wait_until_up(2 * _BACK_TIMEOUT_S)

    def _kill_services(self, kind: str) -> None:
        names = sorted(self._queue.pids())
        units = [name for name in names if name.startswith("storage-")]
        controllers = [name for name in names if name.startswith("controller-")]
        victims = controllers if kind.startswith("controllers") else names if kind == "services" else []
        if kind == "controller" and controllers:
            victims = [self._random.choice(controllers)]
        if kind.endswith("unit") and units:
            victims = [*victims, self._random.choice(units)]
        pids = self._queue.pids()
        for name in victims:
            if name in pids:
                with contextlib.suppress(ProcessLookupError):
                    self._kill_service(name, pids[name])

    def _kill_client(self) -> str:
        self._restart_dead()
        name = self._random.choice(sorted(self._clients))
        self._note(name, "killed")
        self._clients[name].kill()
        self._clients[name] = self._starters[name]()
        return name

    def kill_one_by_one(self, number: int, longest_pause_s: float, say: Callable[[str], None]) -> None:
        """Kill one process after the other; clients are started again at once."""
        for count in range(1, number + 1):
            self._pause.wait(self._random.uniform(0, longest_pause_s))
            kind = self._random.choice(("client", "client", "unit", "controller"))
            self.report.kills[kind] += 1
            if kind == "client":
                name = self._kill_client()
            else:
                if self._killed is not None:
                    self._wait_until_back()
                    self._pause.wait(self._random.uniform(0, longest_pause_s))
                name = self._kill_one_of("storage-" if kind == "unit" else "controller-")
            if count % 10 == 0 or count == number:
                say(f"faults: {count} of {number} killed, the last one was {name}")
        self._wait_until_back()

    def drain(self, timeout_s: float, say: Callable[[str], None]) -> None:
        """Let producers finish, then wait until every row was acked by every task, or is missing."""
        self._restart_dead()
        producers = [child for name, child in self._clients.items() if name.startswith("producer-")]
        for child in producers:
            child.tell("finish")
        for child in producers:
            child.hear(timeout_s)
        self._work_s = 0.0
        for name in [name for name in self._clients if not name.startswith("producer-")]:
            self._clients[name].kill()
            self._clients[name] = self._starters[name]()
        client = self._queue.client("storm")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.report.drained:
            self._restart_dead(but="producer-")
            stats = client.stats()
            left = max(each.live_rows + each.lost_rows for each in stats)
            self.report.drained = left == 0
            self.report.stats = str(stats)
            self._pause.wait(_POLL_S)
        say(f"faults: {'everything was acked' if self.report.drained else f'{left} rows were left'}")
        self.report.untold = self._count_untold(client)
        confirmed = len(accounts(self._directory, TASKS).confirmed)
        counts = [task.waiting + task.ready + task.leased + task.done for each in client.stats() for task in each.tasks]
        self.report.miscounted = max(abs(count - confirmed) for count in counts)

    def _count_untold(self, client: tq.QueueClient) -> int:
        """Return how many confirmed rows are missing: not for a moment, while a unit is told of what it lost, say."""
        deadline = time.monotonic() + _BACK_TIMEOUT_S
        while True:
            told = client.lost_rows(timeout_s=_LOOK_S)
            here = {row.index for row in client.list_rows()} | set(told.rows if told is not None else ())
            ledger = accounts(self._directory, TASKS)
            missing = ledger.confirmed - ledger.acked - here
            if not missing or time.monotonic() > deadline:
                return len(missing)
            self._pause.wait(_POLL_S)

    def end(self) -> None:
        """Kill all clients."""
        for child in self._clients.values():
            child.kill()

    def _note(self, name: str, what: str) -> None:
        with (self._directory / "kills.log").open("a") as log:
            log.write(f"{time.monotonic():.3f} {name} {what}\n")

    def _start(self, target: Callable[..., None], name: str, *arguments: Any) -> Child:
        return Child(target, str(self._queue.address), str(self._directory / f"{name}.ledger"), *arguments)

    def _restart_dead(self, but: str = " ") -> None:
        """A client that gave up by itself (a service was away for too long) is started again, too; its error shows."""
        for name, child in self._clients.items():
            if not child.alive and not name.startswith(but):
                self.report.kills["gave up"] += 1
                self._clients[name] = self._starters[name]()

    def _kill_one_of(self, prefix: str) -> str:
        pids = self._queue.pids()
        name = self._random.choice(sorted(name for name in pids if name.startswith(prefix)))
        self._kill_service(name, pids[name])
        self._killed = (name, pids[name], time.monotonic())
        return name

    def _kill_service(self, name: str, pid: int) -> None:
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.service_kills.append(Kill(name, since, time.monotonic()))
        self._note(name, "killed")

    def _wait_until_back(self) -> None:
        if self._killed is None:
            return
        name, old, when = self._killed
        deadline = time.monotonic() + _BACK_TIMEOUT_S
        while self._queue.pids().get(name, old) == old:
            if time.monotonic() > deadline:
                raise TransportError(f"{name} was not started again within {_BACK_TIMEOUT_S:g} s")
            self._pause.wait(_POLL_S)
        self._queue.wait_until_up(_BACK_TIMEOUT_S)
        kind = "unit" if name.startswith("storage-") else "controller"
        self.report.back_s.setdefault(kind, []).append(time.monotonic() - when)
        self._note(name, "back")
        self._killed = None
