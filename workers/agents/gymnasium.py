"""Gymnasium's environments whose observations and actions are text, as rollouts (extra `gymnasium`). Torch-free.

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
from workers.agents.api import Environment, Reply, Step, Task
from workers.agents.rendering import Message

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ConfigError(f"there is no package {error.name}; {pip_line('gymnasium')}") from error


class Episodes:
    """Tasks without an end: one environment, another seed for each (`data.source`)."""

    class Config(Settings):
        """Its options; other ones are those of `gymnasium.make`."""

        model_config = ConfigDict(extra="allow")
        env: str
        instruction: str = ""

    def __init__(self, env: str, instruction: str = "", **options: Any) -> None:
        """Args:
            env: id of the environment; `module:ID` imports the module that registers it.
            instruction: system message; "" for none.
            options: of `gymnasium.make`.

        Raises:
            ConfigError: it cannot be made.
        """
        self._task = {"env": env, "instruction": instruction, "options": options}
        try:
            gymnasium.make(env, disable_env_checker=True, **options).close()
        except Exception as error:  # the environment is a stranger's
            raise ConfigError(f"env: {env!r} cannot be made with {options}: {one_line(error)}") from error

    def task(self, seed: int, index: int) -> dict[str, Any]:
        """Return a row: `env`, `instruction`, `options`, and the seed of `reset`."""
        return {**self._task, "seed": random.Random(f"{seed} {index}").getrandbits(31)}


class TextEnvironment(Environment):
    """The environment of a row `{"env": ID, "seed": 3, "options": {...}, "instruction": "..."}`; all but `env` may be
    missing. A subclass may say in `action` what of a reply is the action."""

    def reset(self, task: Task) -> list[Message]:
        """Make the environment; its first observation is the user's first message."""
        # The checker wants of text that it be letters and digits.
        self._env = gymnasium.make(task["env"], disable_env_checker=True, **task.get("options", {}))
        observation, _ = self._env.reset(seed=task.get("seed"))
        rules = [{"role": "system", "content": task["instruction"]}] if task.get("instruction") else []
        return [*rules, {"role": "user", "content": self._text(observation)}]

    def step(self, reply: Reply) -> Step:
        """Act; the observation is the user's next message."""
        observation, reward, terminated, truncated, _ = self._env.step(self.action(reply))
        return self._text(observation), float(reward), bool(terminated or truncated)

    def action(self, reply: Reply) -> str:
        """Return what the environment gets: all that the policy said."""
        return reply.text.strip()

    def close(self) -> None:
        """Close the environment."""
        if hasattr(self, "_env"):
            self._env.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            kind, name = type(observation).__name__, self._env.spec.id if self._env.spec else "the environment"
            raise UserCodeFailed(f"{name}: an observation is {kind}, not text; wrap it so that it says what is seen")
        return observation
