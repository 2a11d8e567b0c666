"""`node_pull_vs_gloo`, `node_cpu_s_per_gb`, `node_pull_vs_link`: how fast a version reaches another node, at what cost.

Two hosts are network namespaces on this machine, joined by a bridge (`tests/nodes/hosts.py`), with an agent each. A
trainer rank publishes to the first agent. The second one fetches nothing until a reader comes: from then on the clock
runs, until the reader is offered the version, whose buckets all match their checksums. In turn with that, the same
bytes go over raw Gloo: as many pairs as the agents have channels, out of warm memory into warm memory, nothing checked.

    node_pull_vs_gloo       bytes per second, agents / raw Gloo
    node_cpu_s_per_gb       processor seconds of both agents per 10^9 bytes; node_cpu_floor_s_per_gb: of raw Gloo's ends
    node_pull_vs_link       bytes per second where the link is limited (`--link-gbit`, by `tc`) / what the link carries
"""

import secrets
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from asyncflow.sealed_store import connect_store
from asyncflow.transport.channel import gloo_group, spread_channels
from asyncflow.transport.frame import MESSAGE_BYTES, Limits
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from benchmarks.transferqueue.part import Result
from benchmarks.weightsync.options import Options
from benchmarks.weightsync.setup import CPU, begin_process
from benchmarks.weightsync.shapes import synthetic_shapes
from tests.nodes.hosts import Host, Party, obstacle, some_hosts
from weightsync.agent.agent_service import CHANNELS_PER_PEER, WeightAgent
from weightsync.config import WeightSyncConfig
from weightsync.messages import Offered, ReleaseVersion, Reply, Watch
from weightsync.plan import Box, plan_transfer
from weightsync.sender import WeightSender, describe
from weightsync.slot_memory import version_checksum
from weightsync.version import Version

_ROUNDS = 5
_WARM_UP = 3  # versions: the memory of every slot gets its pages
_IN_FLIGHT = 3
_TIMEOUT = timedelta(seconds=300)
_SECRET = secrets.token_bytes(32)
_ME = "benchmarks.weightsync.part_nodes"


@dataclass(frozen=True)
class _Timed:
    seconds: float
    cpu_s: float  # of both ends


@dataclass(frozen=True)
class Shard:
    """A whole tensor."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def run(options: Options) -> Result:
    """Measure with the link as it is, then with a limited one."""
    if reason := obstacle():
        raise SystemExit(f"nodes: {reason}")
    with some_hosts(2) as hosts:
        pair = _Pair(hosts, options)
        try:
            free = pair.measure(options.rounds(_ROUNDS))
            with _limited(hosts[1], options.link_gbit):
                limited = pair.measure(options.rounds(_ROUNDS))
        finally:
            pair.close()
    link = options.link_gbit * 1e9 / 8
    num_bytes = pair.num_bytes
    rate = {name: num_bytes / statistics.median(each.seconds for each in timed) for name, timed in free.items()}
    cpu = {name: statistics.median(each.cpu_s for each in timed) / num_bytes * 1e9 for name, timed in free.items()}
    slow = {name: num_bytes / statistics.median(each.seconds for each in timed) for name, timed in limited.items()}
    figures = {
        "node_pull_vs_gloo": rate["pull"] / rate["raw"],
        "node_cpu_s_per_gb": cpu["pull"],
        "node_cpu_floor_s_per_gb": cpu["raw"],
        "node_pull_vs_link": slow["pull"] / link,
    }
    details = {
        "bytes": num_bytes, "channels": CHANNELS_PER_PEER, "bytes_per_s": rate, "link_gbit": options.link_gbit,
        "limited_bytes_per_s": slow, "raw_vs_link": slow["raw"] / link,
    }  # fmt: skip
    return Result(figures, {"nodes": details})


class _Pair:
    """All processes on both hosts."""

    def __init__(self, hosts: list[Host], options: Options) -> None:
        server = Party(hosts[0], "parties", "serve", (hosts[0].address, 0), hosts[0].address)
        self._parties = [server]
        self._say = options.say
        store = (hosts[0].address, server.hear())

        def start(number: int, function: Callable[..., None], *arguments: Any) -> Party:
            party = Party(hosts[number], _ME, function.__name__, store, store[0], _SECRET, *arguments)
            self._parties.append(party)
            return party

        settings = {"bucket_bytes": options.bucket_bytes, "dtype": "bfloat16"}
        names = ["weights-0", "weights-1"]
        self._agents = [start(k, agent, names[k], names[1 - k], settings) for k in range(2)]
        self._trainer = start(0, trainer, options.model_bytes, options.bucket_bytes)
        self._reader = start(1, reader)
        for party in (*self._agents, self._reader):
            assert party.hear() == "ready"
        self.num_bytes: int = self._trainer.hear()
        self._raw = [start(k, raw, k, self.num_bytes) for k in range(2)]
        for party in self._raw:
            assert party.hear() == "ready"
        self._step = 0
        for _ in range(_WARM_UP):
            self._pull()
        self._send_raw()

    def measure(self, rounds: int) -> dict[str, list[_Timed]]:
        """Return all rounds, in turn."""
        timed: dict[str, list[_Timed]] = {"pull": [], "raw": []}
        for _ in range(rounds):
            timed["pull"].append(self._pull())
            timed["raw"].append(self._send_raw())
            told = []
            for name, each in timed.items():
                rate, cost = self.num_bytes / each[-1].seconds, each[-1].cpu_s / self.num_bytes
                told.append(f"{name} {rate / 1e9:.2f} GB/s, {cost * 1e9:.2f} s/GB")
            self._say(f"nodes: {'; '.join(told)}")
        return timed

    def close(self) -> None:
        for party in self._parties:
            party.close()

    def _pull(self) -> _Timed:
        self._step += 1
        assert _ask(self._trainer, self._step) == "published"
        before = [_ask(each, "cpu") for each in self._agents]
        seconds: float = _ask(self._reader, self._step)
        after = [_ask(each, "cpu") for each in self._agents]
        return _Timed(seconds, sum(after) - sum(before))

    def _send_raw(self) -> _Timed:
        for party in self._raw:
            party.tell("go")
        ends = [party.hear(_TIMEOUT.total_seconds()) for party in self._raw]
        return _Timed(ends[1][0], ends[0][1] + ends[1][1])


@contextmanager
def _limited(host: Host, gbit: float) -> Iterator[None]:
    """Let no more than so much through to a host."""
    where = ["tc", "-n", host.bridge, "qdisc"]
    device = ["dev", host.link, "root"]
    limit = ["tbf", "rate", f"{gbit:g}gbit", "burst", "2mb", "latency", "20ms"]
    subprocess.run([*where, "add", *device, *limit], check=True)
    try:
        yield
    finally:
        subprocess.run([*where, "del", *device], check=True)


def _ask(party: Party, message: Any) -> Any:
    party.tell(message)
    return party.hear(_TIMEOUT.total_seconds())


# On the hosts: functions of one process each, that `tests/nodes/parties.py` starts.


def _credentials(host: str, port: int, secret: bytes) -> Credentials:
    begin_process()
    return Credentials(connect_store(host, port, _TIMEOUT), secret)


def agent(port: int, pipe: Any, host: str, secret: bytes, name: str, peer: str, settings: dict[str, Any]) -> None:
    """Serve as a node's agent; says how much processor time it took so far (s)."""
    config = WeightSyncConfig.model_validate(settings)
    service = WeightAgent(_credentials(host, port, secret), name, config, peers=[peer])
    pipe.send("ready")
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    service.close()


