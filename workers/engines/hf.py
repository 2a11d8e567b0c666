"""The default generating engine: transformers' model with a decode loop of our own.

    prefill   each distinct prompt once, left-padded; its keys and values are copied to the answers of its group
    decode    one token for every running answer; finished answers are yielded at once and leave the batch

A draw depends on the request's seed and on the answer's position only: random numbers are drawn beforehand and a token
is the inverse of the cumulative distribution at its number. Called by the rollout role; knows nothing of queues.

Legend of shapes: B running answers, P longest prompt, K keys so far, M most answer tokens, V vocabulary, U distinct
prompts.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from asyncflow.errors import PlanError
from weightsync.plan import Need
from workers.config import ModelConfig, RolloutConfig
from workers.engines.base import GenerateRequest, Generation
from workers.engines.hf_model import DTYPES, empty_causal_lm, materialize, replace_weights, weight_needs
from workers.engines.sampling import draw_tokens
from workers.model_files import eos_token_ids

COMPACT_SHARE = 0.125
"""Finished rows leave the tensors when they are this share of the batch: copying all keys and values costs about as
much as one more decode step does."""


class HfEngine:
    """Generates answers with transformers; implements `GenerateEngine`."""

    def __init__(self, model_dir: Path, config: ModelConfig, *, rollout: RolloutConfig, device: torch.device) -> None:
        """Build the model without weights; `load_weights` must come before `generate`.

        Args:
            model_dir: Hugging Face directory; only its JSON files are read.
            config: of the model.
            rollout: sampling and limits.
            device: where it computes.
        Raises:
            ConfigError: the directory describes no causal language model, or no end-of-sequence token.
        """
        self._rollout = rollout
        self._device = device
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention="sdpa")
        materialize(self._model, device)
        self._model.requires_grad_(False)
        self._parameters = dict(self._model.named_parameters())
        self._eos = torch.tensor(eos_token_ids(model_dir), device=device)
        self._loaded = False

    @property
    def adopts_weights(self) -> bool:
        """On the CPU: weights in host memory are where they are needed."""
        return self._device.type == "cpu"

    def generate(
        self, requests: Sequence[GenerateRequest], *, stop: threading.Event | None = None
    ) -> Iterator[Generation]:
        """Yield each answer as soon as it is finished, in any order; `rollout.batch_size` of them run at a time."""
        assert self._loaded, "generate() before load_weights()"
        stop = stop or threading.Event()
        for first in range(0, len(requests), self._rollout.batch_size):
            yield from self._generate_batch(requests[first : first + self._rollout.batch_size], stop)

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (HF names). Not while `generate` is being iterated.

        Raises:
            PlanError: a weight is missing, unknown, or of another shape; nothing was replaced.
        """
        missing, unknown = self._parameters.keys() - weights.keys(), weights.keys() - self._parameters.keys()
        if missing or unknown:
            raise PlanError(f"weights do not fit the model: missing {_few(missing)}, unknown {_few(unknown)}")
        for name, parameter in self._parameters.items():
            if weights[name].shape != parameter.shape:
                shapes = f"{tuple(weights[name].shape)}, but the model's is {tuple(parameter.shape)}"
                raise PlanError(f"weight {name}: its shape is {shapes}")
        replace_weights(self._parameters, weights, adopt=adopt and self.adopts_weights)
        self._loaded = True

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what `load_weights` needs, by HF name; tied weights once."""
        return weight_needs(self._model)

    def _generate_batch(self, requests: Sequence[GenerateRequest], stop: threading.Event) -> Iterator[Generation]:
        if stop.is_set():
            return
        batch = self._prefill(requests)
        for num_tokens in range(1, self._rollout.max_response_tokens + 1):
            for row, truncated in self._sample(batch, num_tokens):
                yield batch.generation(row, num_tokens, truncated=truncated)
            if batch.num_running == 0 or stop.is_set():
                return
            self._decode(batch, num_tokens)

    @torch.inference_mode()
    def _prefill(self, requests: Sequence[GenerateRequest]) -> "_Batch":
        """Run the distinct prompts and copy their state to the answers that share them."""
        prompts: dict[tuple[int, ...], int] = {}
        row_of_answer = [prompts.setdefault(tuple(request.prompt_P.tolist()), len(prompts)) for request in requests]
        longest = max(map(len, prompts))
        tokens_UP, mask_UP = np.zeros((2, len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            tokens_UP[row, longest - len(prompt) :] = prompt
            mask_UP[row, longest - len(prompt) :] = 1
        mask = torch.from_numpy(mask_UP).to(self._device)
        cache = DynamicCache(config=cast(PreTrainedConfig, self._model.config))
        output = self._model(
            input_ids=torch.from_numpy(tokens_UP).to(self._device),
            attention_mask=None if mask_UP.all() else mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
            use_cache=True,
        )
        rows_B = torch.tensor(row_of_answer, device=self._device)
        if len(prompts) < len(requests):
            cache.batch_select_indices(rows_B)
        size = (len(requests), self._rollout.max_response_tokens)
        keys = None if mask_UP.all() else torch.cat([mask[rows_B], mask.new_ones(size)], dim=1)
        return _Batch(
            requests=list(requests),
            cache=cache,
            logits_BV=output.logits[rows_B, -1],
            keys_BK=keys,
            positions_B=mask.sum(-1)[rows_B],
            uniforms_BM=self._uniforms(requests),
            responses_BM=torch.zeros(size, dtype=torch.int64, device=self._device),
            log_probs_BM=torch.zeros(size, device=self._device),
            finished_B=torch.zeros(len(requests), dtype=torch.bool, device=self._device),
            num_running=len(requests),
        )

    @torch.inference_mode()
    def _sample(self, batch: "_Batch", num_tokens: int) -> list[tuple[int, bool]]:
        """Draw the next token of every row; return the rows that end with it, and whether they were cut."""
        column = num_tokens - 1
        token_B, log_prob_B = draw_tokens(batch.logits_BV, batch.uniforms_BM[:, column], self._rollout)
        batch.responses_BM[:, column] = token_B
        batch.log_probs_BM[:, column] = log_prob_B
        eos_B = torch.isin(token_B, self._eos)
        last = num_tokens == self._rollout.max_response_tokens
        ended_B = ~batch.finished_B if last else eos_B & ~batch.finished_B
        rows: list[int] = ended_B.nonzero().flatten().tolist()
        if not rows:
            return []
        truncated: list[bool] = (~eos_B[ended_B]).tolist()
        batch.finished_B |= ended_B
        batch.num_running -= len(rows)
        return list(zip(rows, truncated, strict=True))

    @torch.inference_mode()
    def _decode(self, batch: "_Batch", num_tokens: int) -> None:
        """Feed each answer's newest token, its `num_tokens`-th, and compute the next logits."""
        num_rows = len(batch.requests)
        if num_rows - batch.num_running >= COMPACT_SHARE * num_rows:
            batch.compact()
        output = self._model(
            input_ids=batch.responses_BM[:, num_tokens - 1, None],
            attention_mask=batch.mask(num_tokens),
            position_ids=batch.positions_B[:, None] + (num_tokens - 1),
            past_key_values=batch.cache,
            use_cache=True,
        )
        batch.logits_BV = output.logits[:, -1]

    def _uniforms(self, requests: Sequence[GenerateRequest]) -> Tensor:
        """Draw float32 [B, M] in [0, 1); Philox is keyed directly, so a stream costs no seeding."""
        size = self._rollout.max_response_tokens
        drawn = [np.random.Generator(np.random.Philox(key=r.seed)).random(size, dtype=np.float32) for r in requests]
        return torch.from_numpy(np.stack(drawn)).to(self._device)


