"""The default generating engine: transformers' model with a decode loop of our own, and continuous batching.

    submit ... step: new responses enter, every running one gets a token -> those that ended leave; submit ...

A step is one forward pass over one packed sequence without padding: the distinct prompts that enter and the newest
token of every running response. Keys and values are kept in lanes (`Lane`). A draw depends on the request's seed and
the response's position only: random numbers are drawn beforehand, and a token is the inverse of the cumulative
distribution at its number. Called by the rollout role; knows nothing of queues.

Legend of shapes: S slots (responses at a time), M most response tokens, B responses that get a token in a step, T
tokens of a step, V vocabulary, U rows of logits.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from weightsync.plan import Need
from workers.data.model_files import eos_token_ids, max_positions
from workers.engines.base import GenerateRequest, Generation, check_request
from workers.engines.hf.attention import STEP_ATTENTION
from workers.engines.hf.batch import Response, RunningBatch, StepInputs
from workers.engines.hf.lanes import KeyShape
from workers.engines.hf.model import (
    DTYPES,
    check_weights,
    empty_causal_lm,
    materialize,
    replace_weights,
    vocab_size,
    weight_needs,
)
from workers.engines.setup import EngineSetup
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig


class HfEngine:
    """Generates responses with transformers; implements `GenerateEngine`."""

    def __init__(self, model_dir: Path, config: ModelConfig, *, sampling: SamplingConfig, device: torch.device) -> None:
        """Build the model without weights; `load_weights` must come before `submit`.

        Args:
            model_dir: Hugging Face directory; only its JSON files are read.
            config: of the model.
            sampling: how, and limits.
            device: where it computes.
        Raises:
            ConfigError: the directory describes no causal language model, or no end-of-sequence token.
        """
        self._sampling = sampling
        self._device = device
        model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention=STEP_ATTENTION)
        materialize(model, device)
        self._model = cast(Any, model.requires_grad_(False))
        self._parameters = dict(self._model.named_parameters())
        self._vocab_size = vocab_size(self._model)
        self._max_length = max_positions(model_dir)
        self._eos = torch.tensor(eos_token_ids(model_dir), device=device)
        self._loaded = False
        size = sampling.batch_size, sampling.max_response_tokens
        self._uniforms_SM = torch.zeros(size, device=device)
        self._responses_SM = torch.zeros(size, dtype=torch.int64, device=device)
        self._log_probs_SM = torch.zeros(size, device=device)
        self._versions_SM = torch.zeros(size, dtype=torch.int32, device=device)
        self._batch = RunningBatch(_key_shape(self._model, device), max_new_tokens=sampling.max_response_tokens)
        self._free = list(reversed(range(sampling.batch_size)))
        self.version = 0

    @staticmethod
    def of_run(setup: EngineSetup) -> "HfEngine":
        """Return the engine of a run."""
        return HfEngine(setup.model_dir, setup.run.model, sampling=setup.sampling, device=setup.device)

    @property
    def adopts_weights(self) -> bool:
        """On the CPU, where weights in host memory can be used as they are."""
        return self._device.type == "cpu"

    @property
    def interruptible(self) -> bool:
        """Whether responses go on with new weights, as `rollout.on_swap` says."""
        return self._sampling.on_swap != "finish"

    @property
    def num_running(self) -> int:
        return self._sampling.batch_size - len(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Begin responses: the next step computes their prompts.

        Raises:
            BadRequest: see `GenerateEngine.submit`.
        """
        assert self._loaded, "submit() before load_weights()"
        assert len(requests) <= self.free_slots
        for request in requests:
            check_request(
                request,
                vocab_size=self._vocab_size,
                max_length=self._max_length,
                max_response_tokens=self._sampling.max_response_tokens,
            )
        for request in requests:
            response = Response(request, self._free.pop(), request.prompt_P.tolist())
            self._uniforms_SM[response.slot] = torch.from_numpy(_uniforms(request.seed, self._uniforms_SM.shape[1]))
            self._batch.enter(response)

    @torch.inference_mode()
    def step(self, wake: threading.Event) -> list[Generation]:
        """Draw the next token of every running response; returns those that it finished."""
        if not self.num_running:
            return []
        inputs = self._batch.next_inputs()
        logits_UV = self._batch.note_logits(inputs, self._forward(inputs) if inputs.tokens else None)
        return [self._finish(response, truncated=cut) for response, cut in self._draw(inputs, logits_UV)]

    @torch.inference_mode()
    def cancel(self, ticket: int) -> None:
        self._free += [response.slot for response in self._batch.cancel(ticket)]

    def abort(self) -> None:
        self._batch.clear()
        self._free = list(reversed(range(self._sampling.batch_size)))

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (HF names). While responses run only where the engine is `interruptible`.

        Raises:
            PlanError: a weight is missing, unknown, or of another shape; nothing was replaced.
        """
        check_weights(weight_needs(self._model), weights)
        replace_weights(self._parameters, weights, adopt=adopt and self.adopts_weights)
        self._batch.forget_prompts()
        if self._sampling.on_swap == "recompute":
            self._batch.enter_again()
        self._loaded = True

    def weight_needs(self) -> Mapping[str, Need]:
        return weight_needs(self._model)

    def close(self) -> None:
        """Drop the model."""
        self.abort()
        self._parameters.clear()
        self._model.to_empty(device="meta")

    def _forward(self, inputs: StepInputs) -> Tensor:
        output = self._model(
            input_ids=torch.tensor([inputs.tokens], device=self._device),
            position_ids=torch.tensor([inputs.positions], device=self._device),
            logits_to_keep=torch.tensor(inputs.predictors, device=self._device),
            step_plan=inputs.plan,
            use_cache=False,
        )
        logits_UV: Tensor = output.logits[0]
        return logits_UV

    def _draw(self, inputs: StepInputs, logits_UV: Tensor) -> list[tuple[Response, bool]]:
        """Draw a token for every response; return the responses that end with it, and whether they were cut."""
        slots_B = torch.tensor([response.slot for response in inputs.responses], device=self._device)
        columns_B = torch.tensor([response.num_tokens for response in inputs.responses], device=self._device)
        if inputs.logit_rows != list(range(len(logits_UV))):
            logits_UV = logits_UV[torch.tensor(inputs.logit_rows, device=self._device)]
        token_B, log_prob_B = draw_tokens(logits_UV, self._uniforms_SM[slots_B, columns_B], self._sampling)
        self._responses_SM[slots_B, columns_B] = token_B
        self._log_probs_SM[slots_B, columns_B] = log_prob_B
        self._versions_SM[slots_B, columns_B] = self.version
        tokens: list[int] = token_B.tolist()
        at_end: list[bool] = torch.isin(token_B, self._eos).tolist()
        ended = []
        for response, token, is_eos in zip(inputs.responses, tokens, at_end, strict=True):
            response.tokens.append(token)
            stops = is_eos or token in response.request.stop_ids or response.completes_stop
            if stops or response.num_tokens == response.request.limit(self._sampling.max_response_tokens):
                ended.append((response, not stops))
        self._batch.leave([response for response, _ in ended])
        return ended

    def _finish(self, response: Response, *, truncated: bool) -> Generation:
        """Copy a response to the CPU, as normal tensors (not of inference mode), and free its slot."""
        self._free.append(response.slot)
        tensors = self._responses_SM, self._log_probs_SM, self._versions_SM
        with torch.inference_mode(False):
            response_R, log_probs_R, versions_R = (
                torch.empty(response.num_tokens, dtype=tensor.dtype).copy_(tensor[response.slot, : response.num_tokens])
                for tensor in tensors
            )
        return Generation(
            index=response.request.index,
            response_R=response_R,
            log_probs_R=log_probs_R,
            versions_R=versions_R,
            truncated=truncated,
            ticket=response.request.ticket,
        )


def draw_tokens(logits_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Invert each row's cumulative distribution at its random number; at temperature 0, take its likeliest token.

    A row's result depends on that row alone. Top-k is applied first, then top-p to what it left.

    Args:
        logits_BV: any floating type.
        uniform_B: float32 in [0, 1).
        config: temperature, top_k, top_p.
    Returns:
        tokens, int64 [B], and their log-probabilities, float32 [B], under the tempered distribution before filtering;
        at temperature 0 under the untempered one.
    """
    logits_BV = logits_BV.float()
    if config.temperature not in (0, 1):
        logits_BV = logits_BV / config.temperature
    log_probs_BV = logits_BV.log_softmax(-1)
    probs_BV = log_probs_BV.exp()
    if config.temperature == 0:
        token_B = log_probs_BV.argmax(-1)
    elif 0 < config.top_k < probs_BV.shape[-1] or config.top_p < 1:
        token_B = _draw_filtered(probs_BV, uniform_B, config)
    else:
        token_B = _invert(probs_BV, uniform_B)
    return token_B, log_probs_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


