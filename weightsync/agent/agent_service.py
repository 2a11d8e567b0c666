"""The weight agent's process: slots in shared memory, and channels to those that write, read or copy them."""

#     trainer ranks --TakeSlot, SealBuckets--> agent <--Watch, ReleaseVersion-- receivers of this node
#                                               |  ^
#                        FetchBucket, WatchPeer v  | the same
#                                      agents of the other nodes
#
# `AgentState` decides; this shell keeps the memory, answers calls and counts bytes. Weights pass through a channel only
# between nodes.

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerRefused, TransportError, WeightSyncError
from asyncflow.process import ServiceThreads
from asyncflow.transport.channel import spread_channels
from asyncflow.transport.frame import Limits, Payload, PayloadPiece, PlacedPayload
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Call, ChannelServer, ChannelSession, Connection
from weightsync.agent.agent_state import (
    AgentState,
    AnswerCall,
    Grant,
    Instruction,
    LacksPlan,
    OfferVersion,
    Pull,
    RefuseCall,
    Renew,
)
from weightsync.config import WeightSyncConfig
from weightsync.messages import (
    AgentStatus,
    AskStatus,
    AskSwap,
    AwaitRepair,
    BeginBroadcast,
    BucketFetched,
    Done,
    EndSwap,
    FetchBucket,
    FetchPlan,
    HeldVersion,
    JoinBroadcast,
    NoRepair,
    Offered,
    OpenPlan,
    PeerHas,
    PlanFetched,
    ReleaseVersion,
    Reply,
    ReportCorrupt,
    Request,
    SealBuckets,
    Serving,
    SlotGranted,
    TakeSlot,
    Transfer,
    Watch,
    WatchPeer,
    connections,
)
from weightsync.plan import DTYPE_BYTES, Bucket, TransferPlan, plan_digest
from weightsync.slot_memory import (
    Region,
    RegionLayout,
    SlotMemory,
    apply_delta,
    encode_delta,
    huge_pages_line,
    version_checksum,
)
from weightsync.version import Version

# The link to one other agent: a channel for news and plans, and several for buckets.
#
#     link's thread    connect -> WatchPeer parks ... answered: what it has -> the agent decides -> fetches begin
#     fetch channels   FetchBucket -> the bytes go straight into the slot -> checksum -> the agent decides -> ...
#
# Each fetch channel has two buckets in flight, so that the peer sends one while the other is asked for, and this end
# compares checksums while other channels receive. If one of the link's channels breaks, all are given up: its fetches
# fail and it is opened again, with pauses, until `close`.

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
# Channels for buckets to one peer; fewer where all of an agent's would be more than `_MOST_CHANNELS`.
CHANNELS_PER_PEER = 4
_MOST_CHANNELS = 256
# Clients on the agent's own node.
_LOCAL_CLIENTS = 1024
# A link that carries less counts as broken (bytes per second).
_LEAST_RATE = 10e6
# Buckets in flight in a channel: one is sent while the next one is asked for.
_PULLS_PER_CHANNEL = 2


@dataclass(frozen=True)
class Fetch:
    pull: Pull
    region: Region  # of the slot's memory at the time of the decision


@dataclass(frozen=True)
class _PlanWanted:
    digest: str


class _Lost:
    """The channel broke."""


class Agent(Protocol):
    """What a link calls back."""

    def peer_has(self, peer: str, held: Sequence[HeldVersion]) -> None: ...
    def peer_plan(self, plan: bytes) -> None: ...
    def peer_lost(self, peer: str) -> None: ...
    def write_bucket(
        self, fetch: Fetch, reply: BucketFetched, payload: Tensor, placed: PlacedPayload | None
    ) -> bool: ...
    def fetch_ended(self, fetch: Fetch, num_bytes: int, *, matches: bool) -> None: ...


class _Attempt:
    """A fetch on its way; whoever removes it from the link's attempts reports its end."""

    def __init__(self, fetch: Fetch) -> None:
        base = fetch.pull.base
        self.fetch = fetch
        # If the delta fails, get the whole bucket, with one retry.
        self.bases = [None, None] if base is None else [base, None, None]
        self.num_bytes = 0
        self.placed: PlacedPayload | None = None

    def place(self, reply: object) -> PlacedPayload | None:
        """Return where a whole bucket goes; a delta goes elsewhere."""
        if not isinstance(reply, BucketFetched) or reply.base is not None:
            return None
        pull = self.fetch.pull
        self.placed = PlacedPayload(self.fetch.region.landing(pull.plan.buckets[pull.bucket]))
        return self.placed


