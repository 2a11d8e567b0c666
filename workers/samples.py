"""Prompts with their answers and rewards, a few groups of every step, for a person to read: `samples/GANG.jsonl`."""

import json
from pathlib import Path

from workers.config import RunConfig
from workers.rewards.scorer import ScoredAnswer


class SampleLog:
    """Writes the answers of the first `rollout.samples_per_step` groups of each step that this instance generated."""

    def __init__(self, run_dir: Path, gang: str, config: RunConfig) -> None:
        self._file = (run_dir / "samples" / f"{gang}.jsonl").open("a")
        self._batch = config.schedule.rollout_batch_size
        self._per_step = config.rollout.samples_per_step

    def write(
        self,
        *,
        step: int,
        group: int,
        index: int,
        version: int,
        scored: ScoredAnswer,
        num_tokens: int,
        truncated: bool,
    ) -> None:
        """Write one answer, if its group is among those shown."""
        if group % self._batch >= self._per_step:
            return
        line = {
            "step": step,
            "group": group,
            "index": index,
            "version": version,
            "prompt": scored.prompt,
            "response": scored.response,
            "answer": scored.answer,
            "reward": scored.reward,
            "correct": scored.correct,
            "response_tokens": num_tokens,
            "truncated": truncated,
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
