"""Time of a micro-batch, and of its head alone."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.devices.whole_logits import HIDDEN, VOCABULARY, WAYS, inputs, of_logits
from benchmarks.end_to_end.training_case import median_seconds
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs, response_logits
from workers.rows.packed_rows import Sequences

SAMPLES, PROMPT, RESPONSE = 4, 64, 256


def run(*, rounds: int, layers: int) -> dict[str, float]:
    """Return the ratios."""
    head = _ratio({name: lambda way=way: _head(way) for name, way in WAYS.items()}, rounds)  # type: ignore[misc]
    return {"logits_head_time_x": head, "logits_time_x": _ratio(_micro_batches(layers), rounds)}


def _ratio(ways: dict[str, Callable[[], None]], rounds: int) -> float:
    seconds = median_seconds(ways, rounds)
    return seconds["now"] / seconds["before"]


def _head(way: Any) -> None:
    hidden_AD, weight_VD, targets_A = _given()
    log_probs_A, _ = way(hidden_AD, weight_VD, targets_A, 1.0)
    log_probs_A.sum().backward()
    hidden_AD.grad = weight_VD.grad = None


_kept: list[Any] = []


def _given() -> Any:
    if not _kept:
        _kept.extend(inputs(SAMPLES * RESPONSE))
    return _kept


def _micro_batches(layers: int) -> dict[str, Callable[[], None]]:
    _kept.clear()
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = PACKED_ATTENTION
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    tokens = torch.randint(VOCABULARY, (SAMPLES, PROMPT + RESPONSE)).unbind()
    batch = Sequences.from_turns([row[:PROMPT] for row in tokens], [row[PROMPT:] for row in tokens])
    packed = PackedInputs.from_batch(batch, torch.device("cpu"))

    def before() -> None:
        log_probs_A, _ = of_logits(response_logits(model, packed), packed.targets_A, 1.0)
        log_probs_A.sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    def now() -> None:
        log_probs_A, _ = response_log_probs(model, packed, 1.0, entropy=True)
        log_probs_A.sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return {"before": before, "now": now}