_Event = PeerHas | Fetch | _Attempt | _PlanWanted | _Lost


class PeerLink:
    """The channels to one other agent, and the thread that uses them.

    Args:
        num_channels: for buckets.
        bucket_bytes: size of the largest bucket.
    """

    def __init__(
        self,
        credentials: Credentials,
        name: str,
        peer: str,
        agent: Agent,
        threads: ServiceThreads,
        *,
        limits: Limits,
        num_channels: int,
        bucket_bytes: int,
    ) -> None:
        # A bucket shares the way with those of the other channels.
        self._silent_s = max(_FETCH_TIMEOUT_S, num_channels * bucket_bytes / _LEAST_RATE)
        self._credentials = credentials
        self._name = name
        self._peer = peer
        self._agent = agent
        self._limits = limits
        self._num_channels = num_channels
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._held: list[HeldVersion] = []
        self._lock = threading.Lock()  # guards the attempts
        self._attempts: set[_Attempt] = set()
        self._progress_at = 0.0  # when an attempt last ended, or the first one began
        self._channels: list[Connection] = []
        self._turns = itertools.count()
        self._thread = threads.start(self._keep_connected, name=f"peer-{peer}")

    def fetch(self, fetch: Fetch) -> None:
        """Fetch a bucket."""
        self._events.put(fetch)

    def fetch_plan(self, digest: str) -> None:
        self._events.put(_PlanWanted(digest))

    def close(self) -> None:
        self._closing.set()
        self._events.put(_Lost())
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _keep_connected(self) -> None:
        for connection in connections(
            self._credentials, self._peer, self._name, stop=self._closing, limits=self._limits
        ):
            try:
                self._handle_events(connection)
            except (TransportError, WeightSyncError) as error:
                logger.info("%s: %s", self._name, error)
            finally:
                self._close_channels(connection)  # first: nothing writes to a slot, and no event comes any more
                self._agent.peer_lost(self._peer)  # second: failed fetches then go to other agents
                self._fail_fetches()

    def _handle_events(self, connection: Connection) -> None:
        self._watch_peer(connection, 0)
        while not self._closing.is_set():
            try:
                event = self._events.get(timeout=_FETCH_TIMEOUT_S / 2)
            except queue.Empty:
                self._check_progress()
                continue
            match event:
                case PeerHas(revision, held):
                    self._held = held
                    self._watch_peer(connection, revision)
                    self._agent.peer_has(self._peer, held)
                case Fetch() as fetch:
                    self._begin_attempt(_Attempt(fetch))
                case _Attempt() as attempt:
                    self._submit(attempt)
                case _PlanWanted(digest):
                    reply, _ = connection.call_service(FetchPlan(digest), timeout_s=_FETCH_TIMEOUT_S)
                    assert isinstance(reply, PlanFetched)
                    self._agent.peer_plan(reply.plan)
                    self._agent.peer_has(self._peer, self._held)
                case _Lost():
                    return
            self._check_progress()

    def _watch_peer(self, connection: Connection, revision: int) -> None:
        connection.submit(WatchPeer(revision), timeout_s=_FETCH_TIMEOUT_S).add_done_callback(self._handle_watch_reply)

    def _handle_watch_reply(self, future: "Future[tuple[object, Tensor]]") -> None:
        try:
            reply, _ = future.result()
        except TransportError:
            reply = None
        self._events.put(reply if isinstance(reply, PeerHas) else _Lost())

    def _check_progress(self) -> None:
        with self._lock:
            silent_s = time.monotonic() - self._progress_at if self._attempts else 0.0
        if silent_s > self._silent_s:
            raise DeadlineExceeded(f"{self._peer} sent no bucket for {silent_s:.0f} s")

    def _begin_attempt(self, attempt: _Attempt) -> None:
        with self._lock:
            if not self._attempts:
                self._progress_at = time.monotonic()
            self._attempts.add(attempt)
        self._submit(attempt)

    def _submit(self, attempt: _Attempt) -> None:
        pull = attempt.fetch.pull
        attempt.placed = None
        request = FetchBucket(pull.version, pull.bucket, attempt.bases.pop(0))
        future = self._next_channel().submit(request, timeout_s=_FETCH_TIMEOUT_S, place=attempt.place)
        future.add_done_callback(lambda done: self._take_in(attempt, done))

    def _next_channel(self) -> Connection:
        """Return the channels in turn; they are opened when first needed."""
        if len(self._channels) < self._num_channels:
            try:
                self._channels.append(
                    Connection(
                        self._credentials, self._peer, self._name, Reply,
                        limits=self._limits, callbacks_only=True, timeout_s=_CONNECT_TIMEOUT_S, stop=self._closing,
                    )
                )  # fmt: skip
            except PeerRefused as error:  # it has all the clients that it takes
                if not self._channels:
                    raise
                logger.info("%s: %s", self._name, error)
                self._num_channels = len(self._channels)
        return self._channels[next(self._turns) % len(self._channels)]

    def _take_in(self, attempt: _Attempt, future: "Future[tuple[object, Tensor]]") -> None:
        """In the thread of a fetch channel: a bucket came, or did not."""
        pull = attempt.fetch.pull
        try:
            reply, payload = future.result()
            assert isinstance(reply, BucketFetched)
            attempt.num_bytes += reply.num_bytes
            matches = self._agent.write_bucket(attempt.fetch, reply, payload, attempt.placed)
            problem = "" if matches else "its checksum does not match"
        except PeerRefused as error:
            logger.info("%s: %s", self._name, error)
            self._end_attempt(attempt, matches=False)
            return
        except TransportError:
            self._events.put(_Lost())  # the link's thread fails all attempts, this one included
            return
        except WeightSyncError as error:
            problem = str(error)
        if not problem:
            self._end_attempt(attempt, matches=True)
            return
        logger.warning("bucket %d of %s from %s: %s", pull.bucket, pull.version, self._peer, problem)
        if attempt.bases:
            self._events.put(attempt)
        else:
            self._end_attempt(attempt, matches=False)

    def _end_attempt(self, attempt: _Attempt, *, matches: bool) -> None:
        with self._lock:
            own = attempt in self._attempts
            self._attempts.discard(attempt)
            self._progress_at = time.monotonic()
        if own:  # otherwise the link was given up meanwhile
            self._agent.fetch_ended(attempt.fetch, attempt.num_bytes, matches=matches)

    def _close_channels(self, connection: Connection) -> None:
        channels, self._channels = self._channels, []
        for channel in (connection, *channels):
            # A goodbye might wait for a peer that is stopped in the middle of a bucket.
            if self._attempts:
                channel.give_up("the link is given up")
            channel.close()
            while not channel.ended:  # its thread may still write to a slot
                logger.warning("%s: a channel to %s has not ended yet", self._name, self._peer)
                channel.close()

    def _fail_fetches(self) -> None:
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Fetch):
                self._agent.fetch_ended(event, 0, matches=False)
        with self._lock:
            attempts = list(self._attempts)
        for attempt in attempts:
            self._end_attempt(attempt, matches=False)


