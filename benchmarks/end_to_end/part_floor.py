"""hf_vs_floor: response tokens trained per second in float32, as a share of what matrix products alone would allow.

The floor of an update: the products of generating and training its tokens once (a group's prompt once in each, logits
at response tokens only), 2 floating point operations per weight and token forward and 4 backward, at the speed of a
large product on all threads. Attention's own products, the optimizer and everything else count nothing.
"""

import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.end_to_end.runs import Lab
from benchmarks.end_to_end.workload import RESPONSES, TOKENS

PROMPT_TOKENS = 38
"""Of the workload's prompts in SmolLM2's chat template, about."""
_SIZE, _REPEATS = 2048, 9


def run(lab: Lab) -> dict[str, float]:
    """Measure the products, and the runs unless another part did."""
    torch.set_num_threads(lab.threads)
    floor = TOKENS * RESPONSES / (update_flops(lab.model) / product_flops_per_s())
    return {"floor_tokens_per_s": floor, "hf_vs_floor": statistics.median(lab.ours("hf", "float32")) / floor}


def update_flops(model: Path) -> float:
    """Return floating point operations of an update whose responses all have the most tokens."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * key_heads)
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])
    logits = hidden * config["vocab_size"]
    responses = RESPONSES * TOKENS
    once: float = 2.0 * (layers * (PROMPT_TOKENS + responses) + logits * responses)
    return float(once + 3 * once)  # generated; forward and backward


def product_flops_per_s() -> float:
    """Return the speed of a large product in float32, the median of several."""
    left, right = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - began)
    return 2.0 * _SIZE**3 / statistics.median(times)
