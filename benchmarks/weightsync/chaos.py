"""kill -9 in the middle of a transfer: `chaos(...)` says after how many of them everybody went on.

In turn a receiver, a trainer rank and the agent, each by the staged path and by broadcast, at a random moment after
`publish` was ordered. What a supervisor does is done here: the dead process starts again, with the rest of its gang;
a trainer's gang comes back as the next lineage and publishes the step that it restored.

A kill is survived when, within the deadline after the restart,
    receiver    all receivers, the new one too, compute with the version that was being transferred
    trainer     all receivers compute with what the new lineage published
    agent       it has the version that was being transferred again, and all receivers compute with it
    bucket      one bucket of the broadcast is damaged on its way: all receivers compute with that version all the same
and then the next update by the same path reaches all of them in the same time, no process but the victim (and its gang)
ended or reported an error, and no output so far was made with other weights than it claims.
"""

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncflow.errors import AsyncFlowError
from benchmarks.weightsync.cluster import Cluster, ask, hear, tell
from benchmarks.weightsync.shapes import synthetic_shapes
from weightsync.version import Version

VICTIMS = ("receiver", "trainer", "agent")
_BUCKET_BYTES = 4 << 20
_TIMEOUT_S = 5.0
"""Deadline of the weight path: what a death may cost the others. Well below the chaos's own."""
_MOST_HELD_UP_S = 7 * _TIMEOUT_S
"""A death may cost the deadlines of the readiness, of a transfer, and five of a group: so long Gloo waits for a member
that died between coming to it and being connected."""
_ANSWER_S = 8 * _TIMEOUT_S
"""A process that says nothing for so long is stuck."""
_WARM_UP = 4
_POLL_S = 0.02


@dataclass
class ChaosReport:
    """What a chaos showed.

    Attributes:
        kills, survived_kinds: by victim and path.
        mid_transfer: kills at which not all receivers had the version yet.
        outputs, mixed_reads: outputs that were proved, and those made with other weights than they claim.
        recovered_s: by victim: seconds from the restart until the new one served.
        failures: what went wrong.
        seconds: of the whole chaos.
    """

    kills: Counter[str] = field(default_factory=Counter)
    survived_kinds: Counter[str] = field(default_factory=Counter)
    mid_transfer: int = 0
    outputs: int = 0
    mixed_reads: int = 0
    recovered_s: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        """All of them."""
        return sum(self.kills.values())

    @property
    def survived(self) -> int:
        """Those after which everybody went on."""
        return sum(self.survived_kinds.values())

    def summary(self) -> dict[str, Any]:
        """Return plain values."""
        spread = {
            victim: {"median": statistics.median(times), "worst": max(times)}
            for victim, times in self.recovered_s.items()
        }
        return {**vars(self), "recovered_s": spread}


