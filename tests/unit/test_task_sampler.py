"""Curricula of the user's: what they are told when, and that a run goes on with the tasks that it had."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.errors import ConfigError, DeadlineExceeded, UserCodeFailed
from asyncflow.run_files import LEDGER_FILE, SAMPLER_FILE
from launcher.run.restore import CUT_FILES, cut_lines
from workers.admission.admission_state import AdmissionState
from workers.admission.task_sampler import StepResults, TaskSampler, UserSampler, read_draws, try_sampler
from workers.settings.data import DataConfig
from workers.settings.schedule import ScheduleConfig

OWN = """
from pydantic import Field
from asyncflow.settings import Settings

class Hardest:
    def __init__(self, size, seed, width=1):
        self.size, self.seen, self.drawn = size, {}, seed

    def next(self):
        self.drawn += 1
        worst = min(self.seen, key=self.seen.get, default=0)
        return (worst + self.drawn) % self.size

    def told(self, index, rewards):
        self.seen[str(index)] = sum(rewards) / len(rewards) if rewards else 1.0
        self.seen = {int(index): value for index, value in self.seen.items()}

    def state(self):
        return {"seen": {str(index): value for index, value in self.seen.items()}, "drawn": self.drawn}

    def load(self, state):
        self.seen = {int(index): value for index, value in state["seen"].items()}
        self.drawn = state["drawn"]

class Typed(Hardest):
    class Config(Settings):
        width: int = Field(1, ge=1)

class Outside(Hardest):
    def next(self):
        return self.size

class Deaf(Hardest):
    def told(self, index, rewards):
        raise RuntimeError("what?")

class Stateless(Hardest):
    def state(self):
        return object()
