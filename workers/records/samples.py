"""Prompts with responses and rewards, a few groups per step, for people to read: `samples/GANG.jsonl`.

The rollout writes them as responses are put, and so does the evaluation of held-out prompts; nothing reads them back. A
full disk or a missing directory costs samples, not the run.

Legend of shapes: A drawn tokens of a rollout.
"""

import contextlib
import itertools
import json
import logging
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncflow.json_lines import open_spare
from asyncflow.run_files import SAMPLES
from workers.rewards.scorer import ScoredResponse
from workers.rows.finished import FinishedRollout

logger = logging.getLogger(__name__)


class SampleLog:
    """Writes the responses of the first `shown` groups (`rollout.samples_per_step`) of each step that this instance
    generated.

    Args:
        groups_per_step: since group ids continue from step to step.
        tokenizer: for rollouts of several turns; None: do not show their tokens.
    """

    def __init__(
        self, run_dir: Path, gang: str, *, shown: int, groups_per_step: int, tokenizer: Any | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._file = open_spare(run_dir / SAMPLES / f"{gang}.jsonl", what="samples", loss="shows none")
        self._shown = shown
        self._groups_per_step = groups_per_step

    def write(self, rollout: FinishedRollout, scored: ScoredResponse, *, step: int, group: int) -> None:
        if group % self._groups_per_step >= self._shown or self._file.closed:
            return
        line: dict[str, Any] = {
            "step": step,
            "group": group,
            "index": rollout.index,
            "version": int(rollout.versions_A[0]) if len(rollout.versions_A) else None,
            "versions": version_spans(rollout.versions_A),
            "prompt": scored.prompt,
            "response": scored.response,
            "ground_truth": scored.ground_truth,
            "reward": None if scored.failure else scored.reward,
            "correct": scored.correct,
            "response_tokens": rollout.log_probs_A.numel(),
            "truncated": rollout.truncated,
        }
        if rollout.conversations:
            line |= {
                "conversations": list(rollout.conversations),
                "samples": [] if self._tokenizer is None else token_runs(rollout, self._tokenizer),
                "turns": rollout.turns,
                "tool_s": round(rollout.tool_s, 3),
                "metrics": dict(rollout.metrics),
            }
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning("samples: %s; this process shows no more", error)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes the buffer, which may fail, too
            self._file.close()


def version_spans(versions_A: Tensor) -> list[list[int]]:
    """Return [version, tokens] of each run of drawn tokens (int32 [A]) from the same weights, in response order."""
    versions, counts = versions_A.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    return [[version, count] for version, count in zip(versions.tolist(), counts.tolist(), strict=True)]


def token_runs(rollout: FinishedRollout, tokenizer: Any) -> list[list[tuple[int, str]]]:
    """Return, per sample, (mask, text) of each run of tokens with one mask (1: trained), special tokens visible."""
    runs: list[list[tuple[int, str]]] = []
    drawn = zip(rollout.response_mask_T.tolist(), rollout.tokens_T.tolist(), strict=True)
    for length in rollout.sample_lengths:
        found = []
        for bit, part in itertools.groupby(itertools.islice(drawn, length), key=itemgetter(0)):
            found.append((bit, str(tokenizer.decode([token for _, token in part]))))
        runs.append(found)
    return runs
