"""Part `wire`: bytes of whole messages against bytes of the values that they carry, next to padding."""

from typing import Any

import msgspec

from asyncflow.transport.frame import FRAME_BYTES, ROOM_BYTES, segments
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.workload import MicroBatch, micro_batches
from tq.columns import Column
from tq.messages import Columns, PutRows
from tq.wire import describe

_NUM_ROWS = 4096
_MICRO_BATCH = 64


def run(settings: Settings) -> Result:
    """Count frames, descriptions, lengths and values of puts and of the answers to gets."""
    batches = list(micro_batches(_NUM_ROWS, _MICRO_BATCH))
    values = sum(batch.num_bytes for batch in batches)
    put, get = (sum(_message_bytes(batch, kind, narrow=False) for batch in batches) for kind in ("put", "get"))
    narrow = sum(_message_bytes(batch, "put", narrow=True) for batch in batches)
    padded = sum(batch.padded_bytes for batch in batches)
    ratio = max(put, get) / values
    settings.say(
        f"wire: {ratio:.4f} of the values' bytes, {narrow / values:.2f} with narrowing; padding: {padded / values:.2f}"
    )
    return Result(
        {"wire_bytes_vs_payload": ratio},
        {
            "wire": {
                "micro_batch": _MICRO_BATCH,
                "value_bytes": values,
                "put": put / values,
                "get": get / values,
                "put_narrow": narrow / values,
                "padded": padded / values,
            }
        },
    )


def _message_bytes(batch: MicroBatch, kind: str, *, narrow: bool) -> int:
    columns = {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
    headers, payload = describe(columns, narrow=narrow)
    rows = list(range(10**6, 10**6 + _MICRO_BATCH))
    message: Any = PutRows(1, rows, rows, headers) if kind == "put" else Columns(headers)
    body = len(msgspec.msgpack.encode(message)) + 8 * len(segments(payload))
    outside: int = (body if body > ROOM_BYTES else 0) + payload.num_bytes
    return FRAME_BYTES + outside
