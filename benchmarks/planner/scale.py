"""Which service of the house saturates first as devices are added: service times measured here, queueing simulated.

    queue        real units and a controller: processor time of each request of 8 rows
    job store    a real one: processor time of a heartbeat, and of the launcher's look at a rank
    launcher     reading a rank's status, looking for stuck ranks, and its part of status.json
    agents       a real weight agent: telling another agent of a bucket; hearing of one (`AgentState`)

The run is the planned one of Qwen2.5-7B on `ascend-910b` (docs/planner.md). It grows by devices; a step takes as long.
Every service has a core of its own. It is saturated when busy for 70 % of the time, or as late as the table says.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncflow.job import LOOPBACK, GangSpec
from asyncflow.sealed_store import SealedStore, connect_store, serve_store
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from benchmarks.transferqueue import service_times
from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.our_queue import COLUMNS, OurQueue
from benchmarks.transferqueue.queue_simulation import ACK, GET, PUT, Load, Outcome, ServiceTimes, simulate
from benchmarks.transferqueue.samples import percentile
from benchmarks.transferqueue.workload import micro_batches
from launcher.process.progress import Status
from launcher.run.rank_watch import RankWatch
from launcher.run.status import RunStatus
from launcher.run.supervisor import RestartLog
from tq.columns import Column
from weightsync.agent.agent_service import WeightAgent
from weightsync.agent.agent_state import AgentState, Pull
from weightsync.config import WeightSyncConfig
from weightsync.messages import HeldVersion, OpenPlan, Reply, SealBuckets, TakeSlot, WatchPeer
from weightsync.plan import Box, ShardSpec, TransferPlan, plan_transfer
from weightsync.version import Version

ROWS_PER_S, RANKS, PER_NODE, STEP_S = 0.36, 46 / 64, 8, 44.6
"""Of the run that `--parts speed` plans for 64 devices: rows per second and device, ranks per device, devices per node,
seconds of a step."""
BUCKETS = 227
"""15.2 GB of weights in buckets of 64 MiB."""
BUCKET_S = 2**26 / (12.5e9 * PER_NODE * 0.7)
"""A bucket's time on a node's network."""
_MICRO_BATCH = 8
_BUSY, _LATE_S = 0.7, {"queue": 1.0, "store": 0.5, "launcher": 0.5, "agent": STEP_S / 10}
_BEAT_S, _POLL_S = 0.5, 0.5
_SECRET = bytes(32)
_TIMEOUT = timedelta(seconds=60)
_AGENT = "weights-0"


@dataclass(frozen=True)
class Measured:
    """Processor time (s).

    Attributes:
        queue: per request of 8 rows.
        beat: of the job store, per heartbeat; `looked`: per rank of a launcher's look at all.
        seen: of the launcher, per rank of such a look; `shown`: per rank of a picture for `asyncflow status`.
        told: of a weight agent, per announcement of a bucket to one other agent; to hear of one takes as much, and
        heard, heard_by_peer: to decide what follows; beside it, for every other agent that it knows.
    """

    queue: ServiceTimes
    beat: float
    looked: float
    seen: float
    shown: float
    told: float
    heard: float
    heard_by_peer: float


def measure(directory: Path, *, quick: bool) -> Measured:
    """Measure all service times; one thing at a time."""
    torch.set_num_threads(1)
    ranks = 200 if quick else 5000
    return Measured(_queue(directory, 200 if quick else 1000), *_job_store(ranks), *_agent(8 if quick else 32))


def saturation(measured: Measured) -> dict[str, int]:
    """Return, per service, the number of devices at which it saturates; in steps of 10 %."""
    services: dict[str, Callable[[int], tuple[float, float]]] = {
        "queue (2 units, 1 controller)": lambda devices: queue(measured, devices, units=2),
        "queue (8 units, 1 controller)": lambda devices: queue(measured, devices, units=8),
        "units (2)": lambda devices: busy(measured, devices, units=2)[0],
        "units (8)": lambda devices: busy(measured, devices, units=8)[0],
        "controller": lambda devices: busy(measured, devices, units=8)[1],
        "store": lambda devices: store(measured, devices),
        "launcher": lambda devices: launcher(measured, devices),
        "agent": lambda devices: agent(measured, devices),
    }
    found = {}
    for name, look in services.items():
        late_s = _LATE_S.get(name.partition(" ")[0], math.inf)
        devices = 100.0
        while devices < 1e6 and _is_well(look(round(devices)), late_s):
            devices *= 1.1
        found[name] = round(devices)
    return found


def _is_well(outcome: tuple[float, float], late_s: float) -> bool:
    busy, late = outcome
    return busy < _BUSY and late < late_s


# Simulated: each returns the busiest service's share of the time, and how late it answers (s).


def queue(measured: Measured, devices: int, *, units: int) -> tuple[float, float]:
    """Micro-batches of 8 rows: prompts are fetched, responses put, scored, put and trained."""
    outcome = _cycles(measured, devices, units=units)
    return max(outcome.unit_busy, outcome.controller_busy), outcome.p99_s


def busy(measured: Measured, devices: int, *, units: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The same of a unit and of the controller alone, each by how busy it is."""
    outcome = _cycles(measured, devices, units=units)
    return (outcome.unit_busy, 0.0), (outcome.controller_busy, 0.0)


