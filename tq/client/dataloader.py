"""`StreamingDataLoader`: a training rank's rows as an iterable, fetched ahead, one partition (step) after another.

    loader = StreamingDataLoader(client, "actor_train", columns, first_partition=1, last_partition=60, ...)
    while loader.next_partition():
        for batch in loader:                   # packed, as soon as rows are ready; may be empty in a round
            ...                                # batch["responses"], batch.indices
        loader.ack()                           # after the optimizer update; `ack_soon` does it beside the next step

    for rounds in loader.passes(4, seed=7):    # the same rows several times (PPO), in place of the inner loop
        for batch in rounds: ...               # (the actor keeps rounds itself: with the columns it computed)

It is an `IterableDataset`: `torch.utils.data.DataLoader(loader, batch_size=None)` iterates over it, too.

A separate thread leases and reads ahead, also beyond the partition's end. In a data-parallel replica rank 0 fetches and
that thread broadcasts, so the caller's thread only takes finished batches. Only a broadcast from device to device is
made by the caller's thread.
"""

import math
import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from asyncflow import errors
from asyncflow.decoding import msgpack_decoder
from asyncflow.device import abort_group, to_device
from asyncflow.errors import AsyncFlowError, ConfigError, LeaseFenced, PeerRefused, TransportError
from asyncflow.transport.frame import Payload, aligned
from tq.client.arguments import as_columns, check_names
from tq.client.lease import AckThread
from tq.client.queue_client import QueueClient
from tq.client.read_ahead import ReadAhead
from tq.client.session import StallMonitor
from tq.columns import PackedBatch
from tq.config import ReplicaBroadcast, ReplicaFetch
from tq.messages import FetchRound, LeaseGrant, NoRows, NoRowsReason
from tq.policies import split_by_tokens, split_evenly
from tq.wire import ColumnHeader, describe, unpack

# One data-parallel replica: ranks that train on the same rows. Rank 0 fetches; every rank gets one packed broadcast.
#
#     rank 0: queue -> item ->+-> header 4 KiB (sizes; a small item whole) --> rank 1, 2, ...
#                             '-> one buffer (description, then values), only if it did not fit
#
# `relay` runs in every rank's read-ahead thread, on a Gloo group that nothing else uses, so it overlaps with
# compute and the order of the collectives is the same everywhere. What ends rank 0's fetching (a stop, the last
# partition, any error) travels like an item: no rank waits for rows that will not come. A rank that dies breaks the
# group's pairs, so the others' broadcast fails. int64 columns travel as narrow as their values allow.
#
# With a `DeviceRoute` the buffer (all columns' lengths, then their values, without padding) goes from device to device:
#
#     rank 0, a thread   lease, read ... next round ...
#     rank 0             header (Gloo) | buffer -> device -> broadcast | forward, backward | header ...
#     others             header        |            broadcast -> host  | forward, backward | header ...
#
# The thread that computes issues it, in the groups in which it computes. So all ranks have the same order of
# collectives in each of them, and no communicator waits beside another. Ranks wait for rows in the header's broadcast,
# in the host: no collective of the device is begun before its buffer exists.
#
# With `ReplicaFetch.STAGE` these ranks are those of one pipeline stage. With `EACH` there is no broadcast. Either way
# several ranks ask for the same rounds and are granted the same leases, which rank 0 of the whole replica acknowledges.

Round = tuple[LeaseGrant, PackedBatch]
"""One rank's lease in a round, and its rows."""

HEADER_BYTES = 4096
_SIZES = struct.Struct("<qq")


class Failure(msgspec.Struct):
    """An error of rank 0: the name of its class, and its text."""

    kind: str
    text: str


class _Envelope(msgspec.Struct):
    """What travels. All fields absent: rank 0 has nothing more to give."""

    answer: LeaseGrant | NoRows | None = None
    failure: Failure | None = None
    columns: list[ColumnHeader] = []


