"""A put/get storm in which processes are killed at random: `storm(...)` returns what happened to every row.

Producers and consumers (scoring, looking, training) work on a queue of two units. One process at a
time gets SIGKILL: a client, a unit or a controller. `LocalQueue` starts services again, this file the clients. A client
may be killed at any time, a service only once the one killed before is back.

    for kill in 1 .. n:  wait a random moment, kill somebody  ->  finish: producers stop, all rows are acked  ->  judge
"""

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
from transferqueue_parts.child import Child
from transferqueue_parts.storm_clients import LOOK, SCORE, TRAIN, consume, produce
from transferqueue_parts.storm_ledger import Verdict, judge, read_ledger
from transferqueue_parts.storm_rows import INPUTS, OUTPUTS

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


@dataclass
class StormReport:
    """What a storm showed.

    Attributes:
        verdict: over all rows; `drained` and no fault in it is what is wanted.
        drained: all rows were acked before the deadline.
        kills: client, unit, controller -> how many.
        back_s: unit, controller -> seconds from a kill until the service worked again.
        seconds: of the whole storm.
        stats: the lead controller's counts at the end.
    """

    verdict: Verdict = field(default_factory=Verdict)
    drained: bool = False
    kills: Counter[str] = field(default_factory=Counter)
    back_s: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    stats: str = ""

    @property
    def faultless(self) -> bool:
        """Every row was acked exactly once per task, and none was damaged."""
        verdict = self.verdict
        return self.drained and verdict.rows > 0 and not (verdict.lost or verdict.twice or verdict.corrupt)

    def summary(self) -> dict[str, Any]:
        """Return plain values."""
        back = {kind: {"median": statistics.median(times), "worst": max(times)} for kind, times in self.back_s.items()}
        own = {"drained": self.drained, "kills": dict(self.kills), "back_s": back, "seconds": self.seconds}
        return {**vars(self.verdict), **own, "stats": self.stats}


def storm(
    directory: Path,
    *,
    kills: int,
    seed: int = 0,
    num_units: int = 2,
    num_controllers: int = 2,
    num_producers: int = 2,
    num_consumers: int = 2,
    declares_outputs: bool = True,
    longest_pause_s: float = 0.5,
    drain_timeout_s: float = 90.0,
    say: Callable[[str], None] = lambda text: None,
) -> StormReport:
    """Run one.

    Args:
        directory: for ledgers and logs of the services; exists and is empty.
        kills: processes to kill.
        seed: of the order of victims and of the moments.
        num_units, num_controllers: services.
        num_producers: processes that put.
        num_consumers: processes per task.
        declares_outputs: False: tasks are declared by their inputs only.
        longest_pause_s: between two kills.
        drain_timeout_s: for all rows to be acked at the end.
        say: gets progress.
    """
    began = time.monotonic()
    tasks: Mapping[str, Sequence[str] | tq.TaskConfig] = TASKS if declares_outputs else TASKS_BY_INPUTS
    with tq.start(
        tasks, num_units=num_units, num_controllers=num_controllers, config=CONFIG, log_dir=directory
    ) as queue:
        running = _Storm(queue, directory, random.Random(seed), num_producers, num_consumers)
        try:
            running.kill_some(kills, longest_pause_s, say)
            running.drain(drain_timeout_s, say)
        finally:
            running.end()
    report = running.report
    records = (record for path in sorted(directory.glob("*.ledger")) for record in read_ledger(path))
    report.verdict = judge(records, tasks=TASKS, writers={SCORE})
    report.seconds = time.monotonic() - began
    return report


class _Storm:
    """The clients, who may be killed, and who was."""

    def __init__(
        self, queue: tq.LocalQueue, directory: Path, chance: random.Random, num_producers: int, num_consumers: int
    ) -> None:
        self.report = StormReport()
        self._queue = queue
        self._directory = directory
        self._random = chance
        self._pause = threading.Event()
        self._starters: dict[str, Callable[[], Child]] = {}
        for slot in range(num_producers):
            self._starters[f"producer-{slot}"] = lambda slot=slot: self._start(produce, f"producer-{slot}", slot)  # type: ignore[misc]
        for task in TASKS:
            for number in range(num_consumers):
                name = f"{task}-{number}"
                self._starters[name] = lambda name=name, task=task: self._start(  # type: ignore[misc]
                    consume, name, task, self._random.randrange(2**31)
                )
        self._clients = {name: start() for name, start in self._starters.items()}
        self._killed: tuple[str, int, float] | None = None

    def kill_some(self, number: int, longest_pause_s: float, say: Callable[[str], None]) -> None:
        """Kill one process after the other; clients are started again at once."""
        for count in range(1, number + 1):
            self._pause.wait(self._random.uniform(0, longest_pause_s))
            kind = self._random.choice(("client", "client", "unit", "controller"))
            self.report.kills[kind] += 1
            if kind == "client":
                self._restart_dead()
                name = self._random.choice(sorted(self._clients))
                self._note(name, "killed")
                self._clients[name].kill()
                self._clients[name] = self._starters[name]()
            else:
                if self._killed is not None:
                    self._wait_until_back()
                    self._pause.wait(self._random.uniform(0, longest_pause_s))
                name = self._kill_service("storage-" if kind == "unit" else "controller-")
            if count % 10 == 0 or count == number:
                say(f"faults: {count} of {number} killed, the last one was {name}")
        self._wait_until_back()

    def drain(self, timeout_s: float, say: Callable[[str], None]) -> None:
        """Let producers finish, then wait until every row was acked by every task."""
        self._restart_dead()
        producers = [child for name, child in self._clients.items() if name.startswith("producer-")]
        for child in producers:
            child.tell("finish")
        for child in producers:
            child.hear(timeout_s)
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

    def _kill_service(self, prefix: str) -> str:
        pids = self._queue.pids()
        name = self._random.choice(sorted(name for name in pids if name.startswith(prefix)))
        os.kill(pids[name], signal.SIGKILL)
        self._killed = (name, pids[name], time.monotonic())
        self._note(name, "killed")
        return name

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