def _cycles(measured: Measured, devices: int, *, units: int) -> Outcome:
    clients = max(1, round(devices * RANKS))
    load = Load(clients, devices * ROWS_PER_S / _MICRO_BATCH / clients, units, 1)
    stages = (*GET, *PUT, *GET, *PUT, *GET, *ACK)
    return simulate(load, measured.queue, seconds=max(2.0, min(60.0, 60_000 / devices)), stages=stages)


def store(measured: Measured, devices: int) -> tuple[float, float]:
    """Heartbeats of all ranks, each at its own time, and the launcher's looks."""
    chance, ranks, seconds = random.Random(devices), round(devices * RANKS), 4.0
    beats = [(phase + turn * _BEAT_S, measured.beat) for phase in _phases(chance, ranks) for turn in range(8)]
    looks = [(turn * _POLL_S, ranks * measured.looked) for turn in range(8)]
    drawn = [(at, chance.expovariate(1 / mean_s)) for at, mean_s in beats]
    return _station([*drawn, *looks], seconds)


def launcher(measured: Measured, devices: int) -> tuple[float, float]:
    """Looks twice a second, and pictures: four of each round of questions, a round every one to five seconds."""
    ranks, seconds = round(devices * RANKS), 20.0
    picture_s = ranks * measured.shown
    pause_s = min(max(1.0, 4 * picture_s / 0.05), 5.0)
    looks = [(turn * _POLL_S, ranks * measured.seen) for turn in range(int(seconds / _POLL_S))]
    pictures = [(turn * pause_s / 4, picture_s) for turn in range(int(4 * seconds / pause_s))]
    return _station([*looks, *pictures], seconds)