# Turns that receivers take to be in the next broadcast. Pure.
#
# A broadcast starts once all receivers that joined are ready.
#
#     receivers  JoinBroadcast (parks) .... Transfer(epoch, members) -> group, broadcast -> JoinBroadcast (parks) ...
#     trainer    .. BeginBroadcast (parks)  Transfer(epoch, members) -> group, broadcast
#
# A group is built once per epoch. Another trainer, a member that joins or leaves, or a group that is reported as broken
# end all epochs. While the members are the same, there is an epoch for all of them, and one for those that take part
# without the ones that want later versions only.


_KEPT_EPOCHS = 2


@dataclass(frozen=True)
class _Begin:
    call: object
    session: object
    version: Version
    plan: str
    deadline: float


@dataclass(frozen=True)
class _Member:
    name: str
    least: Version | None
    together: frozenset[str]


@dataclass
class BroadcastRounds:
    """The broadcasts of one lead agent."""

    # Tells this agent's epochs from those of its predecessor.
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    _number: int = 0
    # By the sessions of the members; the last one used at the end.
    _epochs: dict[frozenset[object], str] = field(default_factory=dict)
    _members: dict[object, _Member] = field(default_factory=dict)
    _ready: dict[object, object] = field(default_factory=dict)
    _begin: _Begin | None = None
    _trainer: object = None

    def join(
        self,
        call: object,
        session: object,
        name: str,
        broken: str,
        *,
        least: Version | None = None,
        together: Iterable[str] = (),
    ) -> list[tuple[object, Transfer]]:
        """A receiver is ready; return the calls to answer. See `JoinBroadcast`."""
        for former in [each for each, other in self._members.items() if other.name == name and each != session]:
            self._remove_member(former)  # it came back before its old channel was seen to end
        if session not in self._members:
            self._epochs.clear()
        self._members[session] = _Member(name, least, frozenset(together))
        self._break_group(broken)
        self._ready[session] = call
        return self._start_if_ready()

    def begin(
        self, call: object, session: object, version: Version, plan: str, *, broken: str, deadline: float
    ) -> list[tuple[object, Transfer]]:
        """The trainer wants to broadcast; members that are not ready by `deadline` are left out."""
        self._break_group(broken)
        if session != self._trainer:  # a new process has no group yet
            self._trainer = session
            self._epochs.clear()
        self._begin = _Begin(call, session, version, plan, deadline)
        return self._start_if_ready()

    def closed(self, session: object) -> list[tuple[object, Transfer]]:
        if self._begin is not None and self._begin.session == session:
            self._begin = None
        self._remove_member(session)
        return self._start_if_ready()

    def tick(self, now: float) -> list[tuple[object, Transfer]]:
        """Time passed: a broadcast past its deadline starts without late members."""
        if self._begin is None or self._begin.deadline > now:
            return []
        for session in self._list_takers(self._begin.version):
            if session not in self._ready:
                self._remove_member(session)
        return self._start_if_ready()

    def _remove_member(self, session: object) -> None:
        self._ready.pop(session, None)
        if self._members.pop(session, None) is not None:
            self._epochs.clear()

    def _break_group(self, epoch: str) -> None:
        if epoch in self._epochs.values():
            self._epochs.clear()  # who left one group has left all

    def _list_takers(self, version: Version) -> list[object]:
        """Return the sessions of the members that take part for a version, ready or not."""
        interested = {
            session: member
            for session, member in self._members.items()
            if member.least is None or member.least <= version
        }
        names = {member.name for member in interested.values()}
        # Ranks that share a model pause together, so without one of them the others cannot take part, either.
        return [session for session, member in interested.items() if member.together <= names]

    def _start_if_ready(self) -> list[tuple[object, Transfer]]:
        begin = self._begin
        takers = [] if begin is None else self._list_takers(begin.version)
        if begin is None or any(session not in self._ready for session in takers):
            return []
        self._begin = None
        calls = [begin.call, *(self._ready.pop(session) for session in takers)]
        names = sorted(self._members[session].name for session in takers)
        epoch = self._choose_epoch(frozenset(takers))
        transfer = Transfer(epoch, begin.version, names, begin.plan, list(self._epochs.values()))
        return [(call, transfer) for call in calls]

    def _choose_epoch(self, sessions: frozenset[object]) -> str:
        epoch = self._epochs.pop(sessions, None)
        if epoch is None:
            self._number += 1
            epoch = f"{self.token}.{self._number}"
        self._epochs[sessions] = epoch
        while len(self._epochs) > _KEPT_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        return epoch