@dataclass(frozen=True)
class DeviceRoute:
    """How a buffer gets from rank 0's device to this rank's: one broadcast in each group, from the group's first rank.

    The groups are those in which these ranks compute, in the order in which the buffer passes them; this rank is in
    all, and the first rank of every group but the first one has the buffer from the group before.
    """

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device
    # Entered around the broadcasts, where something else may use the device between them.
    computing: Callable[[], AbstractContextManager[None]] = nullcontext

    def carry(self, host: Tensor, *, sends: bool) -> Tensor:
        """Return rank 0's buffer, uint8 in host memory of a size that 8 divides; elsewhere `host` is only its size."""
        words = host.view(torch.int64)  # a type that every vendor's collectives have
        with self.computing():
            there = to_device([words], self.device)[0] if sends else torch.empty_like(words, device=self.device)
            for group in self.groups:
                dist.broadcast(there, src=dist.get_process_group_ranks(group)[0], group=group)
            return host if sends else there.cpu().view(torch.uint8)


class Replica:
    """The ranks that share rows. One thread per rank calls its collectives; any thread may call `abort`.

    Args:
        group: a Gloo group of the replica's ranks, used for nothing else (`asyncflow.device.connect_group`); with
            `STAGE`, of the ranks of this pipeline stage. With `EACH` only its ranks matter.
        fetch: which ranks ask the queue; None: as the config of the loader's client says (`tq.replica_fetch`).
        acks: whether `group` has the rank that acknowledges for the whole replica, its first one.
        route: what carries rows instead of `group`, if they go from device to device; then the thread that computes has
            to call `relay` and `share`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str = "replica",
        *,
        fetch: ReplicaFetch | None = None,
        acks: bool = True,
        route: DeviceRoute | None = None,
    ) -> None:
        self.name = name
        self.fetch = fetch
        """Which ranks ask the queue; None until a loader has decided."""
        self.route = route
        self._acks = acks
        self._group = group
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._aborted = False

    @property
    def shares(self) -> bool:
        """Whether rank 0's rows are broadcast."""
        assert self.fetch is not None, "neither the caller nor a loader decided which ranks fetch"
        return self.fetch is not ReplicaFetch.EACH and self._group.size() > 1

    @property
    def fetches(self) -> bool:
        """Whether this rank talks to the queue."""
        assert self.fetch is not None, "neither the caller nor a loader decided which ranks fetch"
        return self.fetch is ReplicaFetch.EACH or self._group.rank() == 0

    @property
    def acks(self) -> bool:
        """Whether this rank acknowledges the replica's leases."""
        return self._acks and self._group.rank() == 0

    @property
    def in_program_order(self) -> bool:
        """Whether rows travel between the caller's other collectives, in its thread."""
        return self.shares and self.route is not None

    def relay(self, items: Iterator[Round | NoRows] | None) -> Iterator[Round | NoRows]:
        """Yield rank 0's `items` (None elsewhere) on every rank; all ranks iterate, in one thread each.

        An error of `items` is raised on every rank; TransportError: a rank of the replica is gone.
        """
        while True:
            try:
                item = None if items is None else next(items, None)
            except Exception as error:  # the other ranks wait for this: they raise it too
                self._broadcast_envelope(_Envelope(failure=Failure(type(error).__name__, str(error))))
                raise
            item = self.share(item)
            if item is None:
                return
            yield item

    def share(self, item: Round | NoRows | None) -> Round | NoRows | None:
        """Return rank 0's `item` on every rank; what the others pass is ignored. Raises as `relay` does."""
        if self._group.rank():
            return self._receive_item()
        self._broadcast_item(item)
        return item

    def abort(self) -> None:
        """End the group, from any thread: calls that wait in it raise `TransportError`, here and on other ranks."""
        if not self._aborted:
            self._aborted = True
            abort_group(self._group)

    def _broadcast_item(self, item: Round | NoRows | None) -> None:
        if isinstance(item, tuple):
            headers, payload = describe(item[1].columns, narrow=True, lengths_first=True)
            self._broadcast_envelope(_Envelope(item[0], columns=headers), payload)
        else:
            self._broadcast_envelope(_Envelope(item))

    def _broadcast_envelope(self, envelope: _Envelope, payload: Payload | None = None) -> None:
        payload = payload or Payload([])
        meta = msgspec.msgpack.encode(envelope)
        carried = Payload([]) if self.route is not None else payload
        total = aligned(len(meta)) + carried.num_bytes
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        header[: _SIZES.size] = torch.frombuffer(
            bytearray(_SIZES.pack(len(meta), payload.num_bytes)), dtype=torch.uint8
        )
        body = header[_SIZES.size :][:total] if _fits(total) else self._get_send_buffer(total)
        body[: len(meta)] = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
        carried.write(body[aligned(len(meta)) :])
        self._broadcast_tensor(header)
        if not _fits(total):
            self._broadcast_tensor(body)
        if self.route is not None and payload.num_bytes:
            buffer = self._get_send_buffer(payload.num_bytes)
            payload.write(buffer)
            self._carry(self.route, buffer, sends=True)

    def _receive_item(self) -> Round | NoRows | None:
        header = self._broadcast_tensor(torch.empty(HEADER_BYTES, dtype=torch.uint8))
        meta_bytes, payload_bytes = _SIZES.unpack(header[: _SIZES.size].numpy().tobytes())
        total = aligned(meta_bytes) + (0 if self.route is not None else payload_bytes)
        fits = _fits(total)
        body = header[_SIZES.size :][:total] if fits else self._broadcast_tensor(torch.empty(total, dtype=torch.uint8))
        envelope = msgpack_decoder(_Envelope).decode(body[:meta_bytes].numpy().tobytes())
        if envelope.failure is not None:
            raise self._rebuild_error(envelope.failure)
        granted = envelope.answer
        if not isinstance(granted, LeaseGrant):
            return granted
        payload = body[aligned(meta_bytes) :]
        if self.route is not None and payload_bytes:
            payload = self._carry(self.route, torch.empty(payload_bytes, dtype=torch.uint8), sends=False)
        columns = unpack(envelope.columns, payload, lengths_first=True)
        return granted, PackedBatch(tuple(granted.rows), columns, tuple(granted.groups))

    def _broadcast_tensor(self, tensor: Tensor) -> Tensor:
        if self._aborted:
            raise TransportError(f"{self.name}: closed")
        try:
            self._group.broadcast([tensor]).wait()
            return tensor
        except RuntimeError as error:
            raise self._end_broken(error) from error

    def _carry(self, route: DeviceRoute, host: Tensor, *, sends: bool) -> Tensor:
        try:
            return route.carry(host, sends=sends)
        except RuntimeError as error:
            raise self._end_broken(error) from error

    def _end_broken(self, error: RuntimeError) -> TransportError:
        self.abort()  # other ranks do not notice on their own: a broadcast does not touch every pair
        return TransportError(
            f"{self.name}: a broadcast among its {self._group.size()} ranks failed at rank {self._group.rank()}: "
            f"one of them died or left ({error})"
        )

    def _get_send_buffer(self, num_bytes: int) -> Tensor:
        # Reuse the buffer: faulting in fresh pages would cost as much as the copy.
        if self._outgoing.numel() < num_bytes:
            self._outgoing = torch.empty(num_bytes, dtype=torch.uint8)
        return self._outgoing[:num_bytes]

    def _rebuild_error(self, failure: Failure) -> AsyncFlowError:
        kind = getattr(errors, failure.kind, TransportError)
        text = failure.text if kind.__name__ == failure.kind else f"{failure.kind}: {failure.text}"
        error: AsyncFlowError = kind(f"{text} (at rank 0 of {self.name})")
        return error


