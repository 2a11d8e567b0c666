"""`ledger.jsonl`: one line per trained (step, group), the proof of what was trained once."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from tq.batch import PackedBatch


def ledger_lines(batch: PackedBatch, *, step: int, lineage: int, time_s: float) -> list[dict[str, Any]]:
    """Return one line per group of a trained batch.

    Args:
        batch: columns `prompts`, `responses`, `versions`, `epochs`; whole groups.
        step, lineage: that trained it.
        time_s: seconds since the command started.
    """
    rows: dict[int, list[int]] = {}
    for k, group in enumerate(batch.groups):
        rows.setdefault(group, []).append(k)
    prompts, responses = batch["prompts"].rows(), batch["responses"].rows()
    versions = [(int(row.min()), int(row.max())) for row in batch["versions"].rows()]
    epochs = batch["epochs"].values
    lines = []
    for group, positions in rows.items():
        digest = xxhash.xxh3_64()
        for k in positions:
            digest.update(prompts[k].contiguous().numpy().data)
            digest.update(responses[k].contiguous().numpy().data)
        oldest = min(versions[k][0] for k in positions)
        lines.append(
            {
                "lineage": lineage,
                "step": step,
                "group": group,
                "epoch": int(epochs[positions[0]]),
                "indices": [batch.indices[k] for k in positions],
                "versions": [oldest, max(versions[k][1] for k in positions)],
                "staleness": step - 1 - oldest,
                "token_hash": digest.hexdigest(),
                "time_s": round(time_s, 3),
            }
        )
    return lines


class JsonLines:
    """Appends JSON objects to a file, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines with one write, and hand them to the operating system."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def sync(self) -> None:
        """Make everything written durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make durable and close; idempotent."""
        if not self._file.closed:
            self.sync()
            self._file.close()
