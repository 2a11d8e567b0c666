"""Gymnasium environments with text observations and actions, as rollouts (extra `gymnasium`). Torch-free.

    data:
      source: workers.agents.gymnasium:Episodes
      options: {env: "my_games:Maze-v0", size: 5}       # the rest goes to gymnasium.make
    rollout:
      function: workers.agents.gymnasium:TextEnvironment

https://gymnasium.farama.org (MIT).
"""

import random
from typing import Any

from pydantic import ConfigDict

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.extras import pip_line
from asyncflow.settings import Settings
from workers.agents.api import Environment, Step, Task
from workers.agents.turns import Message, Reply

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ConfigError(f"the package {error.name} is not installed; {pip_line('gymnasium')}") from error


class Episodes:
    """Endless tasks for `data.source`: one environment, a different seed for each."""

    class Config(Settings):
        """Its options; any others go to `gymnasium.make`."""

        model_config = ConfigDict(extra="allow")
        env: str
        instruction: str = ""

    def __init__(self, env: str, instruction: str = "", **options: Any) -> None:
        """Args:
            env: environment id; `module:ID` imports the module that registers it.
            instruction: system message, or "" for none.

        Raises ConfigError if the environment cannot be made.
        """
        self._task = {"env": env, "instruction": instruction, "options": options}
        try:
            gymnasium.make(env, disable_env_checker=True, **options).close()
        except Exception as error:  # the environment may raise anything
            raise ConfigError(f"env: {env!r} cannot be made with {options}: {one_line(error)}") from error

    def task(self, seed: int, index: int) -> dict[str, Any]:
        """Return a row: `env`, `instruction`, `options`, and the seed for `reset`."""
        return {**self._task, "seed": random.Random(f"{seed} {index}").getrandbits(31)}


class TextEnvironment(Environment):
    """The environment of a row `{"env": ID, "seed": 3, "options": {...}, "instruction": "..."}`; only `env` is
    required. A subclass may override `action` to pick the action out of a reply."""

    def reset(self, task: Task) -> list[Message]:
        """Make the environment; its first observation becomes the user's first message."""
        # The checker accepts only letters and digits as text.
        self._env = gymnasium.make(task["env"], disable_env_checker=True, **task.get("options", {}))
        observation, _ = self._env.reset(seed=task.get("seed"))
        rules = [{"role": "system", "content": task["instruction"]}] if task.get("instruction") else []
        return [*rules, {"role": "user", "content": self._check_text(observation)}]

    def step(self, reply: Reply) -> Step:
        """Act; the observation becomes the user's next message."""
        observation, reward, terminated, truncated, _ = self._env.step(self.action(reply))
        return self._check_text(observation), float(reward), bool(terminated or truncated)

    def action(self, reply: Reply) -> str:
        """Return the environment's action: by default the whole reply."""
        return reply.text.strip()

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()

    def _check_text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            kind, name = type(observation).__name__, self._env.spec.id if self._env.spec else "the environment"
            raise UserCodeFailed(
                f"{name}: an observation is {kind}, not text; wrap the environment so that observations are text"
            )
        return observation
