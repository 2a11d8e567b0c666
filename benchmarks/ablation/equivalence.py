"""Gradients of one step, streamed and not: the same rows, in whatever order they arrive, cut however they are.

The rows are recorded once: the quickstart model responses the quickstart's prompts. `sync` gets them in data order, in
micro-batches of the whole step's order; `periodic` as they end, group by group in a random order, in micro-batches of
other sizes. Only rounding may differ (Theorem 1 of arXiv 2511.18871).
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import Column, PackedBatch
from workers.algorithms.load_algorithm import load_algorithm
from workers.data.prompt_dataset import PromptDataset
from workers.data.prompt_rows import read_prompt_rows
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import GenerateRequest, generate
from workers.engines.fsdp.sharding import FsdpEngine
from workers.engines.hf.engine import HfEngine
from workers.engines.hf.weights import HfWeights
from workers.rewards.scorer import Scorer
from workers.rows.packed_rows import sample_columns, samples_of, sequences_of
from workers.settings.run import RunConfig

_CPU = torch.device("cpu")


def max_relative_difference(*, num_groups: int = 32, orders: int = 5) -> float:
    """Return the largest |streamed - sequential| / |sequential| of any parameter's gradient (L2 norms)."""
    overrides = ["schedule.mode=periodic", f"schedule.rollout_batch_size={num_groups}"]
    config = load_config(find_recipe("quickstart"), overrides=overrides)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = _recorded(config)
        sequential = _gradients(config, groups, micro_batch_size=config.actor.micro_batch_size)
        worst = 0.0
        for seed in range(orders):
            arrived = random.Random(seed).sample(groups, len(groups))
            size = config.schedule.n_samples_per_prompt * (1, 2, 3, 5, 8)[seed % 5]
            streamed = _gradients(config, arrived, micro_batch_size=size)
            worst = max(worst, *(_difference(*pair) for pair in zip(streamed, sequential, strict=True)))
        return worst
    finally:
        dist.destroy_process_group()


def _recorded(config: RunConfig) -> list[PackedBatch]:
    """Return the groups of step 1, in data order, with the columns that the loss reads."""
    model_dir = Path(config.model.path)
    rows = read_prompt_rows(config.data.file, config.data)
    dataset = PromptDataset(rows, config.data, model_dir=model_dir, seed=config.seed)
    engine = HfEngine(model_dir, config.model, sampling=config.rollout, device=_CPU)
    weights = HfWeights(model_dir)
    needs = engine.weight_needs()
    engine.load_weights({name: weights.read_rows(name, need.shape, 0, need.shape[0]) for name, need in needs.items()})
    scorer = Scorer(config.reward, load_tokenizer(model_dir))
    size = config.schedule.n_samples_per_prompt
    groups = []
    for group in range(config.schedule.rollout_batch_size):
        prompt = dataset.prompt_of_group(group)
        tokens = torch.as_tensor(prompt.tokens)
        asked = [GenerateRequest(group * size + k, tokens, seed=group * size + k) for k in range(size)]
        responses = sorted(generate(engine, asked), key=lambda one: one.index)
        scored = [scorer.submit(tokens, one.response_R, prompt.ground_truth).result() for one in responses]
        columns = {
            **sample_columns([tokens] * size, [one.response_R for one in responses]),
            "rollout_log_probs": Column.of_rows([one.log_probs_R for one in responses]),
            "ref_log_probs": Column.of_rows([one.log_probs_R - 0.1 for one in responses]),
            "truncated": Column.of_scalars(torch.tensor([one.truncated for one in responses])),
        }
        columns["rewards"] = Column.of_scalars(torch.tensor([float(one.reward) for one in scored]))
        batch = PackedBatch(tuple(one.index for one in responses), columns, (group,) * size)
        groups.append(
            batch.with_columns(load_algorithm(config.algorithm, config.rollout).advantages(batch, group_size=size))
        )
    scorer.close()
    return groups


def _gradients(config: RunConfig, groups: Sequence[PackedBatch], *, micro_batch_size: int) -> list[Tensor]:
    """Return the gradient of every parameter, summed over micro-batches of so many responses."""
    engine = FsdpEngine(
        Path(config.model.path), actor=config.actor, temperature=config.rollout.temperature,
        device=_CPU, seed=0,
    )  # fmt: skip
    algorithm = load_algorithm(config.algorithm, config.rollout)
    rows = samples_of(PackedBatch.concatenate(groups))
    for start in range(0, len(rows), micro_batch_size):
        batch = rows.select(range(start, min(start + micro_batch_size, len(rows))))
        engine.forward_backward(sequences_of(batch), algorithm.loss(batch, device=_CPU))
    return [parameter.grad for parameter in engine._model.parameters() if parameter.grad is not None]


def _difference(one: Tensor, other: Tensor) -> float:
    norm = float(other.norm())
    return float((one - other).norm()) / norm if norm else float(one.norm())
