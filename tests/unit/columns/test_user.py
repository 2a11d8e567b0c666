"""A user's task: what its function is given, and what becomes of what it returns."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError, UserCodeFailed
from tq.columns import Column, PackedBatch
from workers.data.tokenizer import TextDecoder
from workers.rows.packed_rows import sample_columns
from workers.settings.tasks import UserTaskConfig
from workers.tasks.chain import UserTask
from workers.tasks.row import TaskRow

SOURCE = """
def remember(row):
    with open("rows.txt", "a") as file:
        print(row, file=file)
    return len(row.response) / 4
async def waits_a_little(row):
    return 0.25
def fails(row):
    raise ValueError("no idea")
def waits(row):
    raise TimeoutError("no answer")
def leaves(row):
    raise SystemExit
def text(row):
    return "much"
def several(row):
    return [1.0, 2.0]
def large(row):
    return 1.5
def reward(row):
    return row.columns["rewards"]
def nothing(row):
    return float("nan")
def huge(row):
    return 1e39
def endless(row):
    return 10**400
def hangs(row):
    import threading
    threading.Event().wait()
def two(row, weight):
    return 1
"""


class Letters:
    """A tokenizer whose token 0 is `a`."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a user's module in the working directory, another one for each test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


Make = Callable[..., UserTask]


@pytest.fixture(name="make")
def _make() -> Iterator[Make]:
    """Makes tasks; their children end with the test."""
    tasks: list[UserTask] = []

    def make(module: str, function: str, **settings: Any) -> UserTask:
        fields = {"name": "safety", "function": f"{module}:{function}", "output": "loss_weights"} | settings
        tasks.append(UserTask(UserTaskConfig.model_validate(fields), TextDecoder(Letters()), num_rows=4))
        return tasks[-1]

    yield make
    for task in tasks:
        task.close()


def make_batch() -> PackedBatch:
    prompts = [torch.tensor([0, 1]), torch.tensor([0, 1])]
    columns = {
        "prompts": Column.of_rows(prompts),
        **sample_columns(prompts, [torch.tensor([2]), torch.tensor([3, 4, 5])]),
        "ground_truth": Column.of_texts(["c", "d"]),
        "rewards": Column.of_scalars(torch.tensor([0.5, 1.0])),
        "correct": Column.of_scalars(torch.tensor([False, True])),
    }
    return PackedBatch((7, 8), columns)


def test_function_is_given_texts_and_numbers_and_returns_the_column(module: str, make: Make) -> None:
    task = make(module, "remember", inputs=["prompts", "responses", "ground_truth", "rewards", "correct"])
    assert task.compute_columns(make_batch(), 1)["loss_weights"].values.tolist() == [0.25, 0.75]
    rows = [
        TaskRow("ab", "c", "c", {"rewards": 0.5, "correct": 0.0}),
        TaskRow("ab", "def", "d", {"rewards": 1.0, "correct": 1.0}),
    ]
    assert Path("rows.txt").read_text().splitlines() == [str(row) for row in rows]


def test_what_is_no_input_is_empty(module: str, make: Make) -> None:
    make(module, "remember", inputs=["rewards"]).compute_columns(make_batch(), 1)
    assert Path("rows.txt").read_text().splitlines()[0] == str(TaskRow(columns={"rewards": 0.5}))


def test_a_coroutine_is_a_task_like_any_other(module: str, make: Make) -> None:
    task = make(module, "waits_a_little", concurrency=2)
    assert task.compute_columns(make_batch(), 1)["loss_weights"].values.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "raised ValueError: no idea on response 'c'"),
        ("leaves", "raised SystemExit"),
        ("waits", "raised TimeoutError: no answer on response 'c'"),
        ("text", "returned 'much' instead of a number"),
        ("endless", "returned 1000"),
        ("several", "returned .1.0, 2.0. instead of a number"),
        ("large", "returned 1.5 on response 'c'; loss_weights must be a number between 0 and 1"),
    ],
)
def test_errors_name_task_and_function(module: str, make: Make, function: str, message: str) -> None:
    with pytest.raises(UserCodeFailed, match=f"^task safety: {module}:{function} {message}"):
        make(module, function).compute_columns(make_batch(), 1)


def test_only_masks_are_bounded(module: str, make: Make) -> None:
    assert make(module, "large", output="toxicity").compute_columns(make_batch(), 1)["toxicity"].values.tolist() == [
        1.5,
        1.5,
    ]
    with pytest.raises(UserCodeFailed, match="toxicity must be a number that float32 holds"):
        make(module, "nothing", output="toxicity").compute_columns(make_batch(), 1)


@pytest.mark.parametrize(("output", "value"), [("loss_weights", 0.0), ("toxicity", math.nan)])
def test_function_is_not_called_where_a_number_that_it_reads_is_missing(
    module: str, make: Make, output: str, value: float
) -> None:
    """A response whose reward failed has no weight; it must not end the run."""
    batch = make_batch()
    batch.columns["rewards"].values[0] = math.nan
    column = make(module, "reward", output=output, inputs=["rewards"]).compute_columns(batch, 1)[output]
    assert column.values.tolist() == pytest.approx([value, 1.0], nan_ok=True)


def test_column_holds_what_the_function_returned(module: str, make: Make) -> None:
    with pytest.raises(UserCodeFailed, match=r"returned 1e\+39 .* toxicity must be a number that float32 holds"):
        make(module, "huge", output="toxicity").compute_columns(make_batch(), 1)


def test_function_that_hangs_is_an_error_after_its_deadline(module: str, make: Make) -> None:
    with pytest.raises(UserCodeFailed, match=r"task safety: .*:hangs took longer than its timeout_s = 1 s on respo"):
        make(module, "hangs", timeout_s=1).compute_columns(make_batch(), 1)


def test_function_must_take_a_row(module: str, make: Make) -> None:
    with pytest.raises(ConfigError, match=r"^task safety: function: .*two must take row"):
        make(module, "two")