def chaos(
    *,
    kills: int,
    seed: int,
    model_bytes: int,
    num_receivers: int = 3,
    deadline_s: float = 10.0,
    victims: Sequence[str] = VICTIMS,
    staged: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> ChaosReport:
    """Run one.

    Args:
        kills: processes to kill, 6 for each combination once.
        seed: of the moments and of the victims' places.
        model_bytes: on the wire, about.
        num_receivers: generators.
        deadline_s: for the restarted process to serve the newest version.
        victims: in turn; `bucket` is one more.
        staged: every other round of them by the staged path; False: all by broadcast.
        say: gets progress.
    """
    began = time.monotonic()
    shapes = synthetic_shapes(model_bytes)
    with Cluster(
        shapes, bucket_bytes=_BUCKET_BYTES, num_receivers=num_receivers,
        timeout_s=_TIMEOUT_S, answer_s=_ANSWER_S, proves=True,
    ) as cluster:  # fmt: skip
        storm = _Chaos(cluster, random.Random(seed), deadline_s)
        storm.warm_up()
        for number in range(kills):
            by_broadcast = not staged or number // len(victims) % 2 == 1
            kind = storm.kill(victims[number % len(victims)], broadcast=by_broadcast)
            if (number + 1) % 5 == 0 or number + 1 == kills:
                say(f"kills: {number + 1} of {kills}, {storm.report.survived} survived; the last one: {kind}")
    storm.report.seconds = time.monotonic() - began
    return storm.report


class _Failed(Exception):
    """A kill was not survived; the chaos goes on."""


class _Chaos:
    def __init__(self, cluster: Cluster, chance: random.Random, deadline_s: float) -> None:
        self.report = ChaosReport()
        self._cluster = cluster
        self._random = chance
        self._deadline_s = deadline_s
        self._pause = threading.Event()
        self._step = 0
        self._transfer_s = {False: 0.0, True: 0.0}

    def warm_up(self) -> None:
        """See how long a transfer takes by either path, from the order to the last load."""
        for broadcast in (False, True):
            times = []
            for _ in range(_WARM_UP):
                held_up = self._update(broadcast)
                ended = max(load.ended for load in self._cluster.loads_of(self._step))
                times.append(ended - min(begin for begin, _ in held_up))
            self._transfer_s[broadcast] = statistics.median(times)

    def kill(self, victim: str, *, broadcast: bool) -> str:
        """Kill one process in the middle of an update, start it again, see how everybody does. Returns the kind."""
        kind = f"{victim}, {'broadcast' if broadcast else 'staged'}"
        self.report.kills[kind] += 1
        try:
            self._strike(victim, broadcast=broadcast)
            self._update(broadcast)
            self._check_all_alive()
            self.report.survived_kinds[kind] += 1
        except (_Failed, AsyncFlowError, EOFError, OSError) as error:
            self.report.failures.append(f"kill {self.report.num_kills}, {kind}, step {self._step}: {error!r}")
            self._rebuild()
        self._judge_outputs(kind)
        return kind

    def _strike(self, victim: str, *, broadcast: bool) -> None:
        cluster = self._cluster
        self._step += 1
        ask(cluster.trainers, "prepare", self._step)
        if victim == "bucket":
            ask(cluster.trainers[:1], "damage_next")
        tell(cluster.trainers, "publish", self._step, broadcast)
        self._pause.wait(self._random.uniform(0, self._transfer_s[broadcast]))
        match victim:
            case "receiver":
                self._kill_receiver()
            case "trainer":
                self._kill_trainer()
            case "bucket":
                self._check_held_up(hear(cluster.trainers, timeout_s=_ANSWER_S))
                self._wait_loaded("bucket", time.monotonic())
            case _:
                self._kill_agent()

    def _kill_receiver(self) -> None:
        cluster, place = self._cluster, self._random.randrange(len(self._cluster.receivers))
        cluster.receivers[place].kill()
        killed = time.monotonic()
        cluster.restart_receiver(place)
        restarted = time.monotonic()
        self._check_held_up(hear(cluster.trainers, timeout_s=_ANSWER_S))
        self._wait_loaded("receiver", restarted)
        self._note_moment(killed, but=place)

    def _kill_trainer(self) -> None:
        """The version in transfer may come or not; the restored one must."""
        cluster = self._cluster
        self._random.choice(cluster.trainers).kill()
        killed, interrupted = time.monotonic(), self._step
        self._step -= 1
        lineage = cluster.lineage
        cluster.start_gang(lineage + 1)
        restarted = time.monotonic()
        cluster.update(self._step, broadcast=False)
        self._wait_loaded("trainer", restarted)
        self._note_moment(killed, version=Version(lineage, interrupted))

    def _kill_agent(self) -> None:
        cluster = self._cluster
        assert cluster.agent is not None
        cluster.agent.kill()
        killed = time.monotonic()
        cluster.start_agent()
        restarted = time.monotonic()
        self._check_held_up(hear(cluster.trainers, timeout_s=_ANSWER_S))
        wanted = Version(cluster.lineage, self._step)
        while (newest := cluster.status().newest) is None or newest < wanted:
            if time.monotonic() > restarted + self._deadline_s:
                raise _Failed(f"the agent has {newest}, not {wanted}")
            self._pause.wait(_POLL_S)
        self._wait_loaded("agent", restarted)
        self._note_moment(killed)

    def _check_held_up(self, held_up: list[tuple[float, float]]) -> None:
        longest_s = max(end - begin for begin, end in held_up)
        if longest_s > _MOST_HELD_UP_S:
            raise _Failed(f"a trainer rank was held up for {longest_s:.1f} s")

    def _wait_loaded(self, victim: str, restarted: float) -> None:
        left_s = max(0.0, restarted + self._deadline_s - time.monotonic())
        if not self._cluster.wait_loaded(self._step, timeout_s=left_s):
            wanted = Version(self._cluster.lineage, self._step)
            raise _Failed(f"receivers have {self._cluster.collect()}, not {wanted}; agent: {self._cluster.status()}")
        self.report.recovered_s.setdefault(victim, []).append(time.monotonic() - restarted)

    def _note_moment(self, killed: float, *, version: Version | None = None, but: int = -1) -> None:
        """Count a kill at which a receiver that lives on had not loaded the version in transfer."""
        wanted = version or Version(self._cluster.lineage, self._step)
        ready = [
            any(load.version == wanted and load.ended < killed for load in loads)
            for place, loads in enumerate(self._cluster.loads)
            if place != but
        ]
        self.report.mid_transfer += not all(ready)

    def _update(self, broadcast: bool) -> list[tuple[float, float]]:
        """One whole update, nobody killed."""
        self._step += 1
        held_up = self._cluster.update(self._step, broadcast=broadcast)
        if not self._cluster.wait_loaded(self._step, timeout_s=self._deadline_s):
            raise _Failed(f"update {self._step} did not reach everybody: {self._cluster.collect()}")
        return held_up

    def _check_all_alive(self) -> None:
        if not self._cluster.alive():
            raise _Failed("a process ended that nobody had killed")

    def _judge_outputs(self, kind: str) -> None:
        num_mixed = self._cluster.num_mixed()
        if num_mixed:
            self.report.failures.append(f"{num_mixed} mixed reads after {kind}")
        self.report.mixed_reads += num_mixed
        self.report.outputs += len(self._cluster.outputs)
        self._cluster.outputs.clear()

    def _rebuild(self) -> None:
        """Start everybody again, so that one failure is counted once."""
        cluster = self._cluster
        assert cluster.agent is not None
        for child in (cluster.agent, *cluster.receivers):
            child.kill()
        cluster.start_agent()
        for place in range(len(cluster.receivers)):
            cluster.restart_receiver(place)
        cluster.start_gang(cluster.lineage + 1)
        self._update(broadcast=False)
