"""Groups over a backend with the bad manners of NCCL and HCCL: every wait ends by its deadline, and no process dies.

The backend meets in its first collective, which blocks in the host and which `abort` does not end; `wait` ignores its
timeout, and a watchdog ends the process, unless the constructor was told to wait in the host. See `asyncflow.vendors`.
Weights are broadcast over it by the real `Broadcaster` and `BroadcastMember`, asking a real agent.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncflow.device
from asyncflow.device import abort_group, connect_group
from asyncflow.errors import WeightSyncError
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession, Connection
from asyncflow.vendors import Vendor, _Cuda, vendor_of, vendors
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import STALL_S, Broadcaster, BroadcastGroup, BroadcastMember, sender_name
from weightsync.config import WeightSyncConfig
from weightsync.messages import AskStatus, JoinBroadcast, Reply, Request, Transfer
from weightsync.plan import Box, Need, plan_transfer
from weightsync.receiver import WeightReceiver
from weightsync.sender import describe
from weightsync.slot_memory import Region, RegionLayout
from weightsync.version import Version
from weightsync.version_cache import VersionCache
from workers.engines.base import LocalShard

pytestmark = pytest.mark.gate  # starts no process

CPU = torch.device("cpu")
DEADLINE_S = 30.0
SHORT = timedelta(seconds=0.3)
NEVER = threading.Event()


class Wire:
    """What was broadcast between the groups of one test: (number, tensor); and their first collective."""

    def __init__(self) -> None:
        self.met = threading.Barrier(2)
        self.changed = threading.Condition()
        self.sent: dict[int, torch.Tensor] = {}
        self.patience: list[timedelta] = []
        """Of each wait."""
        self.ended: list[int] = []
        """Broadcasts for which a watchdog threw what would have ended the process."""


class RudeGroup:
    """A group of two whose first collective returns when both are in it, and never else; nor does any wait of it before
    its broadcast has arrived, or it is aborted."""

    def __init__(self, wire: Wire, rank: int, timeout: timedelta) -> None:
        self._wire, self._rank, self._timeout = wire, rank, timeout
        self._watched = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        self.watchdogs: list[threading.Thread] = []
        self.broadcasts = 0
        self.aborted = False

    def name(self) -> str:
        return "rude"

    def rank(self) -> int:
        return self._rank

    def allreduce(self, _: list[torch.Tensor]) -> "RudeWork":
        self._wire.met.wait()
        return RudeWork(lambda: None, [])

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> "RudeWork":
        wire, number = self._wire, self.broadcasts
        self.broadcasts += 1
        if self._rank == options.rootRank:
            with wire.changed:
                wire.sent[number] = tensors[0].clone()
                wire.changed.notify_all()

        def arrive() -> None:
            with wire.changed:
                wire.changed.wait_for(lambda: self.aborted or number in wire.sent)
                if self.aborted:
                    raise RuntimeError("the communicator was aborted")
                tensors[0].copy_(wire.sent[number])

        if self._watched:
            self.watchdogs.append(threading.Thread(target=self._watch, args=(number,), daemon=True))
            self.watchdogs[-1].start()
        return RudeWork(arrive, wire.patience)

    def _watch(self, number: int) -> None:
        with self._wire.changed:
            if not self._wire.changed.wait_for(lambda: number in self._wire.sent, self._timeout.total_seconds()):
                self._wire.ended.append(number)


class RudeWork:
    """Ignores its timeout."""

    def __init__(self, arrive: Callable[[], None], patience: list[timedelta]) -> None:
        self._arrive, self._patience = arrive, patience

    def wait(self, timeout: timedelta) -> None:
        self._patience.append(timeout)
        self._arrive()


class Rude(_Cuda):
    """The vendor of such groups, in the place of the CPU's; it constructs them as NCCL's record does."""

    wire: Wire
    made: list[RudeGroup]
    aborted: list[Any]

    def abort(self, group: Any) -> None:
        self.aborted.append(group)
        with self.wire.changed:
            group.aborted = True
            self.wire.changed.notify_all()


@pytest.fixture
def rude(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rude]:
    vendor, wire = Rude("cpu", "rude"), Wire()
    for name, value in {"made": [], "aborted": [], "wire": wire}.items():
        object.__setattr__(vendor, name, value)

    def construct(store: dist.Store, rank: int, size: int, options: Any) -> RudeGroup:
        vendor.made.append(RudeGroup(wire, rank, options._timeout))
        return vendor.made[-1]

    setattr(construct, "Options", SimpleNamespace)  # noqa: B010 (a function that stands for a class)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", construct, raising=False)
    monkeypatch.setattr(asyncflow.device, "vendor_of", lambda _: vendor)
    monkeypatch.setattr(asyncflow.device, "vendors", lambda: {"cpu": vendor})
    yield vendor
    wire.met.abort()  # threads that were abandoned in it end
    assert not any(group.watchdogs for group in vendor.made), "one would end the process"


def store(timeout: timedelta) -> dist.Store:
    one = dist.HashStore()
    one.set_timeout(timeout)
    return one


def test_ranks_that_all_come_are_connected(rude: Rude) -> None:
    shared = store(timedelta(seconds=DEADLINE_S))
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: connect_group(shared, rank, 2, CPU), range(2)))
    assert sorted(map(id, groups)) == sorted(map(id, rude.made))
    abort_group(groups[0])
    assert rude.aborted == [groups[0]]


def test_no_rank_enters_the_backend_before_all_are_there(rude: Rude) -> None:
    with pytest.raises(RuntimeError):
        connect_group(store(SHORT), 0, 2, CPU)
    assert rude.made == []


def test_a_group_that_does_not_wait_in_the_host_ends_its_process(rude: Rude) -> None:
    group = RudeGroup(rude.wire, 1, SHORT)  # not as the record does
    group.broadcast([torch.zeros(1)], dist.BroadcastOptions())
    group.watchdogs[0].join(DEADLINE_S)
    assert rude.wire.ended == [0]


def test_a_rank_that_dies_between_meeting_and_connecting_costs_the_deadline(rude: Rude) -> None:
    shared = store(SHORT)
    shared.set("here/1", "1")
    with pytest.raises(RuntimeError, match=r"did not connect within 0\.3 s"):
        connect_group(shared, 0, 2, CPU)
    assert len(rude.made) == 1


def test_a_backend_has_its_own_time_to_connect(rude: Rude) -> None:
    shared = store(timedelta(seconds=DEADLINE_S))
    shared.set("here/1", "1")
    with pytest.raises(RuntimeError, match=r"did not connect within 0\.3 s"):
        connect_group(shared, 0, 2, CPU, connect_s=0.3)


def test_connecting_is_given_up_when_the_member_closes(rude: Rude) -> None:
    shared, closing = store(timedelta(seconds=DEADLINE_S)), threading.Event()
    shared.set("here/1", "1")
    closing.set()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not connect"):
        connect_group(shared, 0, 2, CPU, stop=closing)
    assert time.monotonic() - began < DEADLINE_S / 2


SHARD = LocalShard("w", (300,), Box.from_shape((300,)), torch.arange(300.0))
PLAN = plan_transfer([describe([SHARD])], bucket_bytes=1024, dtype="float32")
LAYOUT = RegionLayout(PLAN)
VERSION = Version(0, 1)


class Job:
    """A job store, the agent that says who takes part, and channels of receivers to it."""

    def __init__(self) -> None:
        timeout = timedelta(seconds=DEADLINE_S)
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.credentials = Credentials(server, b"secret", DEADLINE_S)
        self.agent = WeightAgent(self.credentials, "weights-0", WeightSyncConfig())
        self.channels: list[Connection] = []

    def broadcaster(self, timeout_s: float) -> Broadcaster:
        return Broadcaster(
            self.credentials, "weights-0", "actor/0", PLAN, 0, device=CPU, epoch="0", timeout_s=timeout_s
        )

    def join(self, name: str) -> Future[Any]:
        """Say to the agent that a receiver is there; returns the transfer that begins."""
        self.channels.append(Connection(self.credentials, "weights-0", name, Reply, timeout_s=DEADLINE_S))
        joined = self.channels[-1].submit(JoinBroadcast(""), timeout_s=DEADLINE_S)
        self.channels[-1].call_service(AskStatus(), timeout_s=DEADLINE_S)  # the agent has read the one before it, too
        return joined

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.agent.close()


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.close()


def cast(index: int, views: Sequence[torch.Tensor]) -> None:
    for piece, view in zip(PLAN.buckets[index].pieces, views, strict=True):
        view.copy_(SHARD.values[piece.box.slices])


def connect(group: BroadcastGroup, transfer: Transfer) -> None:
    group.connect_members(transfer, PLAN, timeout_s=DEADLINE_S, stop=NEVER)


def run_both(sender: Broadcaster, joined: Future[Any], receive: Callable[[Transfer], None]) -> None:
    """Broadcast from one thread to a receiver in another."""
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(sender.broadcast_version, VERSION, cast)
        receiving = threads.submit(lambda: receive(joined.result(DEADLINE_S)[0]))
        receiving.result(DEADLINE_S)
        sending.result(DEADLINE_S)


def test_weights_are_broadcast_over_such_a_backend(rude: Rude, job: Job) -> None:
    region, sender = Region(torch.zeros(PLAN.region_bytes, dtype=torch.uint8), LAYOUT), job.broadcaster(10 * STALL_S)
    member = BroadcastMember(job.credentials.group_store(DEADLINE_S), "rollout-0", CPU)

    def receive(transfer: Transfer) -> None:
        member.receive_version(transfer, LAYOUT, region.view_overlap, timeout_s=10 * STALL_S)

    run_both(sender, job.join("rollout-0"), receive)
    assert torch.equal(region.view_tensor(0), SHARD.values)
    assert [group.broadcasts for group in rude.made] == [len(PLAN.buckets)] * 2
    assert rude.aborted == []
    assert max(rude.wire.patience) <= timedelta(seconds=STALL_S), "of a bucket, whatever the transfer may take"
    sender.close()
    member.abort()


def test_a_receiver_that_joined_and_never_came_costs_the_deadline_before_the_first_byte(
    rude: Rude, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    sender, joined = job.broadcaster(2.0), job.join("rollout-0")
    sender.broadcast_version(VERSION, cast)
    assert joined.result(DEADLINE_S)[0].members == ["rollout-0"]
    assert re.search(r"rollout-0 was not here in time.*from their agents", caplog.text)
    assert rude.made == []


def test_a_stop_ends_a_broadcasts_wait_for_a_lead_agent_that_is_gone(job: Job) -> None:
    sender = Broadcaster(job.credentials, "gone", "actor/0", PLAN, 0, device=CPU, epoch="0", timeout_s=DEADLINE_S)
    assert stopped_after_s(sender) < DEADLINE_S / 2


def test_a_stop_that_comes_while_it_connects_ends_what_follows(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead agent takes the channel and answers nothing, as one does that is stopped."""
    looked = threading.Event()

    class Sender(Broadcaster):
        def _abort_group(self) -> None:
            super()._abort_group()
            looked.set()

    def connect(*given: Any, stop: threading.Event, **named: Any) -> Connection:
        assert looked.wait(DEADLINE_S)
        return Connection(*given, **named)

    class Silent:
        def handle(self, call: Call) -> None:
            """Does not answer."""

        def handle_disconnect(self, session: ChannelSession) -> None:
            """Nothing is kept."""

    monkeypatch.setattr("weightsync.broadcast_group.Connection", connect)
    server = ChannelServer(job.credentials, "silent", Request, Silent())
    sender = Sender(job.credentials, "silent", "actor/0", PLAN, 0, device=CPU, epoch="0", timeout_s=DEADLINE_S)
    took_s = stopped_after_s(sender)
    server.close()
    assert took_s < DEADLINE_S / 2