_TICK_S = 0.1
_Replies = list[tuple[object, object]]


class WeightAgent:
    """Serves one node's weight versions until `close`.

    Args:
        name: of this service, e.g. `weights-0`.
        peers: names of the other nodes' agents.
    """

    def __init__(
        self, credentials: Credentials, name: str, config: WeightSyncConfig, *, peers: Sequence[str] = ()
    ) -> None:
        self.threads = ServiceThreads(name)
        self._name = name
        self._config = config
        self._lock = threading.Lock()
        num_channels = max(1, min(CHANNELS_PER_PEER, _MOST_CHANNELS // max(1, len(peers))))
        self._state = AgentState(
            num_slots=config.num_slots,
            max_updating=config.max_updating,
            pulls_per_peer=_PULLS_PER_CHANNEL * num_channels,
            has_deltas=config.delta,
        )
        self._rounds = BroadcastRounds()
        self._layouts: dict[str, RegionLayout] = {}
        self._memories: list[SlotMemory | None] = [None] * config.num_slots
        self._fetched_bytes = 0
        self._closing = threading.Event()
        limits = Limits(payload_bytes=max(2**31, 2 * config.bucket_bytes))
        spread_channels(CHANNELS_PER_PEER)
        with self._lock:  # the first link's callbacks wait until all links exist
            self._peers = {
                peer: PeerLink(
                    credentials,
                    name,
                    peer,
                    self,
                    self.threads,
                    limits=limits,
                    num_channels=num_channels,
                    bucket_bytes=config.bucket_bytes,
                )
                for peer in peers
            }
        self._server = ChannelServer(
            credentials,
            name,
            Request,
            self,
            limits=limits,
            max_clients=_LOCAL_CLIENTS + (1 + num_channels) * len(peers),
            threads=self.threads,
        )
        self._timer = self.threads.start(self._run_clock, name="weights-timer")

    def status(self) -> AgentStatus:
        with self._lock:
            return AgentStatus(
                newest=self._state.newest,
                versions=[(held.version, len(held.checksums)) for held in self._state.held()],
                serving={_name(session): version for session, version in self._state.serving.items()},
                holders={_name(session): versions for session, versions in self._state.list_holders().items()},
                slot_bytes=sum(memory.offer.num_bytes for memory in self._memories if memory is not None),
                fetched_bytes=self._fetched_bytes,
            )

    def close(self) -> None:
        """Close all channels; idempotent. Receivers can still read what they have mapped."""
        self.threads.close()
        self._closing.set()
        for peer in self._peers.values():
            peer.close()
        self._server.close()
        self._timer.join(timeout=5)

    def handle(self, call: Call) -> None:
        message, session = call.message, call.session
        if isinstance(message, FetchBucket):
            self._send_bucket(call, message)
        elif isinstance(message, FetchPlan):
            self._send_plan(call, message.plan)
        elif isinstance(message, ReportCorrupt):
            self._examine_bucket(call, message.version, message.bucket)
        elif isinstance(message, AskStatus):
            call.send_reply(self.status())
        else:
            self._decide_and_reply(lambda: self._decide_on_call(call, message, session))

    def handle_disconnect(self, session: ChannelSession) -> None:
        self._decide_and_reply(lambda: _answers(self._rounds.closed(session)) + self._state.closed(session))

    def peer_has(self, peer: str, held: Sequence[HeldVersion]) -> None:
        self._decide_and_reply(lambda: self._state.peer_has(peer, held))

    def peer_plan(self, plan: bytes) -> None:
        with self._lock:
            self._open_plan(plan)

    def peer_lost(self, peer: str) -> None:
        self._decide_and_reply(lambda: self._state.peer_lost(peer))

    def fetch_ended(self, fetch: Fetch, num_bytes: int, *, matches: bool) -> None:
        """A fetch ended; `matches` is False if the bucket did not come or is damaged."""
        pull = fetch.pull
        with self._lock:
            self._fetched_bytes += num_bytes
        checksum = pull.checksum if matches else None
        self._decide_and_reply(lambda: self._state.end_pull(pull.peer, pull.version, pull.bucket, checksum))

    def write_bucket(self, fetch: Fetch, reply: BucketFetched, payload: Tensor, placed: PlacedPayload | None) -> bool:
        """Write what another agent sent into the slot; False: the checksum does not match, or the delta's base is gone.

        Args:
            payload: a delta, or a whole bucket that did not come over the wire; empty: it went where `placed` says.
            placed: in memory from `Region.landing`.

        Raises:
            WeightSyncError: the delta cannot be read.
        """
        pull = fetch.pull
        bucket = pull.plan.buckets[pull.bucket]
        if reply.base is not None:
            packed = self._packed_copy(reply.base, pull.bucket)
            if packed is None:
                return False
            delta = payload[: reply.num_bytes]
            apply_delta(delta, packed, element_bytes=_element_bytes(bucket, fetch.region.layout))
            fetch.region.unpack(bucket.pieces, packed)
            return fetch.region.bucket_checksum(bucket) == pull.checksum
        if placed is None or payload.numel():
            placed = PlacedPayload(fetch.region.landing(bucket))
            if placed.num_bytes != payload.numel():
                return False
            placed.accept_range(0, payload)
        fetch.region.settle(bucket, placed.parts)
        return placed.checksum == pull.checksum

    def _decide_and_reply(self, decide: Callable[[], list[Instruction]]) -> None:
        """Decide and carry out under the lock, but send the replies without it."""
        with self._lock:
            replies = self._carry_out(decide())
        for call, reply in replies:
            assert isinstance(call, Call)
            if isinstance(reply, AsyncFlowError):
                call.send_refusal(reply)
            else:
                call.send_reply(reply)

    def _decide_on_call(self, call: Call, message: object, session: ChannelSession) -> list[Instruction]:
        state = self._state
        match message:
            case OpenPlan(plan, device_copy):
                self._open_plan(plan)
                if device_copy is not None:
                    state.note_device_copy(session, plan_digest(plan), device_copy)
            case TakeSlot(rank, version, plan, wait_s):
                now = time.monotonic()
                return state.take_slot(
                    call, session, rank=rank, version=version, plan=plan,
                    deadline=now + wait_s, patient_until=now + wait_s / 2,
                )  # fmt: skip
            case SealBuckets(rank, version, checksums):
                return state.seal_buckets(call, session, rank=rank, version=version, checksums=checksums)
            case AwaitRepair(rank):
                return state.await_repair(call, session, rank=rank)
            case Watch(newer_than, best_effort):
                return state.watch(call, session, newer_than, best_effort=best_effort)
            case WatchPeer(revision):
                return state.watch_peer(call, session, revision)
            case AskSwap(wait_s):
                return state.ask_swap(call, session, time.monotonic() + wait_s if wait_s > 0 else None)
            case JoinBroadcast(broken, least, together):
                joined = self._rounds.join(call, session, session.client, broken, least=least, together=together)
                return _answers(joined)
            case BeginBroadcast(version, digest, broken, wait_s):
                if state.plan(digest) is None:
                    return [
                        RefuseCall(call, f"weights of {version}: the plan {digest} is not known here; open it first")
                    ]
                deadline = time.monotonic() + wait_s
                begun = self._rounds.begin(call, session, version, digest, broken=broken, deadline=deadline)
                return _answers(begun)
            case NoRepair(version):
                return [AnswerCall(call, Done()), *state.no_repair(version)]
            case ReleaseVersion(version):
                return [AnswerCall(call, Done()), *state.release_version(session, version)]
            case EndSwap():
                return [AnswerCall(call, Done()), *state.end_swap(session)]
            case Serving(version):
                state.serving[session] = version
        return [AnswerCall(call, Done())]

    def _carry_out(self, instructions: Sequence[Instruction]) -> _Replies:
        """Carry out the decisions, except for sending the replies."""
        replies: _Replies = []
        for instruction in instructions:
            match instruction:
                case AnswerCall(call, reply):
                    replies.append((call, reply))
                case RefuseCall(call, reason):
                    replies.append((call, PeerRefused(reason)))
                case Renew(slot):
                    self._memories[slot] = None
                case Grant(call, version, slot, plan):
                    replies.append((call, self._grant_slot(version, slot, plan)))
                case OfferVersion(call, version, slot, plan, checksums):
                    memory, total = self._get_memory(slot, plan), version_checksum(checksums)
                    offered = Offered(
                        version, plan.digest(), memory.offer, self._list_live_tokens(), list(checksums), total,
                        self._state.list_device_copies(plan.digest()),
                    )  # fmt: skip
                    replies.append((call, offered))
                case Pull() as pull:
                    replies += self._start_pull(pull)
                case LacksPlan(peer, plan):
                    self._peers[peer].fetch_plan(plan)
        return replies

    def _start_pull(self, pull: Pull) -> _Replies:
        try:
            memory = self._get_memory(pull.slot, pull.plan).memory
        except WeightSyncError as error:  # counts as not fetched: news will trigger another try
            logger.warning("%s: %s", self._name, error)
            return self._carry_out(self._state.end_pull(pull.peer, pull.version, pull.bucket, None))
        self._peers[pull.peer].fetch(Fetch(pull, Region(memory, self._get_layout(pull.plan))))
        return []

    def _grant_slot(self, version: Version, slot: int, plan: TransferPlan) -> SlotGranted | PeerRefused:
        try:
            return SlotGranted(version, self._get_memory(slot, plan).offer, self._list_live_tokens())
        except WeightSyncError as error:  # out of descriptors: tell this rank, keep serving others
            return PeerRefused(str(error))

    def _get_memory(self, slot: int, plan: TransferPlan) -> SlotMemory:
        memory = self._memories[slot]
        if memory is None or memory.offer.num_bytes != plan.region_bytes:
            if not any(self._memories):
                logger.info("%s: %s", self._name, huge_pages_line())
            memory = self._memories[slot] = SlotMemory(plan.region_bytes)
        return memory

    def _list_live_tokens(self) -> list[bytes]:
        return [memory.offer.token for memory in self._memories if memory is not None]

    def _get_layout(self, plan: TransferPlan) -> RegionLayout:
        return self._layouts[plan.digest()]

    def _open_plan(self, data: bytes) -> None:
        """Learn a plan; a plan that another rank has sent already is not decoded again."""
        if plan_digest(data) not in self._layouts:
            plan = TransferPlan.decode(data)
            self._layouts[plan.digest()] = RegionLayout(plan)
            self._state.open_plan(plan)

    @contextmanager
    def _borrowed_region(self, version: Version) -> Iterator[Region | None]:
        """Hold a version, complete or not, while it is read; None: it is not here."""
        token, region = object(), None
        with self._lock:
            borrowed = self._state.borrow_version(token, version)
            if borrowed is not None:
                slot, plan = borrowed
                region = Region(self._get_memory(slot, plan).memory, self._get_layout(plan))
        try:
            yield region
        finally:
            if region is not None:
                self._decide_and_reply(lambda: self._state.release_version(token, version))

    def _packed_copy(self, version: Version, bucket: int) -> Tensor | None:
        with self._borrowed_region(version) as region:
            # `packed` may return a view, which does not outlive the hold.
            return None if region is None else region.packed(region.layout.plan.buckets[bucket]).clone()

    def _send_bucket(self, call: Call, wanted: FetchBucket) -> None:
        with self._borrowed_region(wanted.version) as region:
            if region is None or self._state.get_checksum(wanted.version, wanted.bucket) is None:
                raise PeerRefused(f"{self._name}: bucket {wanted.bucket} of {wanted.version} is not here any more")
            bucket = region.layout.plan.buckets[wanted.bucket]
            base = wanted.base if self._config.delta else None
            older = None if base is None else self._packed_copy(base, wanted.bucket)
            delta = None
            if older is not None and older.numel() == bucket.num_bytes:
                element_bytes = _element_bytes(bucket, region.layout)
                delta = encode_delta(region.packed(bucket), older, element_bytes=element_bytes)
            if delta is not None:
                call.send_reply(BucketFetched(base, delta.numel()), Payload.from_tensor(delta))
            else:  # long pieces are sent from where they are
                pieces = [PayloadPiece((part,), part.dtype) for part in region.list_parts(bucket)]
                call.send_reply(BucketFetched(None, bucket.num_bytes), Payload(pieces))

    def _send_plan(self, call: Call, digest: str) -> None:
        with self._lock:
            plan = self._state.plan(digest)
        if plan is None:
            raise PeerRefused(f"{self._name}: no plan {digest}")
        call.send_reply(PlanFetched(plan.encode()))

    def _examine_bucket(self, call: Call, version: Version, bucket: int) -> None:
        """A receiver found a wrong checksum: check whether the slot itself is damaged."""
        with self._borrowed_region(version) as region:
            found = None if region is None else region.bucket_checksum(region.layout.plan.buckets[bucket])
        if found is not None:
            with self._lock:
                expected = self._state.get_checksum(version, bucket)
            # The slot is intact, so the reader's copy was bad: it reads again.
            if found == expected:
                call.send_reply(Done())
                return
            logger.warning("%s: bucket %d of %s is damaged; getting it again", self._name, bucket, version)
        self._decide_and_reply(lambda: self._state.report_corrupt(call, call.session, version, bucket))

    def _run_clock(self) -> None:
        while not self._closing.wait(_TICK_S):
            self._decide_and_reply(self._pass_time)

    def _pass_time(self) -> list[Instruction]:
        now = time.monotonic()
        return self._state.tick(now) + _answers(self._rounds.tick(now))


def _element_bytes(bucket: Bucket, layout: RegionLayout) -> int:
    """Return the element size for deltas: the first tensor's, if it divides the bucket's size."""
    size = DTYPE_BYTES[layout.tensor_spec(bucket.pieces[0].tensor).dtype]
    return size if bucket.num_bytes % size == 0 else 1


def _answers(replies: Sequence[tuple[object, Reply]]) -> list[Instruction]:
    return [AnswerCall(call, reply) for call, reply in replies]


def _name(session: object) -> str:
    return session.client if isinstance(session, ChannelSession) else "this agent"
