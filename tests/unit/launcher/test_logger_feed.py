"""What a logger is given, over resumes, restores and deaths; without a process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError
from launcher.loggers.backends import Histogram, Logger
from launcher.loggers.feed import SHOW_EVERY_S, Feed, LoggerProgress, figures
from tests.support.logged_runs import add_sample, add_steps, append, go_back


class KeepingLogger(Logger):
    """Notes all that it is given; `forgets`: it can rewind."""

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets
        self.given: list[tuple[int, Mapping[str, float]]] = []
        self.tables: list[tuple[int, list[int]]] = []
        self.histograms: Mapping[str, Histogram] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.given.append((step, metrics))

    def show(self, step: int, rows: Sequence[Mapping[str, Any]], histograms: Mapping[str, Histogram]) -> None:
        self.tables.append((step, [row["step"] for row in rows]))
        self.histograms = histograms

    def rewind(self, step: int) -> bool:
        if self.forgets:
            self.given = [one for one in self.given if one[0] < step]
        return self.forgets

    @property
    def steps(self) -> list[int]:
        return [step for step, metrics in self.given if "reward_mean" in metrics]

    @property
    def evaluated(self) -> list[int]:
        return [step for step, metrics in self.given if "evaluation/accuracy" in metrics]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("loggers", "samples"):
        (tmp_path / name).mkdir()
    return tmp_path


def feed_of(run_dir: Path, logger: Logger) -> Feed:
    """Return the feed of a process that has just started."""
    path = run_dir / "loggers" / "my.json"
    return Feed(run_dir, logger, LoggerProgress.load(path), path)


def evaluate(run_dir: Path, step: int, lineage: int = 0) -> None:
    append(run_dir / "evaluation.jsonl", {"step": step, "lineage": lineage, "accuracy": 0.25})


def test_a_step_has_its_numbers_and_histograms_by_name(run_dir: Path) -> None:
    add_steps(run_dir, 1, 1)
    logger = KeepingLogger(forgets=False)
    feed_of(run_dir, logger).read(0.0)
    assert logger.given == [(1, {"lineage": 0, "reward_mean": 0.5, "samples": 4, "idle_fraction/actor": 0.25})]
    assert logger.histograms == {"histograms/reward": {0.5: 3, 1.0: 1}, "histograms/response_tokens": {12.0: 4}}
    assert list(logger.histograms["histograms/reward"]) == [0.5, 1.0]


def test_objects_inside_a_line_become_paths_and_what_is_no_number_is_left_out() -> None:
    assert figures({"a": {"b": 1, "c": {"d": 2.5}}, "e": None, "f": "text"}) == {"a/b": 1, "a/c/d": 2.5}


@pytest.mark.parametrize("forgets", [False, True])
def test_no_step_is_logged_twice_though_the_run_goes_back_and_the_logger_starts_again(
    run_dir: Path, *, forgets: bool
) -> None:
    logger = KeepingLogger(forgets=forgets)
    add_steps(run_dir, 1, 5, reward=0.1)
    for step in (0, 4):
        evaluate(run_dir, step)
    feed_of(run_dir, logger).read(0.0)
    restarted = feed_of(run_dir, logger)
    restarted.read(0.0)
    assert logger.steps == [1, 2, 3, 4, 5]
    go_back(run_dir, 3)
    add_steps(run_dir, 4, 4, lineage=1, reward=0.2)
    restarted.read(0.0)
    evaluate(run_dir, 4, lineage=1)
    add_steps(run_dir, 5, 7, lineage=1, reward=0.2)
    feed_of(run_dir, logger).read(0.0)
    rewards = {step: metrics["reward_mean"] for step, metrics in logger.given if "reward_mean" in metrics}
    assert sorted(logger.steps) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(logger.evaluated) == [0, 4]
    assert rewards == {step: 0.2 if step > 5 or (forgets and step > 3) else 0.1 for step in range(1, 8)}


def test_a_run_that_starts_over_is_logged_again_where_the_logger_can_forget(run_dir: Path) -> None:
    logger = KeepingLogger(forgets=True)
    add_steps(run_dir, 1, 2)
    feed_of(run_dir, logger).read(0.0)
    evaluate(run_dir, 0)
    go_back(run_dir, 0)
    add_steps(run_dir, 1, 1, lineage=1, reward=0.9)
    feed_of(run_dir, logger).read(0.0)
    assert [(step, metrics["reward_mean"]) for step, metrics in logger.given if step] == [(1, 0.9)]


def test_what_is_under_way_when_the_logger_dies_is_not_logged_a_second_time(run_dir: Path) -> None:
    class Dying(KeepingLogger):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            super().log(step, metrics)
            if step == 2:
                raise OSError("the network is gone")

    logger = Dying(forgets=False)
    add_steps(run_dir, 1, 3)
    with pytest.raises(OSError, match="network"):
        feed_of(run_dir, logger).read(0.0)
    feed_of(run_dir, logger).read(0.0)
    assert logger.steps == [1, 2, 3]


def test_samples_are_shown_now_and_then_up_to_the_newest_step_and_once(run_dir: Path) -> None:
    logger = KeepingLogger(forgets=False)
    feed = feed_of(run_dir, logger)
    add_steps(run_dir, 1, 1)
    add_sample(run_dir, 2, 0)  # of a step that is not trained yet
    feed.read(0.0)
    assert logger.tables == [(1, [1, 1])]
    add_steps(run_dir, 2, 2)
    feed.read(SHOW_EVERY_S / 2)
    assert len(logger.tables) == 1
    feed.read(SHOW_EVERY_S)
    assert logger.tables[1:] == [(2, [2, 2, 2])]
    feed_of(run_dir, logger).read(0.0, last=True)
    assert len(logger.tables) == 2


def test_half_a_line_of_a_killed_process_costs_no_logger_its_samples(run_dir: Path) -> None:
    logger = KeepingLogger(forgets=False)
    with (run_dir / "samples" / "rollout-0.jsonl").open("w") as file:
        file.write('{"step": 1, "gro{"step": 1}\n{"group": 1}\n')
    add_steps(run_dir, 1, 2)
    feed = feed_of(run_dir, logger)
    feed.read(0.0, last=True)
    assert logger.tables == [(2, [1, 1, 2, 2])]
    again = feed_of(run_dir, logger)
    assert again._row_to_show(b'{"step": 2}') is None and again._row_to_show(b'{"step": 3}') is not None


def test_the_end_of_the_run_shows_the_samples_that_are_left(run_dir: Path) -> None:
    logger = KeepingLogger(forgets=False)
    feed = feed_of(run_dir, logger)
    add_steps(run_dir, 1, 1)
    feed.read(0.0)
    add_steps(run_dir, 2, 30)
    feed.read(1.0, last=True)
    step, rows = logger.tables[-1]
    assert step == 30 and rows == sorted(rows) and len(rows) == 16


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 1}'])
def test_progress_that_is_damaged_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{path}: .*; restore it, or remove it to log the run anew") as caught:
        LoggerProgress.load(path)
    assert "\n" not in str(caught.value)
