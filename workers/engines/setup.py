"""What an engine is made from: `Class(setup)`, for classes outside of the package; built-in ones have `of_run(setup)`.

    class MyEngine:                              # rollout.engine: my_module:MyEngine
        class Config(Settings): ...              # rollout.engine_options; leave it out: there are none
        def __init__(self, setup: EngineSetup) -> None: ...

What it must have besides is in `base`: `GenerateEngine`, `TrainEngine`, `FrozenEngine`. A `Config` may have a method
`check(run)`, which raises `ConfigError` for other settings of the run that do not fit: called before anything starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncflow.errors import ConfigError
from workers.data.model_files import max_positions
from workers.settings.engines import ActorConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig


@dataclass(frozen=True)
class EngineSetup:
    """Attributes:
    run: the resolved configuration.
    device: where the engine computes.
    options: of a class outside of the package: an instance of its `Config`.
    sampling: the rollout's, or an evaluation's, which differs.
    weights_dir: of a reference: holds its weights, as safetensors; None: the model's own.
    """

    run: RunConfig
    device: torch.device
    options: Any
    sampling: SamplingConfig
    weights_dir: Path | None = None

    @property
    def model_dir(self) -> Path:
        """The model's Hugging Face directory."""
        return Path(self.run.model.path)

    @property
    def actor(self) -> ActorConfig:
        """How the policy is trained, with the learning rate's schedule as it stands for the run."""
        return self.run.actor.for_run(self.run.steps, begins_after=self.run.critic_only_steps)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt of a call (tokens); those of later turns hold what came before.

        Raises:
            ConfigError: the model does not say how many positions it has.
        """
        if not self.run.rollout.is_own:
            return self.run.data.max_prompt_tokens
        context = longest_call(self.run, self.sampling)
        if context is None:
            raise ConfigError(
                "rollout.max_context_tokens: is 0, and the model's config.json names no number of positions; set it"
            )
        return context - self.sampling.max_response_tokens


def longest_call(run: RunConfig, sampling: SamplingConfig) -> int | None:
    """Return the longest prompt and reply together, of one turn of a user's rollout (tokens); None: no limit is known.

    Args:
        run: the resolved configuration.
        sampling: the rollout's, or an evaluation's.
    """
    limits = max_positions(Path(run.model.path)), run.vllm.max_model_len if sampling.engine == "vllm" else None
    return run.rollout.max_context_tokens or min((limit for limit in limits if limit is not None), default=None)
