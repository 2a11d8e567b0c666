"""Puzzles of the package reasoning-gym: tasks without an end, scored by it (extra `reasoning-gym`). Torch-free.

    data:
      source: workers.agents.reasoning_gym:Puzzles
      options: {datasets: {basic_arithmetic: {max_terms: 2}, leg_counting: {}}}
    rollout:
      function: workers.agents.reasoning_gym:Puzzle

https://github.com/open-thought/reasoning-gym (Apache-2.0).
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from asyncflow.errors import ConfigError, one_line
from asyncflow.extras import pip_line
from asyncflow.settings import Settings
from workers.agents.api import Environment, Reply, Step, Task

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ModuleNotFoundError as error:
    raise ConfigError(f"there is no package {error.name}; {pip_line('reasoning-gym')}") from error

INSTRUCTION = "{question}\nGive your final answer between <answer> and </answer>."


class Puzzles:
    """Tasks of several data sets, by turns (`data.source`)."""

    class Config(Settings):
        """Its options."""

        datasets: dict[str, dict[str, Any]]
        instruction: str = INSTRUCTION

    def __init__(self, datasets: Mapping[str, Mapping[str, Any]], instruction: str = INSTRUCTION) -> None:
        """Args:
            datasets: name -> its options, as `reasoning_gym.create_dataset` takes them.
            instruction: what the policy is asked; `{question}` stands for the puzzle.

        Raises:
            ConfigError: there is none, or one cannot be made.
        """
        if not datasets:
            raise ConfigError("datasets: is empty; name one of reasoning-gym's, e.g. {basic_arithmetic: {}}")
        self._datasets = list(datasets.items())
        self._instruction = instruction
        for name, options in self._datasets:
            try:
                _entry(name, json.dumps(options), 0)
            except Exception as error:  # the package raises assertions as well
                raise ConfigError(f"datasets.{name}: {one_line(error)}") from error

    def task(self, seed: int, index: int) -> dict[str, Any]:
        """Return a row: `prompt`, `answer`, and what makes the same puzzle again."""
        turn, which = divmod(index, len(self._datasets))
        name, options = self._datasets[which]
        made = {"dataset": name, "options": dict(options), "seed": seed + turn}
        _, entry = _entry(name, json.dumps(options), seed + turn)
        question = self._instruction.replace("{question}", entry["question"])
        return {"prompt": question, "answer": str(entry["answer"]), **made}


class Puzzle(Environment):
    """One question and one reply; the reward is `score_answer` of what stands in the last `<answer>` of it, or of all
    of it."""

    def reset(self, task: Task) -> str:
        """Ask."""
        self._task = task
        return str(task["prompt"])

    def step(self, reply: Reply) -> Step:
        """Score."""
        # Made once more: rows are JSON, which has no tuples, and data sets compare what they stored.
        dataset, entry = _entry(self._task["dataset"], json.dumps(self._task["options"]), self._task["seed"])
        answer = extract_answer(reply.text)
        return "", float(dataset.score_answer(reply.text.strip() if answer is None else answer, entry)), True


@lru_cache(maxsize=1024)
def _entry(name: str, options: str, seed: int) -> tuple[Any, Any]:
    """Return a data set of one puzzle, and it."""
    dataset = reasoning_gym.create_dataset(name, **json.loads(options), seed=seed, size=1)
    return dataset, dataset[0]