def stopped_after_s(sender: Broadcaster) -> float:
    """Return how long a broadcast takes that is to stop (s)."""
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    sender.broadcast_version(VERSION, cast, stop=stop)
    sender.close()
    return time.monotonic() - began


def test_a_member_that_is_not_ready_costs_the_deadline_before_the_first_byte(rude: Rude, job: Job) -> None:
    """As one does that dies between two broadcasts of the same group: on HCCL the device would hang with it."""
    sender, other = job.broadcaster(3.0), BroadcastGroup(job.credentials.group_store(DEADLINE_S), "rollout-0", CPU)
    run_both(sender, job.join("rollout-0"), lambda transfer: connect(other, transfer))
    assert [group.broadcasts for group in rude.made] == [0, 0]
    assert len(rude.aborted) == 1, "the sender's: the next epoch is without that member"


@pytest.mark.parametrize(
    ("needs", "fails"),
    [({"other": Need((300,))}, "takes part in no more"), ({"w": Need((300,))}, "no room; taking it from its agent")],
)
def test_a_receiver_that_cannot_take_a_version_in_costs_nobody_a_deadline(
    rude: Rude, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, needs: Any, fails: str
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(VersionCache, "memory", full)
    sender, name = job.broadcaster(10 * DEADLINE_S), "rollout-0"
    member = BroadcastMember(job.credentials.group_store(DEADLINE_S), name, CPU)
    receiver = WeightReceiver(
        job.credentials, "weights-0", name, needs, device=CPU, member=member, lead="weights-0", timeout_s=DEADLINE_S
    )
    began = time.monotonic()
    while fails not in caplog.text and time.monotonic() - began < DEADLINE_S:
        sender.broadcast_version(VERSION, cast)  # no receiver has joined yet
    took_s = time.monotonic() - began
    receiver.close()
    assert took_s < DEADLINE_S / 2, caplog.text
    assert rude.made == [], "nobody connected"


def test_a_sender_that_dies_in_a_transfer_costs_the_deadline(rude: Rude, job: Job) -> None:
    store, plan = job.credentials.group_store(DEADLINE_S), PLAN
    transfer = Transfer("epoch", VERSION, ["rollout-0"], plan.digest())
    alive = BroadcastMember(store, "rollout-0", CPU)
    other = BroadcastGroup(job.credentials.group_store(DEADLINE_S), sender_name(0), CPU)

    def send_nothing() -> None:
        connect(other, transfer)
        other.ready(transfer, plan, deadline=time.monotonic() + DEADLINE_S, stop=NEVER)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send_nothing)
        with pytest.raises(WeightSyncError, match=r"step 1: broadcast broke \(the communicator was aborted\)"):
            alive.receive_version(transfer, LAYOUT, lambda _: None, timeout_s=3.0)
        sending.result(DEADLINE_S)
    with pytest.raises(WeightSyncError, match="epoch epoch is broken already"):
        alive.receive_version(transfer, LAYOUT, lambda _: None, timeout_s=3.0)


