"""Plain PyTorch: one process, one sample after another, transformers' own attention, AdamW, clipping.

Legend of shapes: R tokens of one response.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from asyncflow.testing import training_samples as samples
from workers.engines.lora import PREFIX, A, adapter_targets, initial_a
from workers.settings.lora import LoraConfig


@dataclass(frozen=True)
class Plain:
    """A model's results before and after the suite's updates."""

    log_probs: list[Tensor]  # float64, of every sample's response
    trained_log_probs: list[Tensor]  # the same after the updates
    updates: list[tuple[float, float]]  # (gradient norm, learning rate) of each
    weights: dict[str, Tensor]  # after the updates, an adapter merged, by Hugging Face name; tied ones once

    @staticmethod
    @lru_cache
    def of(model_dir: Path, lora: LoraConfig | None = None) -> "Plain":
        before = _load(model_dir, torch.float64)
        model = _load(model_dir, torch.float32)
        adapted = [] if lora is None else _add_adapter(model, lora)
        actor = samples.ACTOR
        optimizer = torch.optim.AdamW(decay_groups(model, actor.weight_decay), betas=actor.betas, eps=actor.eps)
        updates = []
        for number in range(samples.UPDATES):
            lr = actor.lr * min(1.0, (number + 1) / actor.lr_warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            for prompt, response in samples.samples():
                if len(response):
                    log_probs_R = _log_probs(model, prompt, response)
                    (samples.loss(log_probs_R, log_probs_R) * samples.SCALE).backward()  # type: ignore[no-untyped-call]
            assert actor.grad_clip is not None
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), actor.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            updates.append((float(norm), lr))
        for layer in adapted:
            parametrize.remove_parametrizations(layer, "weight")  # merges
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return Plain(_all_log_probs(before), _all_log_probs(model.double()), updates, weights)


class _Change(nn.Module):
    """W + scaling x B A, as a parametrization of W; B begins at 0."""

    def __init__(self, a: Tensor, outputs: int, scaling: float) -> None:
        super().__init__()
        self.a, self.b, self.scaling = nn.Parameter(a), nn.Parameter(torch.zeros(outputs, len(a))), scaling

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scaling * (self.b @ self.a)


def _add_adapter(model: Any, lora: LoraConfig) -> list[nn.Module]:
    """Freeze a model, and train an adapter of it, with seed 0; return the adapted layers."""
    model.requires_grad_(False)
    targets = adapter_targets({name: tuple(value.shape) for name, value in model.named_parameters()}, lora)
    for path, (outputs, inputs) in targets.items():
        change = _Change(initial_a(PREFIX + path + A, (lora.rank, inputs), lora, seed=0), outputs, lora.scaling)
        parametrize.register_parametrization(model.get_submodule(path), "weight", change)
    return [model.get_submodule(path) for path in targets]


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices decay, norms and biases do not."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is decays] for decays in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # otherwise the padding token's row would get no gradient
    return model


def _log_probs(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    tokens = torch.cat([prompt, response])
    logits = model(tokens.unsqueeze(0)).logits[0, len(prompt) - 1 : -1] / samples.TEMPERATURE
    picked: Tensor = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
    return picked


@torch.no_grad()
def _all_log_probs(model: Any) -> list[Tensor]:
    return [_log_probs(model, prompt, response) for prompt, response in samples.samples()]