"""
SCHEDULE = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=2, max_staleness=1)


@pytest.fixture(autouse=True)
def own_samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_samplers.py").write_text(OWN)
    monkeypatch.setenv("ASYNCFLOW_CODE_DIRECTORY", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def data(name: str = "Hardest", **options: Any) -> DataConfig:
    return DataConfig(path="rows.jsonl", sampler=f"own_samplers:{name}", sampler_options=options)


class Noting:
    """Draws 0, 1, 2 ... and notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, list[float]]] = []
        self.drawn = 0

    def next(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    def told(self, index: int, rewards: list[float]) -> None:
        self.heard.append((index, rewards))

    def state(self) -> Any:
        return self.drawn

    def load(self, state: Any) -> None:
        self.drawn = state

    def close(self) -> None:
        pass


def trained(
    run_dir: Path, step: int, rewards: dict[int, list[float | None]], *, filtered: tuple[int, ...] = ()
) -> None:
    """Write a step's ledger lines, groups in an order that timing decided."""
    with (run_dir / LEDGER_FILE).open("a") as file:
        for group in filtered:
            file.write(json.dumps({"step": step, "group": group, "filtered": True}) + "\n")
        for group in sorted(rewards, reverse=True):
            file.write(json.dumps({"step": step, "group": group, "indices": [], "rewards": rewards[group]}) + "\n")


def opened(
    run_dir: Path, sampler: Any, *, start_step: int = 0, progress: Callable[[], None] = lambda: None
) -> TaskSampler:
    return TaskSampler(sampler, run_dir, batch=2, start_step=start_step, progress=progress)


def test_results_are_told_in_order_up_to_the_step_before_the_weights_that_the_draw_waits_for(tmp_path: Path) -> None:
    noting = Noting()
    tasks = opened(tmp_path, noting)
    tasks.draw_tasks([0, 1], 0)
    tasks.draw_tasks([2, 3], 0)
    trained(tmp_path, 1, {0: [1.0, 0.0], 3: [1.0, None]}, filtered=(1,))
    trained(tmp_path, 2, {2: [0.5, 0.5], 4: [0.0, 0.0]})
    tasks.draw_tasks([4, 5], 1)
    assert noting.heard == [], "step 1's lines may not be there yet when its weights are"
    tasks.draw_tasks([6, 7], 3)
    assert noting.heard == [(0, [1.0, 0.0]), (1, []), (3, [1.0]), (2, [0.5, 0.5]), (4, [0.0, 0.0])]
    assert [tasks.index_of(group) for group in range(8)] == list(range(8))
    tasks.close()


def run_steps(run_dir: Path, steps: range, *, start_step: int = 0) -> list[tuple[int, dict[int, int]]]:
    """Train steps with a real sampler, as admission and trainer do; rewards follow from the tasks."""
    tasks = opened(run_dir, UserSampler(data(), size=7, seed=3), start_step=start_step)
    state = AdmissionState(
        SCHEDULE, version=start_step, last_step=steps.stop - 1, trained=range(2 * start_step)
    )  # fmt: skip
    for version in (start_step, *steps):
        state.note_published(version)
        for step in state.admit_steps():
            tasks.draw_tasks([group.group for group in state.groups_of(step)], state.required_version(step))
        if version in steps:
            groups = [group.group for group in state.groups_of(version)] if version > start_step else []
            trained(run_dir, version, {group: [tasks.index_of(group) / 7, 0.0] for group in groups})
    tasks.close()
    return [(draw.step, draw.indices) for draw in read_draws(run_dir / SAMPLER_FILE)]


def test_run_that_goes_back_to_a_checkpoint_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole = run_steps(tmp_path, range(1, 9))
    assert len({tuple(indices.values()) for _, indices in whole}) > 3, "what it is told matters"
    for name in CUT_FILES:
        cut_lines(tmp_path / name, 4)
    assert len(read_draws(tmp_path / SAMPLER_FILE)) == 6, "steps 1 to 6: those after 4 were drawn for its weights"
    assert run_steps(tmp_path, range(5, 9), start_step=4) == whole


def test_groups_that_were_drawn_keep_their_tasks_when_the_process_starts_again(tmp_path: Path) -> None:
    opened(tmp_path, Noting()).draw_tasks([0, 1], 0)
    with (tmp_path / SAMPLER_FILE).open("a") as file:
        file.write('{"step": 1, "told": 0, "ind')
    again = Noting()
    tasks = opened(tmp_path, again)
    tasks.draw_tasks([1, 2], 0)
    assert [tasks.index_of(group) for group in (0, 1, 2)] == [0, 1, 2] and again.drawn == 3
    assert [draw.indices for draw in read_draws(tmp_path / SAMPLER_FILE)] == [{0: 0, 1: 1}, {2: 2}]
    tasks.close()


def test_run_that_goes_on_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.sampler: its state is missing, .*sampler.jsonl; restore the file"):
        opened(tmp_path, Noting(), start_step=4)


def test_results_that_do_not_come_are_named(tmp_path: Path) -> None:
    trained(tmp_path, 2, {5: [1.0]})
    clock = iter([0.0, 61.0])
    results = StepResults(tmp_path / LEDGER_FILE, batch=2, timeout_s=60, clock=lambda: next(clock))
    with pytest.raises(DeadlineExceeded, match=r"ledger.jsonl: lacks lines of step 2 after 60 s"):
        results.results_of_step(2)


def test_results_that_wait_in_the_trainers_memory_for_room_on_the_disk_are_waited_for(tmp_path: Path) -> None:
    def disk_is_full(directory: Path) -> bool:
        trained(tmp_path, 1, {0: [1.0], 1: [0.0]})
        return True

    times = iter([0.0, 61.0, 61.0, 62.0])
    ledger = tmp_path / LEDGER_FILE
    results = StepResults(ledger, batch=2, timeout_s=60, clock=lambda: next(times), is_full=disk_is_full)
    assert results.results_of_step(1) == [(0, [1.0]), (1, [0.0])]


def test_draw_waits_for_room_on_the_disk_and_says_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    said: list[int] = []
    write = os.write

    def full_twice(descriptor: int, data: bytes) -> int:
        if len(refused) < 2:
            refused.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    tasks = opened(tmp_path, Noting(), progress=lambda: said.append(len(refused)))
    monkeypatch.setattr("asyncflow.json_lines.os.write", full_twice)
    tasks.draw_tasks([0, 1, 2], 0)
    assert [draw.indices for draw in read_draws(tmp_path / SAMPLER_FILE)] == [{0: 0, 1: 1, 2: 2}]
    assert said.count(0) >= 3 and said[-1] == 2, "before each call, and while it waits"
    tasks.close()


def test_sampler_that_can_be_used_is_accepted() -> None:
    try_sampler(data(width=2), size=5, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Outside", {}, r"returned 5 on next\(\); return a task's index, 0 to 4"),
        ("Deaf", {}, r"raised RuntimeError: what\? on told\(index=\d, rewards=\[0.0, 1.0\]\)"),
        ("Stateless", {}, "raised something that cannot be passed on: TypeError"),
    ],
)
def test_sampler_that_cannot_be_used_is_named(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises((ConfigError, UserCodeFailed), match=f"^data.sampler: own_samplers:{name} {message}"):
        try_sampler(data(name, **options), size=5, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Hardest", {"height": 1}, ": own_samplers:Hardest cannot be made with height: got an unexpected keyword"),
        ("Hardest", {"seed": 1}, ": own_samplers:Hardest cannot be made with seed: .* multiple values for keyword"),
        ("Typed", {"width": 0}, ".width: 0 cannot be used; it must be greater than or equal to 1"),
    ],
)
def test_options_that_a_sampler_does_not_take_are_named(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.sampler_options{message}"):
        try_sampler(data(name, **options), size=5, seed=0)
