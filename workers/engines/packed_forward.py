"""The forward pass over a packed micro-batch, shared by trainer, its copies, critic and frozen reference.

Legend of shapes: N samples, T tokens of the micro-batch, A drawn tokens, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncflow.device import to_device
from workers.engines.base import check_sequences
from workers.engines.log_prob_head import HeadRequest, head_log_probs, note_entropy_gradient
from workers.engines.packed_layout import ALONE, PackedLayout
from workers.rows.rows import Sequences

_IDLE = Sequences(
    tokens_T=torch.zeros(2, dtype=torch.int64),
    lengths_N=torch.tensor([2], dtype=torch.int32),
    response_mask_T=torch.tensor([0, 1], dtype=torch.uint8),
)
"""The smallest batch with a drawn token."""


@dataclass(frozen=True)
class PackedInputs:
    """A micro-batch in the order in which the model sees it.

    The last token of a sample predicts nothing, so it is left out. Samples that share a prompt (what comes before their
    first drawn token) become one document for the prompt and one for the rest of each; the others are one document
    each, sorted by length (stable).

    Attributes:
        tokens_T: int64 [T].
        positions_T: int64 [T], from 0 in each sample.
        layout: of the documents in `tokens_T`.
        predictors_A: int64 [A], position in `tokens_T` whose logits predict each drawn token; these are in the
            micro-batch's order, not in the sorted one.
        targets_A: int64 [A], the drawn tokens.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predictors_A: Tensor
    targets_A: Tensor

    @staticmethod
    def of(batch: Sequences, device: torch.device, *, shared_prompt: bool = False) -> "PackedInputs":
        """Arrange the samples of a micro-batch, and move the result to `device` in one copy, without a wait for it.

        Args:
            batch: in host memory.
            device: of the model.
            shared_prompt: compute a prompt that several samples have in common once.
        """
        lengths, prompts = batch.lengths_N.tolist(), batch.prompt_lengths.tolist()
        starts = [0, *accumulate(lengths)][:-1]
        documents = _documents(batch.tokens_T, starts, lengths, prompts, shared_prompt=shared_prompt)
        layout = PackedLayout(tuple(one.length for one in documents), tuple(one.prompt for one in documents))
        # Where each sample would begin if all of it lay as its prompt does, and as its rest does.
        begins_2N = torch.zeros(2, len(lengths), dtype=torch.int64)
        for document, start in zip(documents, layout.starts, strict=True):
            for sample in document.samples:
                begins_2N[int(document.position > 0) :, sample] = start - document.position
        tokens_T = batch.tokens_T.to(torch.int64)
        source_T = _ranges([(one.source, one.length) for one in documents])
        targets_A = batch.response_mask_T.nonzero()[:, 0]
        sample_A = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[targets_A]
        before_A = targets_A - torch.tensor(starts)[sample_A] - 1
        continues_A = (before_A >= torch.tensor(prompts)[sample_A]).long()
        fed_T, positions_T, predictors_A, drawn_A = to_device(
            [
                tokens_T[source_T],
                _ranges([(one.position, one.length) for one in documents]),
                begins_2N[continues_A, sample_A] + before_A,
                tokens_T[targets_A],
            ],
            device,
        )
        return PackedInputs(fed_T, positions_T, layout, predictors_A, drawn_A)


class InputsOfBatch:
    """Packs micro-batches for one or several models; a batch that repeats is packed once."""

    def __init__(self, device: torch.device, *, vocab_size: int, shared_prompt: bool) -> None:
        """Args:
        device: of the models.
        vocab_size: of the models.
        shared_prompt: see `PackedInputs.of`.
        """
        self._device = device
        self._vocab_size = vocab_size
        self._shared_prompt = shared_prompt
        self._last: tuple[Sequences, PackedInputs] | None = None

    def __call__(self, batch: Sequences | None) -> PackedInputs:
        """Return the packed batch; None: a smallest one.

        Raises:
            BadRequest: see `check_sequences`.
        """
        batch = _IDLE if batch is None else batch
        if self._last is None or self._last[0] is not batch:
            check_sequences(batch, vocab_size=self._vocab_size)
            self._last = batch, PackedInputs.of(batch, self._device, shared_prompt=self._shared_prompt)
        return self._last[1]


