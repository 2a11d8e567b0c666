"""Prompts with their answers and rewards, a few groups of every step, for a person to read: `samples/GANG.jsonl`.

Written by the rollout as answers are put; nothing reads it back.
"""

import json
from pathlib import Path

from workers.config import RunConfig
from workers.engines.base import Generation
from workers.rewards.scorer import ScoredAnswer


class SampleLog:
    """Writes the answers of the first `rollout.samples_per_step` groups of each step that this instance generated."""

    def __init__(self, run_dir: Path, gang: str, config: RunConfig) -> None:
        self._file = (run_dir / "samples" / f"{gang}.jsonl").open("a", encoding="utf-8")
        self._batch = config.schedule.rollout_batch_size
        self._per_step = config.rollout.samples_per_step

    def write(self, generation: Generation, scored: ScoredAnswer, *, step: int, group: int) -> None:
        """Write one answer, if its group is among those shown.

        Args:
            generation, scored: the answer.
            step, group: that it belongs to.
        """
        if group % self._batch >= self._per_step:
            return
        line = {
            "step": step,
            "group": group,
            "index": generation.index,
            "version": int(generation.versions_R[0]),
            "prompt": scored.prompt,
            "response": scored.response,
            "answer": scored.answer,
            "reward": scored.reward,
            "correct": scored.correct,
            "response_tokens": generation.response_R.numel(),
            "truncated": generation.truncated,
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
