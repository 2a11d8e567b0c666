"""`ledger.jsonl`: one line per trained (step, group) and per replaced group, the proof that each was trained once.

The actor makes the lines of its rank's rows; `workers.records.step_record` writes those of all ranks.
`workers.records.ledger_file` reads ledgers and explains the fields.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from asyncflow.errors import AsyncFlowError
from tq.columns import Column, PackedBatch
from tq.policies import StalenessRule
from tq.refill import Refill


def ledger_lines(
    batch: PackedBatch, *, step: int, admitted_step: int, lineage: int, time_s: float, with_rewards: bool = False
) -> list[dict[str, Any]]:
    """Return one JSON object per group of a trained batch; see `workers.records.ledger_file.TrainedLine`.

    Args:
        batch: columns `prompts`, `epochs`, the sample columns and, unless the data hold what is trained (SFT),
            `versions`; whole groups.
        admitted_step: differs from `step` only with `schedule.fill: first_ready`.
        time_s: seconds since the command started.
        with_rewards: include column `rewards`, for a sampler; null: the reward failed.
    """
    rewards = batch["rewards"].values.tolist() if with_rewards else []
    groups, prompts = _positions(batch), _row_bytes(batch["prompts"])
    hashes = _token_hashes(batch, groups)
    oldest, newest, drew_N = [], [], [False] * len(batch)
    if "versions" in batch.columns:
        oldest, newest = torch.stack(batch["versions"].extremes()).tolist()
        drew_N = (batch["versions"].lengths > 0).tolist()
    epochs = batch["epochs"].values
    lines = []
    for group, positions in groups.items():
        drew = [k for k in positions if drew_N[k]]
        # A group without drawn tokens is not stale.
        first, last = (min(oldest[k] for k in drew), max(newest[k] for k in drew)) if drew else (step - 1, step - 1)
        lines.append(
            {
                "lineage": lineage,
                "step": step,
                "admitted_step": admitted_step,
                "group": group,
                "epoch": int(epochs[positions[0]]),
                "indices": [batch.indices[k] for k in positions],
                "versions": [first, last],
                "staleness": StalenessRule.age(step, first),
                "prompt_hash": xxhash.xxh3_64_hexdigest(prompts[positions[0]]),
                "token_hash": hashes[group],
                "time_s": round(time_s, 3),
                **({"rewards": [_known(rewards[k]) for k in positions]} if with_rewards else {}),
            }
        )
    return lines


def _known(reward: float) -> float | None:
    return reward if math.isfinite(reward) else None


def refill_lines(refills: Sequence[Refill], *, step: int, lineage: int, time_s: float) -> list[dict[str, Any]]:
    """Return one JSON object per replaced group; see `workers.records.ledger_file.DeadLetterLine` and `FilteredLine`.

    `step` is the finished step, since a resume from an earlier one forgets them; `time_s` counts from the command's
    start.
    """
    return [
        {
            "lineage": lineage,
            # Not the step that it was admitted for: replacements shift the ids behind them, so a ledger cut at a resume
            # must keep all lines known by then.
            "step": step,
            "admitted_step": refill.step,
            "group": refill.replaced,
            "filtered" if refill.cause.filtered else "dead_letter": True,
            "replaced_by": refill.group,
            "task": refill.cause.task,
            **({} if refill.cause.filtered else {"deliveries": refill.cause.deliveries}),
            "time_s": round(time_s, 3),
        }
        for refill in refills
    ]


def token_hashes(batch: PackedBatch) -> dict[int, str]:
    """Return group -> token hash of its ledger line; `batch`: the sample columns, whole groups."""
    return _token_hashes(batch, _positions(batch))


def prompt_hash(tokens_P: Tensor) -> str:
    """Return the prompt hash of a ledger line, from the prompt's tokens: int64 [P]."""
    return str(xxhash.xxh3_64_hexdigest(tokens_P.numpy().tobytes()))


def _token_hashes(batch: PackedBatch, groups: dict[int, list[int]]) -> dict[int, str]:
    # Hash lengths and masks, too: otherwise moving the border of a sample or a turn would go unnoticed.
    rows = list(zip(*(_row_bytes(batch[name]) for name in ("sample_lengths", "response_mask", "tokens")), strict=True))
    return {
        group: str(xxhash.xxh3_64_hexdigest(b"".join([part for k in positions for part in rows[k]])))
        for group, positions in groups.items()
    }


def _positions(batch: PackedBatch) -> dict[int, list[int]]:
    """Return group -> positions of its rows in the batch, ordered by row index, not by arrival."""
    found: dict[int, list[int]] = {}
    for k in sorted(range(len(batch)), key=batch.indices.__getitem__):
        found.setdefault(batch.groups[k], []).append(k)
    return found


def _row_bytes(column: Column) -> list[bytes]:
    data = column.values.numpy().tobytes()
    ends = (column.lengths.cumsum(0) * column.values.itemsize).tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_staleness(batch: PackedBatch, *, step: int, allowed: StalenessRule) -> None:
    """Check the schedule's promise for every token about to be trained. Raises AsyncFlowError if one is older, or newer
    than the weights at the start of the step."""
    versions = batch["versions"]
    oldest, newest = allowed.oldest_version(step), step - 1
    wrong_A = (versions.values < oldest) | (versions.values > newest)
    if not bool(wrong_A.any()):
        return
    token, number = int(wrong_A.nonzero()[0]), int(wrong_A.sum())
    ends_N = versions.lengths.long().cumsum(0)
    row = int(torch.searchsorted(ends_N, token, right=True))
    place = token - int(ends_N[row] - versions.lengths[row])
    group = f" of group {batch.groups[row]}" if batch.groups else ""
    raise AsyncFlowError(
        f"step {step}: drawn token {place} of row {batch.indices[row]}{group} is of weights of step "
        f"{int(versions.values[token])}, outside {oldest}..{newest} (staleness 0..{allowed.bound}; {number} of "
        f"{len(versions.values)} tokens are); this is a fault of AsyncFlow, please report it"
    )
