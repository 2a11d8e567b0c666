"""The short form of `python benchmarks/colocated`: real runs of roles that take turns on the same devices."""

from pathlib import Path

import pytest

from benchmarks.colocated import part_kills, part_separate, part_turns

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_colocated_run_ends_with_the_parameters_of_a_separated_one(tmp_path: Path, num_ranks: int) -> None:
    found = [
        part_separate.train(tmp_path / roles, roles, 10)
        for roles in (f"rollout+actor:{num_ranks}", f"rollout:{num_ranks},actor:{num_ranks}")
    ]
    assert found[0][1] == found[1][1], "the same responses"
    assert part_separate.max_abs(found[0][0], found[1][0]) == 0


def test_kills_of_holders_and_sleepers_cost_no_group_and_repeat_none(tmp_path: Path) -> None:
    figures = part_kills.run(directory=tmp_path, num_kills=4, seed=1)
    assert figures == {"kills": 4, "skipped": 0, "twice": 0}


def test_the_turn_passes_twice_a_step(tmp_path: Path) -> None:
    part_turns.run(directory=tmp_path, short=True)
    passings = part_turns.passings_s(tmp_path / "turns")
    assert len(passings) >= 2 * part_turns.SHORT_STEPS and min(passings) >= 0, "never two sides at once"