def _key_shape(model: Any, device: torch.device) -> KeyShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return KeyShape(
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=device,
    )


_UNIFORM_BITS = 24
"""Of a float32 in [0, 1): one below 1 is below 2**24 of them."""
_WEIGHT_BITS = 37
"""The product of a total, which rounding may leave above 1, and a uniform fits into 63 bits."""


def _uniforms(seed: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return float32 in [0, 1); Philox is keyed directly, so a stream costs no seeding."""
    return np.random.Generator(np.random.Philox(key=seed)).random(size, dtype=np.float32)


def _draw_filtered(probs_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> Tensor:
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if config.top_k > 0:
        sorted_BV = sorted_BV[:, : config.top_k]
    if config.top_p < 1:
        units_BV = _fixed_point(sorted_BV)
        before_BV = units_BV.cumsum(-1) - units_BV
        sorted_BV = sorted_BV * (before_BV < config.top_p * units_BV.sum(-1, keepdim=True))
    return order_BV.gather(-1, _invert(sorted_BV, uniform_B).unsqueeze(-1)).squeeze(-1)


def _invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total; never one of weight zero.

    In whole numbers, since a parallel prefix sum of floats need not be monotonic: it may rise at a weight of zero, and
    CUDA refuses it where kernels must be deterministic. A row that is not finite gets the last index, and its
    log-probabilities are not finite either.
    """
    cumulative_BV = _fixed_point(weights_BV).cumsum(-1)
    uniform_B1 = (uniform_B * 2**_UNIFORM_BITS).to(torch.int64).unsqueeze(-1)
    bound_B1 = (cumulative_BV[:, -1:] * uniform_B1) >> _UNIFORM_BITS
    drawn_B1 = torch.searchsorted(cumulative_BV, bound_B1, right=True)
    return drawn_B1.clamp_(max=weights_BV.shape[-1] - 1).squeeze(-1)


def _fixed_point(weights_BV: Tensor) -> Tensor:
    """Return weights of a sum of at most 1 as int64, in 2**-37; what is smaller, or not finite, is 0."""
    fixed_BV: Tensor = (weights_BV.nan_to_num(0.0, 0.0, 0.0) * 2**_WEIGHT_BITS).to(torch.int64)
    return fixed_BV
