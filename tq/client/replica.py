"""One data-parallel replica: ranks that train on the same rows. Rank 0 fetches; every rank gets one packed broadcast.

    rank 0: queue -> item ->+-> header 4 KiB (sizes; a small item whole) --> rank 1, 2, ...
                            '-> one buffer (description, then values), only if it did not fit

`relay` runs in the read-ahead thread of every rank, on a Gloo group that nothing else uses, so it overlaps with compute
and the order of the collectives is the same everywhere. What ends rank 0's fetching (a stop, the last partition, any
error) travels like an item: no rank waits for rows that will not come. A rank that dies breaks the group's pairs, so
the others' broadcast fails. int64 columns travel as narrow as their values allow.

With `ReplicaFetch.EACH` there is no broadcast: every rank (a pipeline stage that reads columns of its own, say) asks
for the same rounds and is granted the same leases, which rank 0 acknowledges.
"""

import struct
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow import errors
from asyncflow.decoding import msgpack_decoder
from asyncflow.device import abort_group
from asyncflow.errors import AsyncFlowError, TransportError
from asyncflow.transport.frame import Payload, aligned
from tq.columns import PackedBatch
from tq.config import ReplicaFetch
from tq.messages import LeaseGrant, NoRows
from tq.wire import ColumnHeader, describe, unpack

Round = tuple[LeaseGrant, PackedBatch]
"""One rank's lease in a round, and its rows."""

HEADER_BYTES = 4096
_SIZES = struct.Struct("<qq")


class Failure(msgspec.Struct):
    """An error of rank 0: its class, by name, and its text."""

    kind: str
    text: str


class _Envelope(msgspec.Struct):
    """What travels; everything absent: rank 0 has nothing more to give."""

    answer: LeaseGrant | NoRows | None = None
    failure: Failure | None = None
    columns: list[ColumnHeader] = []


class Replica:
    """The ranks that share rows. Its collectives belong to one thread per rank; `abort` to any."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str = "replica",
        *,
        fetch: ReplicaFetch | None = None,
    ) -> None:
        """Args:
        group: of Gloo, the replica's ranks, for nothing but this (`asyncflow.device.connect_group`): rows lie in host
            memory, and a communicator of the device would wait beside the model's. With `EACH` only its ranks matter.
        name: for messages.
        fetch: which ranks ask the queue; None: what the config of the loader's client says (`tq.replica_fetch`).
        """
        self.name = name
        self.fetch = fetch
        """Which ranks ask the queue; None until a loader has decided it."""
        self._group = group
        self._outgoing = torch.empty(0, dtype=torch.uint8)
        self._aborted = False

    @property
    def shares(self) -> bool:
        """Whether rank 0's rows are broadcast."""
        assert self.fetch is not None, "neither the caller nor a loader decided which ranks fetch"
        return self.fetch is ReplicaFetch.BROADCAST and self._group.size() > 1

    @property
    def fetches(self) -> bool:
        """Whether this rank talks to the queue."""
        assert self.fetch is not None, "neither the caller nor a loader decided which ranks fetch"
        return self.fetch is ReplicaFetch.EACH or self._group.rank() == 0

    @property
    def acks(self) -> bool:
        """Whether this rank acknowledges the replica's leases."""
        return self._group.rank() == 0

    def relay(self, items: Iterator[Round | NoRows] | None) -> Iterator[Round | NoRows]:
        """Yield rank 0's items on every rank; all ranks iterate, in one thread each.

        Args:
            items: on rank 0; None elsewhere.

        Raises:
            TransportError: a rank of the replica is gone.
            Exception: what `items` raised on rank 0; the same error on the other ranks.
        """
        if items is None:
            while (item := self._receive()) is not None:
                yield item
            return
        more = True
        while more:
            try:
                item = next(items, None)
            except Exception as error:  # the other ranks wait for this: they raise it too
                self._share(_Envelope(failure=Failure(type(error).__name__, str(error))))
                raise
            more = item is not None
            self._give(item)
            if item is not None:
                yield item

    def abort(self) -> None:
        """End the group, from any thread: calls that wait in it raise `TransportError`, here and on other ranks."""
        if not self._aborted:
            self._aborted = True
            abort_group(self._group)

    def _give(self, item: Round | NoRows | None) -> None:
        if isinstance(item, tuple):
            headers, payload = describe(item[1].columns, narrow=True)
            self._share(_Envelope(item[0], columns=headers), payload)
        else:
            self._share(_Envelope(item))

    def _share(self, envelope: _Envelope, payload: Payload | None = None) -> None:
        payload = payload or Payload([])
        meta = msgspec.msgpack.encode(envelope)
        total = aligned(len(meta)) + payload.num_bytes
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        header[: _SIZES.size] = torch.frombuffer(
            bytearray(_SIZES.pack(len(meta), payload.num_bytes)), dtype=torch.uint8
        )
        body = header[_SIZES.size :][:total] if _fits(total) else self._room(total)
        body[: len(meta)] = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
        payload.write(body[aligned(len(meta)) :])
        self._broadcast(header)
        if not _fits(total):
            self._broadcast(body)

    def _receive(self) -> Round | NoRows | None:
        header = self._broadcast(torch.empty(HEADER_BYTES, dtype=torch.uint8))
        meta_bytes, payload_bytes = _SIZES.unpack(header[: _SIZES.size].numpy().tobytes())
        total = aligned(meta_bytes) + payload_bytes
        fits = _fits(total)
        body = header[_SIZES.size :][:total] if fits else self._broadcast(torch.empty(total, dtype=torch.uint8))
        envelope = msgpack_decoder(_Envelope).decode(body[:meta_bytes].numpy().tobytes())
        if envelope.failure is not None:
            raise self._error(envelope.failure)
        granted = envelope.answer
        if not isinstance(granted, LeaseGrant):
            return granted
        columns = unpack(envelope.columns, body[aligned(meta_bytes) :])
        return granted, PackedBatch(tuple(granted.rows), columns, tuple(granted.groups))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank."""
        if self._aborted:
            raise TransportError(f"{self.name}: closed")
        try:
            self._group.broadcast([tensor]).wait()
            return tensor
        except RuntimeError as error:
            self.abort()  # other ranks do not notice by themselves: a broadcast does not touch every pair
            raise TransportError(
                f"{self.name}: a broadcast among its {self._group.size()} ranks failed at rank {self._group.rank()}: "
                f"one of them died or left"
            ) from error

    def _room(self, num_bytes: int) -> Tensor:
        """Memory that is sent from again and again: fresh pages would cost as much as the copy."""
        if self._outgoing.numel() < num_bytes:
            self._outgoing = torch.empty(num_bytes, dtype=torch.uint8)
        return self._outgoing[:num_bytes]

    def _error(self, failure: Failure) -> AsyncFlowError:
        kind = getattr(errors, failure.kind, TransportError)
        text = failure.text if kind.__name__ == failure.kind else f"{failure.kind}: {failure.text}"
        error: AsyncFlowError = kind(f"{text} (at rank 0 of {self.name})")
        return error


def _fits(num_bytes: int) -> bool:
    return _SIZES.size + num_bytes <= HEADER_BYTES
