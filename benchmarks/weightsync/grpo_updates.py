"""Real GRPO updates in one process: the run's own engines, rewards, advantages and loss, without the queue."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.weightsync.setup import CPU
from tq.columns import Column, PackedBatch
from weightsync.sender import Shard
from workers.algorithms.load_algorithm import load_algorithm
from workers.data.prompt_dataset import Prompt, PromptDataset
from workers.data.prompt_rows import read_prompt_rows
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import GenerateRequest, Generation, generate
from workers.engines.load_engine import load_generate_engine, load_train_engine
from workers.rewards.scorer import Scorer
from workers.rows.packed_rows import sample_columns, samples_of, sequences_of
from workers.settings.run import RunConfig


class GrpoUpdates:
    """A policy and what trains it. The default process group becomes this process alone."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._trainer = load_train_engine(config, device=CPU)
        self._generator = load_generate_engine(config, config.rollout, device=CPU)
        self._algorithm = load_algorithm(config.algorithm, config.rollout)
        model_dir = Path(config.model.path)
        rows = read_prompt_rows(config.data.file, config.data)
        self._prompts = PromptDataset(rows, config.data, model_dir=model_dir, seed=config.seed)
        self._scorer = Scorer(config.reward, load_tokenizer(model_dir))

    def shards(self) -> list[Shard]:
        """Return the weights, whole."""
        return list(self._trainer.shards())

    def run(self, number: int) -> Iterator[tuple[float, float]]:
        """Train so many steps; after each, yields mean reward and gradient norm."""
        for step in range(number):
            batch = self._response(step)
            loss = self._algorithm.loss(batch, device=CPU)
            self._trainer.forward_backward(sequences_of(batch), loss)
            stats = self._trainer.step(self._algorithm.scale(self._algorithm.counts(batch)))
            yield float(batch["rewards"].values.mean()), stats.grad_norm

    def _response(self, step: int) -> PackedBatch:
        schedule = self._config.schedule
        size, first = schedule.n_samples_per_prompt, step * schedule.rollout_batch_size
        prompts = [self._prompts.prompt_of_group(first + k // size) for k in range(schedule.rollout_batch_size * size)]
        self._generator.load_weights(_by_name(self.shards()))
        offset = first * size
        requests = [GenerateRequest(k, prompt.tokens, seed=offset + k) for k, prompt in enumerate(prompts)]
        responses = sorted(generate(self._generator, requests), key=lambda response: response.index)
        return self._batch(prompts, responses, size)

    def _batch(self, prompts: Sequence[Prompt], responses: Sequence[Generation], size: int) -> PackedBatch:
        texts, wanted = [prompt.tokens for prompt in prompts], [prompt.ground_truth for prompt in prompts]
        rows = zip(texts, [response.response_R for response in responses], wanted, strict=True)
        scores = [scored.result() for scored in [self._scorer.submit(*row) for row in rows]]
        rewards = torch.tensor([score.reward for score in scores])
        columns = {
            **sample_columns(texts, [response.response_R for response in responses]),
            "rollout_log_probs": Column.of_rows([response.log_probs_R for response in responses]),
            "truncated": Column.of_scalars(torch.tensor([response.truncated for response in responses])),
            "rewards": Column.of_scalars(rewards),
        }
        batch = PackedBatch(tuple(range(len(responses))), columns)
        return samples_of(batch.with_columns(self._algorithm.advantages(batch, group_size=size)))


def _by_name(shards: Sequence[Shard]) -> Mapping[str, Tensor]:
    return {shard.name: shard.values.detach().reshape(shard.shape) for shard in shards}
