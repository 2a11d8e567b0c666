from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.config.load_config import load_config
from launcher.config.rules import check_batch_sizes, num_micro_batches
from workers.settings.run import RunConfig

Configure = Callable[[int, int, int, int], RunConfig]


@pytest.fixture
def configure(write_config: Callable[..., Path]) -> Configure:
    def build(groups: int, group_size: int, ranks: int, micro: int) -> RunConfig:
        schedule = {"rollout_batch_size": groups, "n_samples_per_prompt": group_size}
        source = write_config(schedule=schedule, actor={"micro_batch_size": micro})
        return load_config(source, roles=f"rollout:1,actor:{ranks}")

    return build


@pytest.mark.parametrize(
    ("groups", "group_size", "ranks", "micro", "expected"),
    [(32, 16, 4, 16, 8), (32, 16, 1, 64, 8), (8, 8, 2, 4, 8), (3, 2, 3, 2, 1), (4, 3, 1, 12, 1)],
)
def test_sizes_that_divide_are_accepted(
    configure: Configure, groups: int, group_size: int, ranks: int, micro: int, expected: int
) -> None:
    config = configure(groups, group_size, ranks, micro)
    check_batch_sizes(config)
    assert num_micro_batches(config) == expected


@pytest.mark.parametrize(
    ("groups", "group_size", "ranks", "micro", "expected"),
    [
        (8, 1, 1, 1, "schedule.n_samples_per_prompt: 1 is too few for grpo to compare; give 2 or more"),
        (
            10,
            4,
            4,
            4,
            "schedule.rollout_batch_size: 10 groups do not divide over actor:4; use 8 or 12 groups, or 2 or 5",
        ),
        (3, 4, 4, 4, "schedule.rollout_batch_size: 3 groups do not divide over actor:4; use 4 groups, or 3 actor"),
        (8, 4, 2, 6, "actor.micro_batch_size: 6 does not divide a rank's 16 samples per step"),
        (8, 4, 2, 6, "use 4 or 8"),
        (8, 4, 2, 64, "use 16"),
        (6, 4, 1, 6, "use 4 or 8"),
    ],
)
def test_sizes_that_do_not_divide_name_those_that_do(
    configure: Configure, groups: int, group_size: int, ranks: int, micro: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch_sizes(configure(groups, group_size, ranks, micro))
    assert expected in str(caught.value)


def test_mini_batches_are_whole_groups_of_equally_many_for_each_rank(write_config: Callable[..., Path]) -> None:
    def check(**actor: int) -> None:
        source = write_config(
            schedule={"rollout_batch_size": 12, "n_samples_per_prompt": 4}, actor={"micro_batch_size": 8} | actor
        )
        check_batch_sizes(load_config(source, roles="rollout:1,actor:2"))

    check(num_mini_batches=3)
    check(num_mini_batches=1, ppo_epochs=4)
    message = "actor.num_mini_batches: 4 mini-batches do not divide a rank's 6 groups per step .*; use 3 or 6"
    with pytest.raises(ConfigError, match=message):
        check(num_mini_batches=4, ppo_epochs=1)
    message = "actor.micro_batch_size: 8 does not divide a rank's 4 samples per update, 6 a step .*; use 4"
    with pytest.raises(ConfigError, match=message):
        check(num_mini_batches=6)
