"""Puzzles of the package reasoning-gym: endless tasks, which the package also scores (extra `reasoning-gym`).
Torch-free.

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
from workers.agents.api import Environment, Step, Task
from workers.agents.turns import Reply

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ModuleNotFoundError as error:
    raise ConfigError(f"the package {error.name} is not installed; {pip_line('reasoning-gym')}") from error

INSTRUCTION = "{question}\nGive your final answer between <answer> and </answer>."


class Puzzles:
    """Tasks of several data sets in turn (`data.source`)."""

    class Config(Settings):
        datasets: dict[str, dict[str, Any]]
        instruction: str = INSTRUCTION

    def __init__(self, datasets: Mapping[str, Mapping[str, Any]], instruction: str = INSTRUCTION) -> None:
        """Args:
            datasets: name -> options of `reasoning_gym.create_dataset`.
            instruction: the prompt; `{question}` stands for the puzzle.

        Raises ConfigError if there is no data set, or one cannot be made.
        """
        if not datasets:
            raise ConfigError("datasets: is empty; name one of reasoning-gym's, e.g. {basic_arithmetic: {}}")
        self._datasets = list(datasets.items())
        self._instruction = instruction
        for name, options in self._datasets:
            try:
                _entry(name, json.dumps(options), 0)
            except Exception as error:  # the package also raises assertion errors
                raise ConfigError(f"datasets.{name}: {one_line(error)}") from error

    def task(self, seed: int, index: int) -> dict[str, Any]:
        """Return a row: `prompt`, `answer`, and what is needed to recreate the puzzle."""
        turn, which = divmod(index, len(self._datasets))
        name, options = self._datasets[which]
        made = {"dataset": name, "options": dict(options), "seed": seed + turn}
        _, entry = _entry(name, json.dumps(options), seed + turn)
        question = self._instruction.replace("{question}", entry["question"])
        return {"prompt": question, "answer": str(entry["answer"]), **made}


class Puzzle(Environment):
    """One question and one reply; the reward is `score_answer` of the text in its last `<answer>`, or of the whole
    reply."""

    def reset(self, task: Task) -> str:
        self._task = task
        return str(task["prompt"])

    def step(self, reply: Reply) -> Step:
        # Recreate the entry: rows are JSON, which has no tuples, and data sets compare with what they stored.
        dataset, entry = _entry(self._task["dataset"], json.dumps(self._task["options"]), self._task["seed"])
        answer = extract_answer(reply.text)
        return "", float(dataset.score_answer(reply.text.strip() if answer is None else answer, entry)), True


@lru_cache(maxsize=1024)
def _entry(name: str, options: str, seed: int) -> tuple[Any, Any]:
    """Return (data set of one puzzle, that puzzle)."""
    dataset = reasoning_gym.create_dataset(name, **json.loads(options), seed=seed, size=1)
    return dataset, dataset[0]
