"""One rank of test_step_ranks: a step of each case, whose rows are divided over the ranks as unequally as they can be.

python step_rank.py DIR RANK NUM_RANKS
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tests.support.training_role import CountingRole
from tq.columns import Column, PackedBatch
from workers.engines.load_engine import load_train_engine, load_value_engine
from workers.rows.packed_rows import sample_columns, sequences_of
from workers.settings.run import RunConfig
from workers.tasks.chain import TaskChain
from workers.trainer.step_trainer import StepTrainer, critic_learner, policy_learner
from workers.trainer.tri_model import TriModel

CPU = torch.device("cpu")
GROUPS, SIZE, STEP = 4, 2, 3
ROUNDS = {1: [[(0, 1)], [(2, 3)]], 2: [[(0,), (1,)], [(2, 3), ()]]}
"""Number of ranks -> for each round the groups of every rank."""
CASES = {
    "grpo": ("actor.max_tokens_per_micro_batch=12",),
    "grpo_by_response": ("algorithm.loss_normalization=sequence", "rollout.truncated=mask"),
    "gspo": ("algorithm.name=gspo",),
    "dapo": ("algorithm.name=dapo", "actor.num_mini_batches=2", "rollout.truncated=mask"),
    "rloo": ("algorithm.name=rloo", "actor.max_tokens_per_micro_batch=1"),
    "reinforce_plus_plus": ("algorithm.name=reinforce_plus_plus", "actor.max_tokens_per_micro_batch=1000"),
    "tri_model": ("actor.tri_model=true", "actor.ppo_epochs=2", "algorithm.kl_coef=0.1"),
    "ppo": ("algorithm.name=ppo", "actor.num_mini_batches=2", "critic.lr=0.01", "critic.eps=0.05"),
}


class Loader:
    """Two rounds; a rank may have no rows of one."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._rounds = rank, ROUNDS[num_ranks]
        self.stopped, self.largest_slice, self.round_partition = False, 0, STEP

    def __iter__(self) -> Iterator[PackedBatch]:
        for shares in self._rounds:
            self.largest_slice = SIZE * max(map(len, shares))
            yield rows_of(shares[self._rank])


def rows_of(groups: tuple[int, ...]) -> PackedBatch:
    """Return groups whose responses have 1 to 11 tokens."""
    if not groups:
        return PackedBatch((), {})
    batches = []
    for group in groups:
        chance = torch.Generator().manual_seed(group)
        responses = [torch.randint(3, 12, (length,), generator=chance) for length in (1, 2 + 3 * group)]
        drawn_by = torch.tensor(STEP - 1, dtype=torch.int32)
        prompts = [torch.randint(3, 12, (2 + group % 2,), generator=chance)] * SIZE
        columns = {
            "prompts": Column.of_rows(prompts),
            **sample_columns(prompts, responses),
            "rollout_log_probs": Column.of_rows([-2 - torch.rand(len(one), generator=chance) for one in responses]),
            "versions": Column.of_rows([drawn_by.expand(len(one)).contiguous() for one in responses]),
            "rewards": Column.of_scalars(torch.tensor([1.0, 0.1 * group])),
            "correct": Column.of_scalars(torch.tensor([True, False])),
            "truncated": Column.of_scalars(torch.tensor([False, group == 1])),
            "epochs": Column.of_scalars(torch.zeros(SIZE, dtype=torch.int32)),
        }
        batches.append(PackedBatch(tuple(range(group * SIZE, (group + 1) * SIZE)), columns, (group,) * SIZE))
    return PackedBatch.concatenate(batches)


def configure(*settings: str) -> RunConfig:
    # With the usual tiny eps AdamW would hide a wrong factor on the gradients.
    small = (
        f"schedule.rollout_batch_size={GROUPS}", f"schedule.n_samples_per_prompt={SIZE}", "algorithm.kl_coef=0",
        "actor.micro_batch_size=2", "actor.lr=0.01", "actor.eps=0.05", "actor.grad_clip=100", "launcher.device=cpu",
        "rollout.max_response_tokens=16",
    )  # fmt: skip
    return load_config(find_recipe("quickstart"), overrides=(*small, *settings), roles="rollout:1,actor:1")


def train(
    config: RunConfig, rank: int, num_ranks: int, *, device: torch.device = CPU, kind: type[StepTrainer] = StepTrainer
) -> dict[str, Any]:
    """Train one step; returns losses, gradient norms, and what the policy then thinks of all responses."""
    context: Any = SimpleNamespace(
        config=config, device=device, timeline=NoTimeline(), report_state=lambda *_, **__: None,
        report_progress=lambda: None, job=SimpleNamespace(lineage=0),
        elapsed_s=0.0, run_dir=Path("nowhere"), gang=SimpleNamespace(role="actor"),
    )  # fmt: skip
    policy = load_train_engine(config, device=device)
    critic = load_value_engine(config, device=device) if config.algorithm.has_critic else None
    tasks = ["compute_advantages_and_returns"]
    if critic is not None:
        tasks = ["values", *tasks, "critic_train"]
    if config.actor.num_updates > 1 and not config.actor.tri_model:
        tasks.insert(0, "actor_log_probs")
    loader: Any = Loader(rank, num_ranks)
    learners = [policy_learner(config, policy), *([] if critic is None else [critic_learner(config, critic)])]
    record = kind(
        context,
        learners,
        loader,
        columns=TaskChain(tasks, context, policy, critic=critic),
        training=config.actor,
        tri_model=TriModel(config, policy) if config.actor.tri_model else None,
        role=CountingRole(),
    ).train(STEP)
    assert record is not None
    made = [*record.policy.made, *record.critic.made]
    everything = sequences_of(rows_of(tuple(range(GROUPS))))
    found = {
        "loss": [update.loss for update in made],
        "grad_norm": [update.stats.grad_norm for update in made],
        "log_probs": policy.log_probs(everything).tolist(),
    }
    return found if critic is None else found | {"values": critic.values(everything).tolist()}


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    root, rank, num_ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(str(root / f"store-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = {name: train(configure(*settings), rank, num_ranks) for name, settings in CASES.items()}
    if rank == 0:
        torch.save(found, root / f"found-{num_ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
