"""Column tasks one after another: in which pieces, and that ranks without rows take part where they must."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from tq.columns import Column, PackedBatch
from workers.rows.packed_rows import responses_of
from workers.settings.engines import TrainingConfig
from workers.tasks import chain
from workers.tasks.chain import TaskChain, open_task
from workers.tasks.column_tasks import ColumnTask

EMPTY = PackedBatch((), {})


class Plus(ColumnTask):
    """Writes `target` = `source` + 1."""

    def __init__(self, source: str, target: str, num_rows: int = 4, *, collective: bool = False) -> None:
        self._source, self._target = source, target
        self.num_rows, self.collective = num_rows, collective
        self.sizes: list[int] = []
        self.closed = False
        self.held: int | None = None

    @property
    def version(self) -> int | None:
        return self.held

    def compute_columns(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        self.sizes.append(len(batch))
        if not len(batch):
            return {}
        return {self._target: Column.of_scalars(batch[self._source].values + 1)}

    def take_weights(self, step: int) -> None:
        self.held = step

    def close(self) -> None:
        self.closed = True


def make(monkeypatch: pytest.MonkeyPatch, **tasks: Plus) -> TaskChain:
    monkeypatch.setattr(chain, "open_task", lambda name, *_: tasks[name])
    context: Any = SimpleNamespace(timeline=NoTimeline())
    return TaskChain(list(tasks), context)


def rows(number: int) -> PackedBatch:
    return PackedBatch(tuple(range(number)), {"a": Column.of_scalars(torch.arange(number))}, (7,) * number)


@pytest.mark.parametrize(("role", "budget", "expected"), [("actor", 0, 64), ("actor", 9, 8), ("critic", 9, 8)])
def test_values_of_a_round_that_is_cut_by_tokens_are_computed_in_pieces(role: str, budget: int, expected: int) -> None:
    sizes = [f"{section}.max_tokens_per_micro_batch={budget}" for section in ("actor", "critic")]
    config = load_config(find_recipe("quickstart-ppo-cpu"), overrides=["ref.micro_batch_size=8", *sizes])
    context: Any = SimpleNamespace(config=config, gang=SimpleNamespace(role=role))
    critic: Any = SimpleNamespace(values=None)
    assert open_task("values", context, None, critic).num_rows == expected


def test_later_tasks_read_what_earlier_ones_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make(monkeypatch, b=Plus("a", "b"), c=Plus("b", "c")).add_columns(rows(3), step=1)
    assert batch["b"].values.tolist() == [1, 2, 3]
    assert batch["c"].values.tolist() == [2, 3, 4]
    assert batch.groups == (7, 7, 7)


def test_rows_come_in_pieces_of_what_a_task_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Plus("a", "b", num_rows=2), Plus("b", "c", num_rows=5)
    tasks = make(monkeypatch, b=small, c=large)
    assert tasks.num_rows == 2
    assert tasks.add_columns(rows(5), step=1)["c"].values.tolist() == [2, 3, 4, 5, 6]
    assert (small.sizes, large.sizes) == ([2, 2, 1], [5])


def test_ranks_without_rows_compute_collective_tasks_as_often_as_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = Plus("a", "b", num_rows=2), Plus("a", "c", num_rows=2, collective=True)
    tasks = make(monkeypatch, b=alone, c=together)
    assert tasks.add_columns(EMPTY, step=1, largest_slice=5) == EMPTY
    assert (alone.sizes, together.sizes) == ([], [0, 0, 0])
    assert tasks.add_columns(rows(3), step=1, largest_slice=5)["c"].values.tolist() == [1, 2, 3]
    assert (alone.sizes, together.sizes[3:]) == ([2, 1], [2, 1, 0])


def test_only_tasks_that_need_certain_weights_take_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    free, gated = Plus("a", "b"), Plus("a", "c")
    gated.held = 2
    tasks = make(monkeypatch, b=free, c=gated)
    assert tasks.version == 2
    tasks.take_weights(3)
    assert (free.version, gated.version, tasks.version) == (None, 3, 3)
    tasks.close()
    assert free.closed and gated.closed


class Doubled(ColumnTask):
    """Writes twice each drawn token, and notes the samples of each forward."""

    num_rows = 1

    def __init__(self, cut: TrainingConfig, *, collective: bool = False) -> None:
        self.cut, self.collective = cut, collective
        self.forwards: list[list[int]] = []

    def compute_columns(self, batch: PackedBatch, step: int) -> Mapping[str, Column]:
        self.forwards.append(batch["sample_lengths"].values.tolist() if len(batch) else [])
        drawn = responses_of(batch) if len(batch) else []
        return {"doubled": Column.of_rows([2 * one for one in drawn])} if drawn else {}

    def close(self) -> None:
        pass


def rollouts(*rows: list[int]) -> PackedBatch:
    """Rows with samples of these lengths; token k of all is k, and every second one was drawn."""
    total = sum(map(sum, rows))
    lengths = torch.tensor([sum(samples) for samples in rows], dtype=torch.int32)
    columns = {
        "tokens": Column(torch.arange(total), lengths),
        "sample_lengths": Column.of_rows([torch.tensor(samples, dtype=torch.int32) for samples in rows]),
        "response_mask": Column((torch.arange(total) % 2).to(torch.uint8), lengths),
    }
    return PackedBatch(tuple(range(len(rows))), columns)


def cut_tasks(monkeypatch: pytest.MonkeyPatch, *, collective: bool, most: int = 0) -> tuple[TaskChain, Doubled]:
    task: Any = Doubled(TrainingConfig(max_tokens_per_micro_batch=10), collective=collective)
    monkeypatch.setattr(chain, "max_over_ranks", lambda number: max(number, most))
    monkeypatch.setattr(chain, "open_task", lambda name, *_: task)
    context: Any = SimpleNamespace(timeline=NoTimeline(), device=torch.device("cpu"))
    return TaskChain(["doubled"], context), task


def test_rows_of_several_samples_are_computed_in_pieces_that_fit_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, task = cut_tasks(monkeypatch, collective=False)
    made = tasks.add_columns(rollouts([8, 7], [2, 3, 4], [12]), step=1)["doubled"]
    assert sorted(length for forward in task.forwards for length in forward) == [2, 3, 4, 7, 8, 12]
    assert all(sum(forward) <= 10 or len(forward) == 1 for forward in task.forwards)
    assert made.values.tolist() == [2 * token for token in range(36) if token % 2]
    assert made.lengths.tolist() == [7, 5, 6]


def test_ranks_compute_as_many_pieces_as_the_rank_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, task = cut_tasks(monkeypatch, collective=True, most=3)
    assert tasks.add_columns(EMPTY, step=1, largest_slice=5) == EMPTY
    assert task.forwards == [[], [], []]
    tasks.add_columns(rollouts([4, 4]), step=1, largest_slice=5)
    assert task.forwards[3:] == [[4, 4], [], []]


@pytest.mark.parametrize("function", ["tools", None])
def test_values_of_rollouts_with_any_number_of_samples_are_cut_by_tokens(function: str | None) -> None:
    sizes = [f"{section}.max_tokens_per_micro_batch=9" for section in ("actor", "critic")]
    own = [] if function is None else [f"rollout.function={function}"]
    config = load_config(find_recipe("quickstart-ppo-cpu"), overrides=[*sizes, *own])
    context: Any = SimpleNamespace(config=config, gang=SimpleNamespace(role="critic"))
    critic: Any = SimpleNamespace(values=None)
    assert open_task("values", context, None, critic).cut == (config.critic if function else None)
