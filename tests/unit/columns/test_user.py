"""A user's task: what its function is given, and what becomes of what it returns."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError, UserCodeFailed
from tq.batch import Column, PackedBatch
from workers.columns.config import UserTaskConfig
from workers.columns.row import TaskRow
from workers.columns.user import UserTask
from workers.tokenizer import TextDecoder

SOURCE = """
rows = []
def remember(row):
    rows.append(row)
    return len(row.response) / 4
def fails(row):
    raise ValueError("no idea")
def waits(row):
    raise TimeoutError("no answer")
def leaves(row):
    raise SystemExit
def text(row):
    return "much"
def several(row):
    import torch
    return torch.ones(2)
def large(row):
    return 1.5
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


def make(module: str, function: str, **settings: Any) -> UserTask:
    fields = {"name": "safety", "function": f"{module}:{function}", "output": "loss_masks"} | settings
    return UserTask(UserTaskConfig.model_validate(fields), TextDecoder(Letters()), num_rows=4)


def make_batch() -> PackedBatch:
    columns = {
        "prompts": Column.of_rows([torch.tensor([0, 1]), torch.tensor([0, 1])]),
        "responses": Column.of_rows([torch.tensor([2]), torch.tensor([3, 4, 5])]),
        "answers": Column.of_texts(["c", "d"]),
        "rewards": Column.of_scalars(torch.tensor([0.5, 1.0])),
        "correct": Column.of_scalars(torch.tensor([False, True])),
    }
    return PackedBatch((7, 8), columns)


def test_function_is_given_texts_and_numbers_and_returns_the_column(module: str) -> None:
    task = make(module, "remember", inputs=["prompts", "responses", "answers", "rewards", "correct"])
    assert task.compute(make_batch(), 1)["loss_masks"].values.tolist() == [0.25, 0.75]
    assert sys.modules[module].rows == [
        TaskRow("ab", "c", "c", {"rewards": 0.5, "correct": 0.0}),
        TaskRow("ab", "def", "d", {"rewards": 1.0, "correct": 1.0}),
    ]


def test_what_is_no_input_is_empty(module: str) -> None:
    make(module, "remember", inputs=["rewards"]).compute(make_batch(), 1)
    assert sys.modules[module].rows[0] == TaskRow(columns={"rewards": 0.5})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "raised ValueError: no idea on response 'c'"),
        ("leaves", "raised SystemExit"),
        ("waits", "raised TimeoutError: no answer on response 'c'"),
        ("text", "returned 'much' instead of a number"),
        ("endless", "returned 1000"),
        ("several", "returned tensor.* instead of a number"),
        ("large", "returned 1.5 on response 'c'; loss_masks must be a number between 0 and 1"),
    ],
)
def test_errors_name_task_and_function(module: str, function: str, message: str) -> None:
    with pytest.raises(UserCodeFailed, match=f"^task safety: {module}:{function} {message}"):
        make(module, function).compute(make_batch(), 1)


def test_only_masks_are_bounded(module: str) -> None:
    assert make(module, "large", output="toxicity").compute(make_batch(), 1)["toxicity"].values.tolist() == [1.5, 1.5]
    with pytest.raises(UserCodeFailed, match="toxicity must be a number that float32 holds"):
        make(module, "nothing", output="toxicity").compute(make_batch(), 1)


def test_column_holds_what_the_function_returned(module: str) -> None:
    with pytest.raises(UserCodeFailed, match=r"returned 1e\+39 .* toxicity must be a number that float32 holds"):
        make(module, "huge", output="toxicity").compute(make_batch(), 1)


def test_function_that_hangs_is_an_error_after_its_deadline(module: str) -> None:
    with pytest.raises(UserCodeFailed, match=r"task safety: .*:hangs took longer than its timeout_s = 0.05 s on respo"):
        make(module, "hangs", timeout_s=0.05).compute(make_batch(), 1)


def test_function_must_take_a_row(module: str) -> None:
    with pytest.raises(ConfigError, match=r"^task safety: function: .*two must take row"):
        make(module, "two")
