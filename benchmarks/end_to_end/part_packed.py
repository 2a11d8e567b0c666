"""`packed_x`: forward-backward of responses of log-normal lengths, padded against packed.

Padded as trainers do it that have no packing: micro-batches of 8 samples in the order in which they come, prompts
padded on the left, responses on the right, a mask, logits at the responses' positions only. Packed: micro-batches of as
many tokens as such a padded one has on the average without its padding. The same model, weights and loss; every prompt
is another one, so that none is shared. `packed_tokens_x`: tokens that the padded way computes per token that counts.
The model is that of `training_case.py`; `--model` is not used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.end_to_end.runs import Lab
from benchmarks.end_to_end.training_case import (
    VOCABULARY,
    loss,
    median_seconds,
    open_engine,
    process_group,
    save_model,
)
from tq.policies import split_by_tokens
from workers.rows.packed_rows import Sequences

ROWS, SIZE = 32, 8
PROMPT, RESPONSE, SPREAD = 64.0, 64.0, 0.9
"""Medians (tokens), and the deviation of the logarithm."""
LONGEST = 512


@dataclass(frozen=True)
class _Lengths:
    prompts: list[int]
    responses: list[int]


def run(lab: Lab) -> dict[str, float]:
    """Measure one step's worth of samples."""
    chance = torch.Generator().manual_seed(2)
    torch.set_num_threads(lab.threads)
    lengths = _Lengths(*(_log_normal(middle, ROWS, chance) for middle in (PROMPT, RESPONSE)))
    prompts, responses = (
        [torch.randint(0, VOCABULARY, (n,), generator=chance) for n in each]
        for each in (lengths.prompts, lengths.responses)
    )
    with process_group():
        model_dir = save_model(lab.directory)
        engine = open_engine(model_dir, shared_prompt=False)
        plain = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
        whole = [p + a for p, a in zip(lengths.prompts, lengths.responses, strict=True)]
        budget = max(sum(whole) * SIZE // ROWS, max(whole))
        cuts = split_by_tokens(whole, budget)

        def padded() -> None:
            for start in range(0, ROWS, SIZE):
                chosen = slice(start, start + SIZE)
                _padded_loss(plain, prompts[chosen], responses[chosen]).backward()  # type: ignore[no-untyped-call]
            plain.zero_grad()

        def packed() -> None:
            for cut in cuts:
                engine.forward_backward(
                    Sequences.from_turns([prompts[i] for i in cut], [responses[i] for i in cut]), loss
                )
            engine.zero_grad()

        seconds = median_seconds({"padded": padded, "packed": packed}, lab.rounds)
    computed = sum(_padded_tokens(lengths, start) for start in range(0, ROWS, SIZE))
    return {"packed_x": seconds["padded"] / seconds["packed"], "packed_tokens_x": computed / sum(whole)}


def _log_normal(middle: float, count: int, chance: torch.Generator) -> list[int]:
    drawn = (torch.randn(count, generator=chance) * SPREAD).exp() * middle
    return [int(length) for length in drawn.clamp(4, LONGEST)]


def _padded_tokens(lengths: _Lengths, start: int) -> int:
    prompts, responses = (each[start : start + SIZE] for each in (lengths.prompts, lengths.responses))
    return len(prompts) * (max(prompts) + max(responses))


def _padded_loss(model: Any, prompts: list[Tensor], responses: list[Tensor]) -> Tensor:
    """The loss of a padded micro-batch."""
    left = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    right = pad_sequence(responses, batch_first=True, padding_value=-1)
    tokens = torch.cat([left, right], dim=1)
    mask = tokens >= 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    width = right.shape[1]
    output = model(
        input_ids=tokens.clamp(min=0), attention_mask=mask.long(), position_ids=positions, logits_to_keep=width + 1
    )
    log_probs = output.logits[:, :-1].float().log_softmax(-1)
    picked: Tensor = log_probs.gather(-1, right.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (right >= 0)).sum()
