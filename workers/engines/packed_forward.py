"""The forward pass over a packed micro-batch, shared by the trainer and the frozen reference.

Legend of shapes: N samples, T tokens of the micro-batch, A answer tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.engines.base import Sequences
from workers.engines.packed_attention import PackedLayout


@dataclass(frozen=True)
class PackedInputs:
    """A micro-batch in the order in which the model sees it: samples sorted by length (stable).

    Attributes:
        tokens_T: int64 [T].
        positions_T: int64 [T], from 0 in each sample.
        layout: of the samples in `tokens_T`.
        predictors_A: int64 [A], position in `tokens_T` whose logits predict each answer token; answers are in the
            micro-batch's order, not in the sorted one.
        targets_A: int64 [A], the answer tokens.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predictors_A: Tensor
    targets_A: Tensor

    @staticmethod
    def of(batch: Sequences, device: torch.device) -> "PackedInputs":
        """Sort the samples of a micro-batch and move the result to `device`."""
        lengths_N, prompts_N = batch.lengths_N.long().cpu(), batch.prompt_lengths_N.long().cpu()
        assert bool((prompts_N > 0).all()), "a sample without prompt tokens has nothing to predict its answer from"
        order_N = lengths_N.argsort(stable=True)
        sorted_N = lengths_N[order_N]
        starts_N = lengths_N.cumsum(0) - lengths_N
        sorted_starts_N = torch.empty_like(starts_N)
        sorted_starts_N[order_N] = sorted_N.cumsum(0) - sorted_N
        positions_T = _ranges(torch.zeros_like(sorted_N), sorted_N)
        source_T = starts_N[order_N].repeat_interleave(sorted_N) + positions_T
        answers_N = lengths_N - prompts_N
        unique, counts = torch.unique_consecutive(sorted_N, return_counts=True)
        tokens_T = batch.tokens_T.to(device, torch.int64)
        return PackedInputs(
            tokens_T=tokens_T[source_T.to(device)],
            positions_T=positions_T.to(device),
            layout=PackedLayout(tuple(zip(counts.tolist(), unique.tolist(), strict=True))),
            predictors_A=_ranges(sorted_starts_N + prompts_N - 1, answers_N).to(device),
            targets_A=tokens_T[_ranges(starts_N + prompts_N, answers_N).to(device)],
        )


def answer_log_probs(
    model: nn.Module, inputs: PackedInputs, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the answer tokens under the tempered distribution.

    Logits exist at the A answer positions only. Works in float32 (float64 for a float64 model).

    Args:
        model: causal language model of transformers, built with the packed attention.
        inputs: the micro-batch on the model's device.
        temperature: divides the logits.
        entropy: also compute the entropy; else the second result is empty.
    Returns:
        float32 [A] with gradient where enabled, and float32 [A] (or [0]) without gradient.
    """
    output: Any = model(
        input_ids=inputs.tokens_T.unsqueeze(0),
        position_ids=inputs.positions_T.unsqueeze(0),
        logits_to_keep=inputs.predictors_A,
        packed_layout=inputs.layout,
        use_cache=False,
    )
    logits_AV = output.logits[0]
    logits_AV = logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32))
    if temperature != 1.0:
        logits_AV = logits_AV / temperature
    log_probs_AV = logits_AV.log_softmax(-1)
    log_probs_A = log_probs_AV.gather(-1, inputs.targets_A.unsqueeze(-1)).squeeze(-1)
    if not entropy:
        return log_probs_A, log_probs_A.detach()[:0]
    with torch.no_grad():
        return log_probs_A, -(log_probs_AV.exp() * log_probs_AV).sum(-1)


def _ranges(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Return the concatenation of `arange(start, start + length)`, int64."""
    before_N = lengths_N.cumsum(0) - lengths_N
    return torch.arange(int(lengths_N.sum())) + (starts_N - before_N).repeat_interleave(lengths_N)