class Recorded:
    """Stands for a vendor's process group: records what its constructor sees."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.env = {name: os.environ.get(name) for name in os.environ if "BLOCKING_WAIT" in name}
        self.options = options
        self.reasons: list[str] = []

    def name(self) -> str:
        return "hccl"

    def abort(self) -> None:
        """Empty, as the base class's is on HCCL."""

    def abort_hccl_comm(self, reason: str) -> None:
        self.reasons.append(reason)

    Options = SimpleNamespace


def test_nccl_waits_in_the_host_by_the_groups_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorded, raising=False)
    group: Any = vendor_of("cuda:1").group(dist.HashStore(), 0, 1, SHORT)
    assert group.env == {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert group.options._timeout == SHORT
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "it is not a setting of the gang's own group"


def test_nccl_writes_no_dump_key_into_the_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    vendor_of("cuda").load()
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")


def test_hccl_waits_in_the_host_and_is_aborted_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_npu", "torch_npu._C", "torch_npu._C._distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torch_npu._C._distributed_c10d"], "ProcessGroupHCCL", Recorded, raising=False)
    group: Any = vendor_of("npu").group(dist.HashStore(), 0, 1, SHORT)
    assert group.env == {"TORCH_HCCL_BLOCKING_WAIT": "1", "HCCL_BLOCKING_WAIT": "1"}
    assert group.options._timeout == group.options.op_timeout == SHORT
    abort_group(group)
    assert len(group.reasons) == 1


def test_a_vendor_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(vendors()) == ["npu", "cuda", "cpu"]
    mine = Vendor("mine", "mccl", "mine", "MINE_VISIBLE")
    entry = SimpleNamespace(name="mine", value="mine:MINE", load=lambda: mine)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    monkeypatch.setattr("asyncflow.vendors.vendors", vendors.__wrapped__)
    assert vendor_of("mine:3") is mine
