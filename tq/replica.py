"""One data-parallel replica: ranks that work on the same rows. Rank 0 fetches, one packed buffer is broadcast."""

import msgspec
import torch
import torch.distributed as dist

from tq.batch import PackedBatch
from tq.messages import Granted, NoRowsReason
from tq.wire import ColumnHeader, pack, unpack

_Item = tuple[Granted, PackedBatch] | NoRowsReason


class _Envelope(msgspec.Struct):
    granted: Granted | None
    reason: NoRowsReason | None
    columns: list[ColumnHeader]
    payload_bytes: int


class Replica:
    """A process group whose ranks share rows; all of them call `broadcast` in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """Args:
        group: ranks of the replica; its rank 0 fetches.
        device: where the group's backend wants its tensors; default the CPU.
        """
        self._group = group
        self._device = device or torch.device("cpu")

    @property
    def fetches(self) -> bool:
        """Whether this rank is the one that talks to the queue."""
        return self._group.rank() == 0

    def broadcast(self, item: _Item | None) -> _Item:
        """Give rank 0's item to every rank: lengths first, then one packed buffer (description and values).

        Args:
            item: on rank 0; ignored elsewhere.
        """
        size = torch.zeros(2, dtype=torch.int64)
        buffer = torch.empty(0, dtype=torch.uint8)
        if self.fetches:
            assert item is not None, "rank 0 of a replica has no item to share"
            buffer, size[0] = self._encode(item)
            size[1] = buffer.numel()
        size = self._send(size)
        if not self.fetches:
            buffer = torch.empty(int(size[1]), dtype=torch.uint8)
        buffer = self._send(buffer)
        if self.fetches:
            assert item is not None
            return item
        return self._decode(buffer, int(size[0]))

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        on_device = tensor.to(self._device)
        self._group.broadcast([on_device]).wait()
        return on_device.cpu()

    @staticmethod
    def _encode(item: _Item) -> tuple[torch.Tensor, int]:
        if isinstance(item, NoRowsReason):
            envelope, payload = _Envelope(None, item, [], 0), torch.empty(0, dtype=torch.uint8)
        else:
            headers, payload = pack(dict(item[1].columns))
            envelope = _Envelope(item[0], None, headers, payload.numel())
        meta = msgspec.msgpack.encode(envelope)
        aligned = meta.ljust(-(-len(meta) // 8) * 8, b"\0")
        return torch.cat([torch.frombuffer(bytearray(aligned), dtype=torch.uint8), payload]), len(meta)

    @staticmethod
    def _decode(buffer: torch.Tensor, meta_bytes: int) -> _Item:
        envelope = msgspec.msgpack.decode(buffer[:meta_bytes].numpy().tobytes(), type=_Envelope)
        if envelope.reason is not None:
            return envelope.reason
        assert envelope.granted is not None
        payload = buffer[-(-meta_bytes // 8) * 8 :]
        columns = unpack(envelope.columns, payload)
        return envelope.granted, PackedBatch(tuple(envelope.granted.rows), columns, tuple(envelope.granted.groups))