@dataclass
class _Batch:
    """Running answers, one row each; all have the same number of tokens.

    Attributes:
        keys_BK: bool mask over prompt and answer tokens, [B, P + M]; None when no prompt is padded.
        positions_B: position of the first answer token.
        finished_B: rows that were yielded but not yet removed.
    """

    requests: list[GenerateRequest]
    cache: DynamicCache
    logits_BV: Tensor
    keys_BK: Tensor | None
    positions_B: Tensor
    uniforms_BM: Tensor
    responses_BM: Tensor
    log_probs_BM: Tensor
    finished_B: Tensor
    num_running: int

    def mask(self, num_tokens: int) -> Tensor | None:
        """Return which of the prompt's and the first `num_tokens` answer tokens exist."""
        if self.keys_BK is None:
            return None
        return self.keys_BK[:, : self.keys_BK.shape[1] - self.responses_BM.shape[1] + num_tokens]

    def compact(self) -> None:
        """Remove the finished rows."""
        kept = (~self.finished_B).nonzero().flatten()
        self.requests = [self.requests[row] for row in kept.tolist()]
        self.cache.batch_select_indices(kept)
        self.keys_BK = None if self.keys_BK is None else self.keys_BK[kept]
        self.positions_B = self.positions_B[kept]
        self.uniforms_BM = self.uniforms_BM[kept]
        self.responses_BM = self.responses_BM[kept]
        self.log_probs_BM = self.log_probs_BM[kept]
        self.finished_B = self.finished_B[kept]

    def generation(self, row: int, num_tokens: int, *, truncated: bool) -> Generation:
        """Copy a finished answer to the CPU, as normal tensors (not of inference mode)."""
        return Generation(
            index=self.requests[row].index,
            response_R=self.responses_BM[row, :num_tokens].clone().cpu(),
            log_probs_R=self.log_probs_BM[row, :num_tokens].clone().cpu(),
            truncated=truncated,
        )


def _few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return " ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "") or "none"
