"""The default generating engine: transformers' model with a decode loop of our own.

    prefill   each distinct prompt once, left-padded; its keys and values are copied to the answers of its group
    decode    one token for every running answer; finished answers are yielded at once and leave the batch

A draw depends on the request's seed and on the answer's position only: random numbers are drawn beforehand and a token
is the inverse of the cumulative distribution at its number. Called by the rollout role; knows nothing of queues.

Legend of shapes: B running answers, P longest prompt, K keys so far, M most answer tokens, V vocabulary, U distinct
prompts.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from asyncflow.errors import PlanError
from weightsync.plan import Need
from workers.config import ModelConfig, SamplingConfig
from workers.engines.base import GenerateRequest, Generation
from workers.engines.hf_model import DTYPES, empty_causal_lm, materialize, replace_weights, weight_needs
from workers.engines.sampling import draw_tokens
from workers.model_files import eos_token_ids

COMPACT_SHARE = 0.125
"""Finished rows leave the tensors when they are this share of the batch: copying all keys and values costs about as
much as one more decode step does."""


class HfEngine:
    """Generates answers with transformers; implements `GenerateEngine`."""

    def __init__(self, model_dir: Path, config: ModelConfig, *, sampling: SamplingConfig, device: torch.device) -> None:
        """Build the model without weights; `load_weights` must come before `generate`.

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
        self._model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention="sdpa")
        materialize(self._model, device)
        self._model.requires_grad_(False)
        self._parameters = dict(self._model.named_parameters())
        self._eos = torch.tensor(eos_token_ids(model_dir), device=device)
        self._loaded = False
        self._batch: _Batch | None = None
        self.version = 0

    @property
    def adopts_weights(self) -> bool:
        """On the CPU: weights in host memory are where they are needed."""
        return self._device.type == "cpu"

    @property
    def interruptible(self) -> bool:
        """No: the cache of keys and values belongs to the old weights."""
        return False

    @property
    def num_running(self) -> int:
        """Answers that were submitted and did not finish."""
        return 0 if self._batch is None else self._batch.num_running

    @property
    def free_slots(self) -> int:
        """`batch_size` once all that ran has finished: answers of a batch have the same number of tokens."""
        return self._sampling.batch_size if self._batch is None else 0

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Begin answers: compute the prompts."""
        assert self._loaded, "submit() before load_weights()"
        assert len(requests) <= self.free_slots
        self._batch = self._prefill(requests)

    def step(self, wake: threading.Event) -> list[Generation]:
        """Draw the next token of every running answer; returns those that it finished."""
        batch = self._batch
        if batch is None:
            return []
        if batch.num_tokens:
            self._decode(batch)
        batch.num_tokens += 1
        finished = [batch.generation(row, self.version, truncated=cut) for row, cut in self._sample(batch)]
        if not batch.num_running:
            self._batch = None
        return finished

    def abort(self) -> None:
        """Forget what runs."""
        self._batch = None

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (HF names). Not while answers run.

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
        size = (len(requests), self._sampling.max_response_tokens)
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
            num_tokens=0,
        )

    @torch.inference_mode()
    def _sample(self, batch: "_Batch") -> list[tuple[int, bool]]:
        """Draw each row's `num_tokens`-th token; return the rows that end with it, and whether they were cut."""
        column = batch.num_tokens - 1
        token_B, log_prob_B = draw_tokens(batch.logits_BV, batch.uniforms_BM[:, column], self._sampling)
        batch.responses_BM[:, column] = token_B
        batch.log_probs_BM[:, column] = log_prob_B
        eos_B = torch.isin(token_B, self._eos)
        last = batch.num_tokens == self._sampling.max_response_tokens
        ended_B = ~batch.finished_B if last else eos_B & ~batch.finished_B
        rows: list[int] = ended_B.nonzero().flatten().tolist()
        if not rows:
            return []
        truncated: list[bool] = (~eos_B[ended_B]).tolist()
        batch.finished_B |= ended_B
        batch.num_running -= len(rows)
        return list(zip(rows, truncated, strict=True))

    @torch.inference_mode()
    def _decode(self, batch: "_Batch") -> None:
        """Feed each answer's newest token, its `num_tokens`-th, and compute the next logits."""
        num_tokens = batch.num_tokens
        num_rows = len(batch.requests)
        if num_rows - batch.num_running >= COMPACT_SHARE * num_rows:
            batch.compact()
        output = self._model(
            input_ids=batch.responses_BM[:, num_tokens - 1, None],
            attention_mask=batch.mask(),
            position_ids=batch.positions_B[:, None] + (num_tokens - 1),
            past_key_values=batch.cache,
            use_cache=True,
        )
        batch.logits_BV = output.logits[:, -1]

    def _uniforms(self, requests: Sequence[GenerateRequest]) -> Tensor:
        """Draw float32 [B, M] in [0, 1); Philox is keyed directly, so a stream costs no seeding."""
        size = self._sampling.max_response_tokens
        drawn = [np.random.Generator(np.random.Philox(key=r.seed)).random(size, dtype=np.float32) for r in requests]
        return torch.from_numpy(np.stack(drawn)).to(self._device)


@dataclass
class _Batch:
    """Running answers, one row each; all have the same number of tokens.

    Attributes:
        keys_BK: bool mask over prompt and answer tokens, [B, P + M]; None when no prompt is padded.
        positions_B: position of the first answer token.
        finished_B: rows that were returned but not yet removed.
        num_tokens: of every answer.
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
    num_tokens: int

    def mask(self) -> Tensor | None:
        """Return which of the prompt's and the answer's tokens exist."""
        if self.keys_BK is None:
            return None
        return self.keys_BK[:, : self.keys_BK.shape[1] - self.responses_BM.shape[1] + self.num_tokens]

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

    def generation(self, row: int, version: int, *, truncated: bool) -> Generation:
        """Copy a finished answer to the CPU, as normal tensors (not of inference mode)."""
        num_tokens = self.num_tokens
        return Generation(
            index=self.requests[row].index,
            response_R=self.responses_BM[row, :num_tokens].clone().cpu(),
            log_probs_R=self.log_probs_BM[row, :num_tokens].clone().cpu(),
            versions_R=torch.full((num_tokens,), version, dtype=torch.int32),
            truncated=truncated,
            ticket=self.requests[row].ticket,
        )


def _few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return " ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "") or "none"
