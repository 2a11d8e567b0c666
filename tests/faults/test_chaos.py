"""The short form of `python benchmarks/chaos`: real runs, in which processes are killed, lose and repeat nothing."""

from pathlib import Path

import pytest

from benchmarks.chaos import part_actor, part_determinism, part_elastic, part_kills, part_rollout
from benchmarks.chaos.options import Options

KILLS = 8
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(name="options")
def _options(tmp_path: Path) -> Options:
    return Options(short=True, seed=0, kills=KILLS, directory=tmp_path, say=print)


def test_random_kills_of_everybody_cost_no_group_and_repeat_none(options: Options) -> None:
    result = part_kills.run(options)
    assert result.details["kills"]["problems"] == []
    assert (result.figures["kills"], result.figures["skipped"], result.figures["twice"]) == (KILLS, 0, 0)


def test_lost_rollout_comes_back_and_the_others_are_left_alone(options: Options) -> None:
    details = part_rollout.run(options).details["rollout"]
    assert details["problems"] == []
    assert [loss["signal"] for loss in details["losses"]] == ["SIGKILL", "SIGSTOP"]


def test_dead_actor_goes_back_to_its_checkpoint_while_rollouts_stay(options: Options) -> None:
    result = part_actor.run(options)
    assert result.details["actor"]["problems"] == []
    assert (result.figures["skipped"], result.figures["twice"]) == (0, 0)


def test_run_that_crashed_ends_with_the_parameters_of_one_that_did_not(options: Options) -> None:
    result = part_determinism.run(options)
    assert result.figures["sha_equal"], result.details


def test_other_numbers_of_ranks_and_units_go_on_without_a_loss(options: Options) -> None:
    result = part_elastic.run(options)
    assert result.details["elastic"]["problems"] == []
    assert (result.figures["skipped"], result.figures["twice"]) == (0, 0)
