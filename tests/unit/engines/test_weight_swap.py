"""A swap leaves nothing of the old weights behind: every generating engine must pass `assert_swap_is_clean`."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.engines.base import GenerateEngine, GenerateRequest, Generation, generate
from workers.engines.hf.engine import HfEngine
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

REQUESTS = [GenerateRequest(i, torch.arange(2, 6), seed=100 + i) for i in range(8)]


class StalePrefixEngine(HfEngine):
    """Keeps the state of prompts that it has seen, as a prefix cache does, and forgets to drop it at a swap."""

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        self._batch.forget_prompts = lambda: None  # type: ignore[method-assign]
        super().load_weights(weights, adopt=adopt)


def make_engine(kind: type[HfEngine], path: Path) -> HfEngine:
    sampling = SamplingConfig.model_validate({"max_response_tokens": 8, "batch_size": 64})
    return kind(path, ModelConfig(path=str(path)), sampling=sampling, device=torch.device("cpu"))


def log_probs(responses: Iterable[Generation]) -> Iterator[Tensor]:
    return (response.log_probs_R for response in sorted(responses, key=lambda response: response.index))


def assert_swap_is_clean(used: GenerateEngine, fresh: GenerateEngine, weights: Mapping[str, Tensor]) -> None:
    """After a swap, an engine that has answered these prompts before answers as one that never has.

    Args:
        used: loaded with other weights.
        fresh: has not generated.
        weights: to swap in.
    """
    list(generate(used, REQUESTS))
    used.load_weights(weights)
    fresh.load_weights(weights)
    for one, other in zip(log_probs(generate(used, REQUESTS)), log_probs(generate(fresh, REQUESTS)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture
def weights(model_dir: Path) -> dict[str, Tensor]:
    return load_file(model_dir / "model.safetensors")


def test_swap_drops_what_was_computed_with_the_old_weights(model_dir: Path, weights: dict[str, Tensor]) -> None:
    used = make_engine(HfEngine, model_dir)
    used.load_weights(weights)
    assert_swap_is_clean(used, make_engine(HfEngine, model_dir), {n: w * 1.5 for n, w in weights.items()})


def test_stale_prefix_would_be_caught(model_dir: Path, weights: dict[str, Tensor]) -> None:
    used = make_engine(StalePrefixEngine, model_dir)
    used.load_weights(weights)
    with pytest.raises(AssertionError):
        assert_swap_is_clean(used, make_engine(HfEngine, model_dir), {n: w * 1.5 for n, w in weights.items()})