def _fits(num_bytes: int) -> bool:
    return _SIZES.size + num_bytes <= HEADER_BYTES


ALL_ROWS = 2**31 - 1
"""`FetchRound.num_rows` of a loader whose rounds are limited by tokens alone."""

_EMPTY = PackedBatch((), {})


def _without_deadlines(items: Iterable[Round | NoRows]) -> Iterator[Round | NoRows]:
    for item in items:
        if isinstance(item, tuple) or item.reason is not NoRowsReason.DEADLINE:
            yield item


_RETRY_S = 1.0
_JOIN_S = 5.0
_WORKERS = "a StreamingDataLoader reads ahead by itself and cannot move into worker processes; use num_workers=0"


def order_of_pass(count: int, *, seed: int | None, partition: int, number: int) -> list[int]:
    """Return the order of a partition's rounds in pass `number` (0: the first, unshuffled), as positions.

    Later passes are shuffled by (seed, partition, number), so that all ranks of a gang agree; None: no shuffling.
    """
    order = list(range(count))
    if number and seed is not None:
        random.Random(f"{seed}/{partition}/{number}").shuffle(order)
    return order


class StreamingDataLoader(IterableDataset[PackedBatch]):
    """Iterates over one rank's slices of rounds, one partition at a time. One thread iterates; any thread may close.

    Reading ahead starts with the first `next_partition` or iteration.

    Args:
        client: may be None on ranks of a replica that do not fetch, which ignore it.
        columns: to read. Ranks of a replica that each fetch may read different ones.
        first_partition, last_partition: the steps, inclusive; `last_partition` None: the first one alone.
        rows_per_round: rows per rank in a full round; 0: only `token_budget` counts.
        token_budget: tokens per rank in a full round; 0: only `rows_per_round` counts.
        rank, num_ranks: data-parallel rank and their number.
        replica: the ranks that share this rank's rows; None: this rank alone. If it does not say which ranks fetch, the
            client's config does, so every rank needs its client.
        prefetch: rounds read ahead.
        timeout_s: a fetch is repeated after this time at the latest; it does not end the iteration.
        producers_timeout_s: fail when no producer of the missing rows has been connected for this long (s); longer than
            producers take to start. 0: wait forever.
        producers_setting: the user's name for that limit, for the error.
        arrived: called by the reading thread when `has_round` may have become true.

    Raises:
        ConfigError: a round has no size, or it is not known which ranks of the replica fetch, or how rows reach them.
    """

    def __init__(
        self,
        client: QueueClient | None,
        task: str,
        columns: Sequence[str],
        *,
        first_partition: int = 0,
        last_partition: int | None = None,
        rows_per_round: int = 0,
        token_budget: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        replica: Replica | None = None,
        prefetch: int = 1,
        timeout_s: float = 60.0,
        producers_timeout_s: float = 60.0,
        producers_setting: str = "producers_timeout_s",
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        if replica is not None and replica.fetch is None:
            if client is None:
                raise ConfigError(
                    f"loader of {task}: give every rank of {replica.name} its client, or Replica(fetch=...)"
                )
            replica.fetch = client.replica_fetch
            if replica.route is None and client.replica_broadcast is ReplicaBroadcast.DEVICE and replica.shares:
                raise ConfigError(
                    f"loader of {task}: tq.replica_broadcast is device; give {replica.name} the groups of its devices, "
                    f"Replica(route=...)"
                )
        if replica is not None and not replica.fetches:
            client = None
        else:
            assert client is not None, "a rank that fetches needs a client"
        if rows_per_round <= 0 and token_budget <= 0:
            raise ConfigError(f"loader of {task}: a round has no size; give rows_per_round, token_budget or both")
        self.largest_slice = 0
        """Most rows of any rank in the current round."""
        self.round_partition = 0
        """Partition of the current round's rows: the step being read, or another one if steps take rows of several."""
        self.stopped = False
        """The queue was stopped, or the loader closed, before the partition's end."""
        self.requests = 0
        """Fetches and reads that this rank sent to controllers and storage units."""
        self._client = client
        self._columns = check_names(columns)
        self._last = first_partition if last_partition is None else last_partition
        self._partition = first_partition - 1
        self._request = FetchRound(
            task, "", first_partition, 0, rows_per_round or ALL_ROWS, rank, num_ranks, timeout_s, token_budget
        )
        self._replica = replica
        self._prefetch = max(1, prefetch)
        self._monitor = StallMonitor(
            producers_timeout_s=producers_timeout_s, setting=producers_setting, narrates=rank == 0
        )
        self._read_to_end = True
        self._tokens: dict[int, int] = {}
        self._held: list[LeaseGrant] = []
        self._owes_put = False
        self._acks = AckThread(f"ack-{task}", self._ack_lease)
        self._closing = threading.Event()
        self._asking_since: float | None = None
        self._arrived = arrived
        self._ahead: ReadAhead[Round | NoRows] | None = None
        self._rounds: Iterator[Round | NoRows] | None = None  # what the caller's thread takes
        self._failure: Exception | None = None  # of a replica's relay, which cannot go on after it
        self._is_over = False  # whether the iteration came to an end on all ranks

    @property
    def partition(self) -> int:
        """The step that is being read, or was read last."""
        return self._partition

    @property
    def has_round(self) -> bool:
        """Whether the next round, or the end, is here; always true on a rank of a replica that only follows rank 0."""
        return self._ahead is None or self._ahead.is_ready

    @property
    def asking_s(self) -> float:
        """How long the queue has not answered a request for the next round (s); 0: nothing was asked. Infinite on a
        rank that never asks, since it gets the rounds of another rank of its replica."""
        if self._client is None:
            return math.inf
        since = self._asking_since
        return 0.0 if since is None else time.monotonic() - since

    def next_partition(self) -> int:
        """Move on to the next step; returns its number, or 0 after the last one or when the queue stopped.

        Raises ConfigError if the current step has not been read to its end.
        """
        if self.stopped or self._partition >= self._last:
            return 0
        if not self._read_to_end:
            raise ConfigError(f"{self._name}: read it to its end before the next one; its other rows would be lost")
        self._start_reading()
        self._partition += 1
        self._read_to_end = False
        return self._partition

    def __iter__(self) -> Iterator[PackedBatch]:
        """Yield the packed batches of this rank's rounds until the partition ends or the queue stops.

        A new iteration resumes one that was left early; after a partition's end it begins the next partition, even
        without `next_partition`.

        Raises:
            ProducersGone: no producer of the rows is left.
            TransportError: the queue, or another rank of the replica, is gone.
            ConfigError: this is a worker process of a `torch.utils.data.DataLoader`.
        """
        for granted, batch in self._iterate_rounds():
            yield self._note_yielded(granted, batch)

    def passes(self, count: int, *, seed: int | None = None) -> Iterator[Iterator[PackedBatch]]:
        """Yield `count` iterations over the current partition: the first one fetches, the others repeat from memory.

        Rounds stay as they were assigned, so that token budgets hold and all ranks have equally many micro-batches. A
        stop in the first pass ends all. `seed` must be the same on all ranks of the gang; see `order_of_pass`.
        """
        kept: list[Round] = []
        yield (self._note_yielded(*item) for item in self._iterate_rounds(kept))
        for number in range(1, count):
            if self.stopped:
                return
            order = order_of_pass(len(kept), seed=seed, partition=self._partition, number=number)
            yield (self._note_yielded(*kept[position]) for position in order)

    def micro_batches(self, batch: PackedBatch, *, num_rows: int = 0, token_budget: int = 0) -> list[PackedBatch]:
        """Split the last yielded round (`batch`, possibly with more columns) by the tokens of its rows.

        Args:
            num_rows: make as many micro-batches as the gang's fullest rank needs at this many rows each: equally many
                on all ranks, the last ones empty where rows are short, tokens balanced among the others.
            token_budget: instead, make as few as possible of at most this many tokens (a longer row is alone). Their
                number differs between ranks; ranks with fewer must take part in the others' collectives.
        """
        tokens = [self._tokens.get(row, 1) for row in batch.indices]
        if token_budget:
            return [batch.select(positions) for positions in split_by_tokens(tokens, token_budget)]
        assert num_rows > 0, "micro_batches needs num_rows or token_budget"
        count = -(-self.largest_slice // num_rows)
        filled = min(count, -(-len(batch) // num_rows))
        parts = split_evenly(tokens, filled, equal_counts=True) if filled else []
        return [batch.select(part) for part in parts] + [_EMPTY] * (count - filled)

    def put(self, columns: Mapping[str, Any]) -> None:
        """Write the task's outputs for the last yielded round, in the order of its rows, which then need no ack.

        Raises:
            LeaseFenced: other consumers have the rows by now; drop the work and continue.
            ConfigError, TransportError: see `Lease.put`. Put again; nothing else works until then.
        """
        granted = self._held[-1]
        lost: LeaseFenced | None = None
        # Unless the put succeeds, the rows would stay leased, or be acknowledged without their outputs.
        self._owes_put = True
        try:
            if granted.rows and self._client is not None:
                self._client.data.put(granted, granted.rows, as_columns(columns)[0])
        except LeaseFenced as error:
            lost = error
        self._owes_put = False
        self._held.pop()
        if lost is not None:
            raise lost

    def ack(self) -> None:
        """The rows yielded since the last ack are in the weights. One ack per replica; after an error, call again.

        Raises:
            LeaseFenced: other consumers had some by now, so these were trained for nothing; all others are
                acknowledged. Raised once.
            TransportError: some are still to be acknowledged.
            ConfigError: the last round's outputs could not be put.
        """
        self._hand_over()
        self._acks.wait()

    def ack_soon(self) -> None:
        """As `ack`, in a separate thread, for which `ack` waits. Raises the error of an earlier call."""
        self._hand_over()
        self._acks.check()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the partition to begin with. Rows of it that are acknowledged do not come again.

        What `ack_soon` has not done yet counts as not acknowledged: call `ack` before a checkpoint.
        """
        finished = self._read_to_end and not self._held and self._acks.idle
        return {"task": self._request.task, "partition": self._partition + 1 if finished else self._partition}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin where `state_dict` was taken; raises ConfigError for another task's state, or a loader in use."""
        if state.get("task") != self._request.task or not isinstance(state.get("partition"), int):
            raise ConfigError(
                f"{self._name}: cannot continue from {dict(state)}; it is not a state of this task's loader"
            )
        if self._ahead is not None:
            raise ConfigError(f"{self._name}: load_state_dict comes before the first iteration")
        self._partition = state["partition"] - 1

    def close(self) -> None:
        """Stop reading ahead and end an iteration in progress; idempotent. Does not wait for a parked fetch."""
        is_over = self._is_over
        self._closing.set()
        self.stopped = True
        self._acks.close()
        ahead, replica = self._ahead, self._replica
        # What is over on all ranks ends by itself. An abort beside its last broadcast can leave rank 0 in there for the
        # group's timeout: Gloo loses the error of a send whose receiver goes away as it begins.
        if is_over and ahead is not None:
            ahead.join(_JOIN_S)
        if replica is not None and replica.in_program_order:
            if not is_over:
                replica.abort()  # ranks of the replica that still read get an error
        elif replica is not None and replica.shares and ahead is not None and ahead.alive:
            replica.abort()
        if ahead is None:
            return
        ahead.close()
        # A parked fetch cannot be interrupted; its thread ends with it.
        if self._asking_since is None:
            ahead.join(_JOIN_S)

    def __getstate__(self) -> NoReturn:
        raise ConfigError(_WORKERS)

    @property
    def _name(self) -> str:
        return f"loader of {self._request.task}, partition {self._partition}"

    def _start_reading(self) -> None:
        if get_worker_info() is not None:
            raise ConfigError(_WORKERS)
        if self._rounds is not None or self._closing.is_set():
            return
        first, name, replica = self._partition + 1, f"prefetch-{self._request.task}", self._replica
        if replica is None or not replica.in_program_order:
            source = self._open_source(first)
            self._rounds = self._ahead = ReadAhead(
                source, depth=self._prefetch, name=name, closing=self._closing, arrived=self._arrived
            )
            return
        if self._client is not None:
            answers = self._iterate_wanted_answers(first)
            self._ahead = ReadAhead(
                answers, depth=self._prefetch, name=name, closing=self._closing, arrived=self._arrived
            )
        self._rounds = _without_deadlines(replica.relay(self._ahead))

    def _iterate_rounds(self, kept: list[Round] | None = None) -> Iterator[Round]:
        self._start_reading()
        if self._read_to_end and not self.next_partition():
            return
        while True:
            self._refuse_owed_put()
            item = self._next_item()
            if not isinstance(item, tuple):
                self._read_to_end = item is not None and item.reason is NoRowsReason.PARTITION_DONE
                self._is_over = not self._read_to_end or self._partition >= self._last
                self.stopped = self.stopped or not self._read_to_end
                return
            self._held.append(item[0])
            if kept is not None:
                kept.append(item)
            yield item

    def _next_item(self) -> Round | NoRows | None:
        if self._failure is not None:
            raise self._failure
        try:
            return None if self._rounds is None else next(self._rounds, None)
        except Exception as error:
            self._failure = error
            raise

    def _refuse_owed_put(self) -> None:
        if self._owes_put:
            num_rows = len(self._held[-1].rows)
            raise ConfigError(f"{self._name}: outputs of {num_rows} rows could not be put; put them again")

    def _note_yielded(self, granted: LeaseGrant, batch: PackedBatch) -> PackedBatch:
        self.largest_slice, self.round_partition = granted.largest_slice, granted.partition
        self._tokens = dict(zip(granted.rows, granted.tokens, strict=False))
        return batch

    def _hand_over(self) -> None:
        self._refuse_owed_put()
        self._acks.add_leases(self._held)
        self._held.clear()

    def _ack_lease(self, granted: LeaseGrant) -> None:
        if self._client is None:
            return
        if self._replica is not None and not self._replica.acks:
            # Otherwise a restarted controller would keep the lease for this client.
            self._client.data.forget_lease(granted)
        elif granted.rows:
            self._client.data.ack(granted, granted.rows)

    # In the read-ahead thread

    def _open_source(self, first: int) -> Iterator[Round | NoRows]:
        items: Iterable[Round | NoRows]
        if self._replica is not None and self._replica.shares:
            items = self._replica.relay(self._iterate_answers(first) if self._client is not None else None)
        else:
            items = self._iterate_answers(first)
        return _without_deadlines(items)

    def _iterate_wanted_answers(self, first: int) -> Iterator[Round | NoRows]:
        """As `_iterate_answers`; a deadline is of use only while the caller's thread waits, and the other ranks do."""
        for item in self._iterate_answers(first):
            ahead = self._ahead
            is_deadline = isinstance(item, NoRows) and item.reason is NoRowsReason.DEADLINE
            if not is_deadline or (ahead is not None and ahead.is_awaited):
                yield item

    def _iterate_answers(self, first: int) -> Iterator[Round | NoRows]:
        """Yield rounds, ends of partitions, a stop; also passed deadlines, so that a replica notices a dead rank."""
        assert self._client is not None
        partition, round_index = first, 0
        while partition <= self._last and not self._closing.is_set():
            answer = self._ask_for_round(self._client, partition, round_index)
            if isinstance(answer, LeaseGrant):
                batch = self._read_rows(self._client, answer)
                if batch is not None:
                    round_index += 1
                    yield answer, batch
                continue
            if answer.reason is NoRowsReason.DEADLINE:
                self._monitor.note_no_rows(answer)
            yield answer
            if answer.reason is NoRowsReason.PARTITION_DONE:
                partition, round_index = partition + 1, 0
            elif answer.reason is not NoRowsReason.DEADLINE:
                return

    def _ask_for_round(self, client: QueueClient, partition: int, round_index: int) -> LeaseGrant | NoRows:
        request = self._request
        what = f"{request.task}, rank {request.rank}: round {round_index} of partition {partition}"
        timeout_s = self._monitor.ask(what, request.timeout_s)
        request = replace(request, partition=partition, round_index=round_index, timeout_s=timeout_s)
        self.requests += 1
        self._asking_since = time.monotonic()
        try:
            return client.fetch_round(request)
        finally:
            self._asking_since = None

    def _read_rows(self, client: QueueClient, granted: LeaseGrant) -> PackedBatch | None:
        """Read a lease's rows; None when their unit is gone: the same round is then requested again."""
        self.requests += len(set(granted.units))
        try:
            batch = client.data.get(granted, self._columns) if granted.rows else _EMPTY
        except PeerRefused:
            raise
        except TransportError as error:
            self._monitor.note_unreadable(error)
            self._closing.wait(_RETRY_S)
            return None
        self._monitor.note_served()
        return batch
