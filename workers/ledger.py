"""`ledger.jsonl`: one line per trained (step, group), the proof of what was trained once.

The actor makes the lines of its rank's rows; `workers.records` writes those of all ranks. Never reads a ledger.
"""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from asyncflow.errors import AsyncFlowError
from tq.batch import Column, PackedBatch


def ledger_lines(
    batch: PackedBatch, *, step: int, admitted_step: int, lineage: int, time_s: float
) -> list[dict[str, Any]]:
    """Return one line per group of a trained batch.

    Args:
        batch: columns `prompts`, `responses`, `versions`, `epochs`; whole groups.
        step, lineage: that trained it.
        admitted_step: that it was admitted for; another one only with `schedule.fill: first_ready`.
        time_s: seconds since the command started.
    Returns:
        JSON objects; `token_hash` is xxh3-64 (hex) over each row's two lengths (int32), prompt and response (int64).
    """
    rows: dict[int, list[int]] = {}
    for k, group in enumerate(batch.groups):
        rows.setdefault(group, []).append(k)
    hashed = _hashed_bytes(batch)
    oldest, newest = (part.tolist() for part in batch["versions"].extremes())
    epochs = batch["epochs"].values
    lines = []
    for group, positions in rows.items():
        first = min(oldest[k] for k in positions)
        lines.append(
            {
                "lineage": lineage,
                "step": step,
                "admitted_step": admitted_step,
                "group": group,
                "epoch": int(epochs[positions[0]]),
                "indices": [batch.indices[k] for k in positions],
                "versions": [first, max(newest[k] for k in positions)],
                "staleness": step - 1 - first,
                "token_hash": xxhash.xxh3_64_hexdigest(b"".join(hashed[k] for k in positions)),
                "time_s": round(time_s, 3),
            }
        )
    return lines


def _hashed_bytes(batch: PackedBatch) -> list[bytes]:
    """Return what is hashed of each row: without the lengths, moving a token across the border would go unseen."""
    prompts, responses = batch["prompts"], batch["responses"]
    pairs = torch.stack([prompts.lengths, responses.lengths], dim=1).flatten()
    lengths = Column(pairs, torch.full_like(prompts.lengths, 2))
    return [b"".join(parts) for parts in zip(*map(_row_bytes, (lengths, prompts, responses)), strict=True)]


def _row_bytes(column: Column) -> list[bytes]:
    data = column.values.numpy().tobytes()
    ends = (column.lengths.cumsum(0) * column.values.itemsize).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_staleness(lines: Sequence[dict[str, Any]], *, bound: int) -> None:
    """Check the schedule's promise for every group that is about to be trained.

    Raises:
        AsyncFlowError: a group is older than `bound`, or newer than the step that trains it.
    """
    for line in lines:
        if not 0 <= line["staleness"] <= bound:
            raise AsyncFlowError(
                f"group {line['group']} of step {line['step']} was generated with weights of steps {line['versions']}: "
                f"staleness {line['staleness']} is outside 0..{bound}; this is a fault of AsyncFlow, please report it"
            )