def cut(batch: Sequences, num_pieces: int) -> Iterator[Sequences]:
    """Yield a micro-batch in at most `num_pieces` pieces of about equal tokens, whole samples each, in order."""
    lengths = batch.lengths_N.tolist()
    total, first, rows = sum(lengths), 0, 0
    while rows < len(lengths):
        begin, start = rows, first
        share = -(-(total - first) // num_pieces)
        while rows < len(lengths) and (rows == begin or first - start + lengths[rows] // 2 < share):
            first += lengths[rows]
            rows += 1
        num_pieces = max(1, num_pieces - 1)
        yield Sequences(batch.tokens_T[start:first], batch.lengths_N[begin:rows], batch.response_mask_T[start:first])


def response_logits(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """Return the output layer's logits of each drawn token, at the token before it.

    Args:
        model: causal language model of transformers, built with the packed attention; V is 1 for one with a head of
            one number.
        inputs: the micro-batch on the model's device.
    Returns:
        float32 [A, V] (float64 for a float64 model), with gradient where enabled.
    """
    logits_AV = _forward(model, inputs)
    return logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32))


def response_log_probs(
    model: nn.Module, inputs: PackedInputs, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the drawn tokens under the tempered distribution.

    The logits never exist as a whole (`log_prob_head`), except for models that change them after the head: those that
    scale or cap them, or whose head is no plain linear layer.

    Args:
        model, inputs: see `response_logits`.
        temperature: divides the logits.
        entropy: also compute the entropy; else the second result is empty.
    Returns:
        float32 [A] with gradient where enabled, and float32 [A], alike (or [0], without).
    """
    known: Any = model
    head = known.get_output_embeddings()
    if not isinstance(head, nn.Linear) or _whole_logits.get(head):
        return _of_whole_logits(response_logits(model, inputs), inputs.targets_A, temperature, entropy=entropy)
    request = HeadRequest(inputs.targets_A, temperature, entropy)
    patched: Any = head
    # In the head's own forward: there FSDP2 has gathered its weight, and what it returns passes the model's hooks.
    patched.forward = partial(_head_forward, head, request)
    try:
        found_A2 = _forward(model, inputs)
    finally:
        del patched.forward
    if head not in _whole_logits:  # the first time only, for it waits for the device
        _whole_logits[head] = not bool((found_A2[-1] == _WITNESS).all())
        if _whole_logits[head]:
            return response_log_probs(model, inputs, temperature, entropy=entropy)
    log_probs_A, entropy_A = found_A2[:-1].unbind(-1)
    if not entropy:
        return log_probs_A, log_probs_A.detach()[:0]
    note_entropy_gradient(entropy_A, request)
    return log_probs_A, entropy_A


_whole_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Heads that were asked: whether their model changes the logits."""
_WITNESS = 1 / 3
"""A number that comes back otherwise from a model that scales, caps or rounds what its head returns."""


def _head_forward(head: nn.Linear, request: HeadRequest, hidden_1AD: Tensor) -> Tensor:
    """Return [1, A + 1, 2] in place of logits: log-probabilities and entropies, then a row of `_WITNESS`."""
    found_A2 = torch.stack(head_log_probs(hidden_1AD[0], head.weight, head.bias, request), dim=-1)
    # A tensor of its own: FSDP2 warns of a view.
    return torch.cat([found_A2[None], found_A2.new_full((1, 1, 2), _WITNESS)], dim=1)


def _forward(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """Return what the model makes of its head's result for the tokens that predict drawn ones, [A, ...]."""
    output: Any = model(
        input_ids=inputs.tokens_T.unsqueeze(0),
        position_ids=inputs.positions_T.unsqueeze(0),
        logits_to_keep=inputs.predictors_A,
        packed_layout=inputs.layout,
        use_cache=False,
    )
    logits_AV: Tensor = output.logits[0]
    return logits_AV


def _of_whole_logits(
    logits_AV: Tensor, targets_A: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    if temperature != 1.0:
        logits_AV = logits_AV / temperature
    log_probs_AV = logits_AV.log_softmax(-1)
    log_probs_A = log_probs_AV.gather(-1, targets_A.unsqueeze(-1)).squeeze(-1)
    if not entropy:
        return log_probs_A, log_probs_A.detach()[:0]
    # Computed again in the backward pass: it would keep two more copies of the logits, which few losses want.
    entropy_A: Tensor = checkpoint(_entropy, log_probs_AV, use_reentrant=False)
    return log_probs_A, entropy_A


def _entropy(log_probs_AV: Tensor) -> Tensor:
    return -(log_probs_AV.exp() * log_probs_AV).sum(-1)


@dataclass(frozen=True)
class _Document:
    """Neighbouring tokens of one or several samples.

    Attributes:
        source: first token in the micro-batch.
        length: tokens.
        samples: the samples that the tokens, or the shared prompt, belong to.
        position: of the first token; 0 unless it continues a prompt.
        prompt: position among the documents of the prompt that it continues.
    """

    source: int
    length: int
    samples: tuple[int, ...]
    position: int = 0
    prompt: int = ALONE


def _documents(
    tokens_T: Tensor, starts: list[int], lengths: list[int], prompts: list[int], *, shared_prompt: bool
) -> list[_Document]:
    """Return the documents of a micro-batch: samples alone and shared prompts by length, then what continues these."""
    groups: dict[object, list[int]] = {}
    for sample, start in enumerate(starts):
        key = tokens_T[start : start + prompts[sample]].numpy().tobytes() if shared_prompt else sample
        groups.setdefault(key, []).append(sample)
    first = []
    for samples in groups.values():
        one = samples[0]
        fed = prompts[one] if len(samples) > 1 else max(prompts[one], lengths[one] - 1)
        first.append(_Document(starts[one], fed, tuple(samples)))
    first.sort(key=lambda document: document.length)
    responses = []
    for place, document in enumerate(first):
        fed_last = [s for s in document.samples if lengths[s] - 1 > prompts[s]] if len(document.samples) > 1 else []
        for sample in sorted(fed_last, key=lambda sample: lengths[sample]):
            prompt = prompts[sample]
            source, length = starts[sample] + prompt, lengths[sample] - 1 - prompt
            responses.append(_Document(source, length, (sample,), position=prompt, prompt=place))
    return first + responses


def _ranges(parts: list[tuple[int, int]]) -> Tensor:
    """Return the concatenation of `arange(start, start + length)`, int64."""
    starts_N, lengths_N = torch.tensor(parts, dtype=torch.int64).unbind(1)
    before_N = lengths_N.cumsum(0) - lengths_N
    return torch.arange(int(lengths_N.sum())) + (starts_N - before_N).repeat_interleave(lengths_N)
