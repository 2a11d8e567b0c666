"""Rows of a storm: every byte follows from the row's number, and a digest of it travels as a column of its own.

Row numbers are the producer's slot times `SLOT`, plus a count: so each producer knows which lost rows are its own.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

import tq
from tq.columns import Column, column_of

SLOT = 10**9
ROWS_PER_PARTITION = 1024
INPUTS = ("payload", "digest", "number")
OUTPUTS = ("score", "score_check")
_LONGEST = 4096


def partition_of(row: int) -> int:
    """Return the partition of a row."""
    return 1 + row % SLOT // ROWS_PER_PARTITION


def columns_of(rows: Sequence[int]) -> dict[str, Column]:
    """Return the first columns of rows."""
    payloads = [_payload(row) for row in rows]
    return {
        "payload": column_of([torch.from_numpy(payload) for payload in payloads]),
        "digest": column_of(torch.tensor([_digest(payload) for payload in payloads])),
        "number": column_of(torch.tensor(list(rows))),
    }


def damaged(batch: tq.PackedBatch) -> list[int]:
    """Return the rows of a batch that are not what their producer put."""
    payloads = batch["payload"].rows()
    digests, numbers = batch["digest"].values.tolist(), batch["number"].values.tolist()
    return [
        row
        for row, payload, digest, number in zip(batch.indices, payloads, digests, numbers, strict=True)
        if number != row or _digest(payload.numpy()) != digest or digest != _digest(_payload(row))
    ]


def scores_of(rows: Sequence[int], token: int) -> dict[str, Column]:
    """Return the outputs of the scoring task: two columns that fit only if one lease wrote both."""
    return {
        "score": column_of(torch.full((len(rows),), token)),
        "score_check": column_of(torch.tensor([token ^ row for row in rows])),
    }


def scored_by(batch: tq.PackedBatch) -> tuple[dict[int, int], list[int]]:
    """Return (row -> token that wrote its score, rows whose two outputs do not fit)."""
    tokens, checks = batch["score"].values.tolist(), batch["score_check"].values.tolist()
    mixed = [row for row, token, check in zip(batch.indices, tokens, checks, strict=True) if token ^ row != check]
    return dict(zip(batch.indices, tokens, strict=True)), mixed


def _payload(row: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    random = np.random.default_rng(row)
    return random.integers(0, 256, int(random.integers(1, _LONGEST)), dtype=np.uint8)


def _digest(payload: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> int:
    return int(np.uint64(xxhash.xxh3_64_intdigest(payload.tobytes())).astype(np.int64))
