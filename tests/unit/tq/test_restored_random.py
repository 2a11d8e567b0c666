"""Runs that crash at any moment and go on from their last checkpoint, with another number of units each time: every
group is trained once, within the staleness bound, whatever of the queue's samples was kept."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from restored_queue import Life, Saved

from workers.settings.schedule import Fill, ScheduleConfig

LAST_STEP = 12
ENOUGH = 20_000


def schedule(random: Random, fill: Fill) -> ScheduleConfig:
    least = 2 if fill is Fill.FIRST_READY else 0
    return ScheduleConfig(
        rollout_batch_size=random.randint(2, 4),
        n_samples_per_prompt=random.randint(1, 2),
        max_staleness=random.randint(least, least + 3),
        fill=fill,
    )


def run(root: Path, seed: int, fill: Fill, *, crashes: int) -> int:
    """Return how many samples were kept, over all crashes."""
    random = Random(seed)
    config = schedule(random, fill)
    saved, num_kept = Saved(0, (), root / "none"), 0
    starts: list[int] = []
    for left in range(crashes, -1, -1):
        starts.append(saved.step)
        life = Life(random, config, root, last_step=LAST_STEP, saved=saved, starts=starts)
        until = random.randint(50, 800) if left else ENOUGH
        for _ in range(until):
            if life.version >= LAST_STEP:
                break
            life.act()
        num_kept += life.num_kept
        saved = life.saved or saved
    assert life.version == LAST_STEP, "it hangs"
    groups = [group for _, group in life.ledger]
    assert sorted(groups) == list(range(LAST_STEP * config.rollout_batch_size))
    steps = [step for step, _ in life.ledger]
    assert all(steps.count(step) == config.rollout_batch_size for step in range(1, LAST_STEP + 1))
    return num_kept


@pytest.mark.parametrize("fill", Fill)
def test_every_group_is_trained_once_whenever_the_run_crashes(tmp_path: Path, fill: Fill) -> None:
    num_kept = 0
    num_runs = 2 * settings.default.max_examples // 5
    for seed in range(num_runs):
        root = tmp_path / str(seed)
        root.mkdir()
        num_kept += run(root, seed, fill, crashes=3)
    assert num_kept > 2 * num_runs, "the checkpoints' samples were hardly used"