def trainer(port: int, pipe: Any, host: str, secret: bytes, model_bytes: int, bucket_bytes: int) -> None:
    """Publish the step that is asked for."""
    shards = [
        Shard(name, shape, Box.from_shape(shape), torch.rand(shape).bfloat16())
        for name, shape in synthetic_shapes(model_bytes).items()
    ]
    credentials = _credentials(host, port, secret)
    plan = plan_transfer([describe(shards)], bucket_bytes=bucket_bytes, dtype="bfloat16")
    sender = WeightSender(credentials, "weights-0", "actor", plan, 0, device=CPU)
    pipe.send(plan.num_bytes)
    while step := pipe.recv():
        shards[0].values[0] = step
        sender.publish(Version(0, step), shards, timeout_s=_TIMEOUT.total_seconds())
        sender.before_update()
        sender.wait(_TIMEOUT.total_seconds())
        pipe.send("published")


def reader(port: int, pipe: Any, host: str, secret: bytes) -> None:
    """Come as a reader, wait for the step that is asked for, and leave; says how long it took (s)."""
    credentials = _credentials(host, port, secret)
    pipe.send("ready")
    while step := pipe.recv():
        with_it = Connection(credentials, "weights-1", "reader", Reply, limits=Limits())
        version = None if step == 1 else Version(0, step - 1)
        began = time.perf_counter()
        offered, _ = with_it.call_service(Watch(version), timeout_s=_TIMEOUT.total_seconds())
        seconds = time.perf_counter() - began
        assert isinstance(offered, Offered) and offered.version == Version(0, step), offered
        assert version_checksum(offered.checksums) == offered.checksum
        with_it.call_service(ReleaseVersion(offered.version), timeout_s=60)
        with_it.close()
        pipe.send(seconds)


def raw(port: int, pipe: Any, host: str, secret: bytes, rank: int, num_bytes: int) -> None:
    """Send (rank 0) or receive the bytes over pairs that share them; says (s, processor s)."""
    begin_process()
    spread_channels(CHANNELS_PER_PEER)
    store = connect_store(host, port, _TIMEOUT)
    groups = [
        gloo_group(PrefixStore(f"raw/{number}", store), rank, 2, timeout=_TIMEOUT)
        for number in range(CHANNELS_PER_PEER)
    ]
    parts = torch.ones(num_bytes, dtype=torch.uint8).chunk(len(groups))
    ready = torch.zeros(1, dtype=torch.uint8)

    def move(number: int) -> None:
        group, in_flight = groups[number], deque[Any]()
        if rank:
            group.send([ready], 0, 1).wait()
        else:
            group.recv([ready.clone()], 1, 1).wait()
        for part in torch.split(parts[number], MESSAGE_BYTES):
            in_flight.append(group.recv([part], 0, 0) if rank else group.send([part], 1, 0))
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().wait()
        for work in in_flight:
            work.wait()

    pipe.send("ready")
    while pipe.recv() == "go":
        began, cpu_s = time.perf_counter(), time.process_time()
        threads = [threading.Thread(target=move, args=(number,)) for number in range(len(groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send((time.perf_counter() - began, time.process_time() - cpu_s))