def agent(measured: Measured, devices: int) -> tuple[float, float]:
    """A version comes bucket by bucket; an agent tells every other one, which asks again; it hears as much as it says.

    An agent that is behind tells of several buckets at once, so it is busy, and late, for a while after the last one.
    """
    peers = max(0, -(-devices // PER_NODE) - 1)
    answer_s = 2 * measured.told + measured.heard + measured.heard_by_peer * peers
    now, busy_s = 0.0, 0.0
    while True:
        known = min(BUCKETS, int(now / BUCKET_S))  # what this round tells of
        now += max(peers * answer_s, BUCKET_S)
        busy_s += peers * answer_s
        if known == BUCKETS:
            return busy_s / STEP_S, now - BUCKETS * BUCKET_S


def _phases(chance: random.Random, number: int) -> list[float]:
    return [chance.uniform(0, _BEAT_S) for _ in range(number)]


def _station(jobs: Iterable[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """One server, first come first served: its busy share, and the 99th percentile of the time in it."""
    free_at, busy_s, late = 0.0, 0.0, []
    for at, service_s in sorted(jobs):
        free_at = max(at, free_at) + service_s
        busy_s += service_s
        late.append(free_at - at)
    return min(1.0, busy_s / seconds), percentile(late, 0.99)


# Measured


def _queue(directory: Path, requests: int) -> ServiceTimes:
    (batch,) = micro_batches(_MICRO_BATCH, _MICRO_BATCH)
    columns = {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
    with OurQueue(COLUMNS, directory) as ours:
        ours.move(columns)

        def put() -> object:
            return ours.client.put_rows(columns)

        return service_times.measure(ours, put, requests=requests, micro_batch=_MICRO_BATCH)


def _job_store(ranks: int) -> tuple[float, float, float, float]:
    child = Child(_serve_store)
    try:
        port = child.hear()
        client = SealedStore(connect_store(LOOPBACK, port, _TIMEOUT), _SECRET)
        client.set("phase", "run")
        said = {**vars(Status("generating", "48/64 responses", step=3, version=2, pid=4711)), "waiting_s": 12.5}

        def beat(rank: int) -> None:
            client.set(f"status/rollout-{rank}/0", json.dumps(said | {"time": time.time()}))
            client.get_existing(["phase"])

        def all_beat() -> None:
            for rank in range(ranks):
                beat(rank)

        all_beat()  # every key is new
        beats = _cpu_s(child.pid, all_beat) / ranks
        places = [(f"rollout-{rank}", 0) for rank in range(ranks)]
        never = 1e6
        watch = RankWatch(
            start_timeout_s=never,
            max_start_s=never,
            operation_timeout_s=never,
            silence_timeout_s=never,
            deadlock_timeout_s=never,
        )
        workers = dict.fromkeys((name for name, _ in places), True)
        turns = 10
        before, looked = time.process_time(), 0.0
        for _ in range(turns):
            looked += _cpu_s(
                child.pid, lambda: watch.find_stuck_ranks(_statuses(client, places), workers=workers, now=1.0)
            )
        seen = (time.process_time() - before) / turns / ranks
        gangs = tuple(GangSpec(name, "rollout", 0, 1, ("npu:0",)) for name, _ in places)
        picture = RunStatus(Path("run"), 0.0, gangs, _statuses(client, places), restarts=RestartLog())
        before = time.process_time()
        for _ in range(turns):
            picture.as_json()
        shown = (time.process_time() - before) / turns / ranks
        return beats, looked / turns / ranks, seen, shown
    finally:
        child.kill()


def _statuses(client: SealedStore, places: list[tuple[str, int]]) -> dict[tuple[str, int], Status]:
    keys = {f"status/{gang}/{rank}": (gang, rank) for gang, rank in places}
    # As `JobStore.read_statuses`, whose server would be in this process.
    return {keys[key]: Status.from_json(json.loads(said)) for key, said in client.get_existing(list(keys)).items()}


def _serve_store(pipe: Any) -> None:
    _server, port = serve_store(LOOPBACK, _TIMEOUT)
    pipe.send(port)
    pipe.recv()  # is killed


def _plan() -> TransferPlan:
    spec = ShardSpec("weights", (BUCKETS * 256,), "float32", Box.from_shape((BUCKETS * 256,)))
    plan = plan_transfer([[spec]], bucket_bytes=1024, dtype="float32")
    assert len(plan.buckets) == BUCKETS, f"{len(plan.buckets)} buckets"
    return plan


def _agent(peers: int) -> tuple[float, float, float]:
    few, many = _heard(8), _heard(64)
    by_peer = max(0.0, (many - few) / (64 - 8))
    return _told(peers), max(0.0, few - 8 * by_peer), by_peer


def _told(peers: int) -> float:
    """Return a real agent's processor time per announcement, with so many others that watch it."""
    _server, port = serve_store(LOOPBACK, _TIMEOUT)
    child = Child(_serve_agent, port)
    connections: list[Connection] = []
    try:
        child.hear()
        for number in range(peers + 1):
            credentials = Credentials(connect_store(LOOPBACK, port, _TIMEOUT), _SECRET)
            connections.append(Connection(credentials, _AGENT, f"peer-{number}", Reply, timeout_s=60.0))
        trainer, others = connections[0], connections[1:]
        plan = _plan()
        trainer.call_service(OpenPlan(plan.encode()), timeout_s=60.0)

        def watch(other: Connection, revision: int) -> "Future[tuple[Any, Tensor]]":
            return other.submit(WatchPeer(revision), timeout_s=60.0)

        asked = [watch(other, 0) for other in others]

        def publish(version: Version) -> None:
            trainer.call_service(TakeSlot(0, version, plan.digest(), 60.0), timeout_s=60.0)
            for bucket in range(BUCKETS):
                revisions = [future.result(60.0)[0].revision for future in asked]
                asked[:] = [watch(other, revision) for other, revision in zip(others, revisions, strict=True)]
                trainer.call_service(SealBuckets(0, version, {bucket: bucket}), timeout_s=60.0)

        publish(Version(0, 1))
        return _cpu_s(child.pid, lambda: publish(Version(0, 2))) / BUCKETS / peers
    finally:
        for connection in connections:
            connection.close()
        child.kill()


def _serve_agent(pipe: Any, port: int) -> None:
    torch.set_num_threads(1)
    config = WeightSyncConfig(bucket_bytes=1024, dtype="float32")
    agent = WeightAgent(Credentials(connect_store(LOOPBACK, port, _TIMEOUT), _SECRET), _AGENT, config)
    pipe.send("ready")
    pipe.recv()  # is killed
    agent.close()


def _heard(peers: int) -> float:
    """Return an agent's time to decide what follows from one announcement, with so many others that have buckets."""
    state, plan, version = AgentState(num_slots=3), _plan(), Version(0, 1)
    state.open_plan(plan)
    state.watch("watch", "receiver", None)  # a node without a reader fetches nothing
    took: list[float] = []
    for there in range(8, BUCKETS, 16):
        for number in range(peers):
            held = HeldVersion(version, plan.digest(), {bucket: bucket for bucket in range(there)})
            began = time.process_time()
            pulls = [each for each in state.peer_has(f"peer-{number}", [held]) if isinstance(each, Pull)]
            took.append(time.process_time() - began)
            while pulls:
                pull = pulls.pop()
                more = state.end_pull(pull.peer, version, pull.bucket, pull.bucket)
                pulls += [each for each in more if isinstance(each, Pull)]
    return sum(took) / len(took)


def _cpu_s(pid: int, work: Callable[[], object]) -> float:
    before = service_times.cpu_s([pid])
    work()
    return service_times.cpu_s([pid]) - before


def figures(measured: Measured, found: dict[str, int]) -> dict[str, float]:
    """Return both as numbers: microseconds, and devices."""
    flat = {f"queue_{name}": value for name, value in asdict(measured.queue).items()}
    flat |= {name: value for name, value in asdict(measured).items() if name != "queue"}
    times = {f"scale_{name}_us": 1e6 * value for name, value in flat.items()}
    return times | {f"scale_devices_{name}": float(devices) for name, devices in found.items()}
