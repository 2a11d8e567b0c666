"""Which weights are the reference of a step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow.errors import WeightSyncError
from asyncflow.timeline import NoTimeline
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from weightsync.plan import Need
from weightsync.version import Version
from workers.engines.hf.frozen import FrozenModel
from workers.rows.packed_rows import Sequences
from workers.tasks.reference import ReferencePolicy, reference_step

CPU = torch.device("cpu")


def test_reference_changes_after_every_interval() -> None:
    assert [reference_step(step, 4) for step in range(1, 11)] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [reference_step(step, 1) for step in (1, 2, 3)] == [0, 1, 2]


def test_reference_stays_without_an_interval() -> None:
    assert {reference_step(step, 0) for step in (1, 2, 100)} == {0}


class LateReceiver:
    """Has only the weights of a later step."""

    adopts = False
    newest = Version(0, 8)

    def __init__(self, needs: Mapping[str, Need]) -> None:
        self._needs = needs

    def wait_for(self, step: int, **_: Any) -> bool:
        return step <= 8

    def load(self, apply: Callable[[Mapping[str, Tensor]], None], **_: Any) -> Version:
        apply({name: torch.full(need.shape, 8.0) for name, need in self._needs.items()})
        return self.newest

    def drop(self) -> None: ...

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_reference_that_comes_late_reads_what_another_one_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(find_recipe("quickstart"), overrides=["algorithm.ref_update_interval=4"])
    context: Any = SimpleNamespace(
        config=config, device=CPU, gang=SimpleNamespace(role="ref"), rank=0, start_step=0,
        job=SimpleNamespace(lineage=0, resume_from=""), run_dir=tmp_path, timeline=NoTimeline(), stopping=None,
        reporting=lambda state: said.append(state) or nullcontext(), report_state=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr("workers.tasks.reference.open_receiver", lambda _, needs, **__: LateReceiver(needs))
    said: list[str] = []
    tokens = torch.tensor([5, 6, 7, 8])
    batch = Sequences.from_turns([tokens[:2]], [tokens[2:]])
    late = ReferencePolicy(context)
    before = late.log_probs(batch, step=4)
    with pytest.raises(WeightSyncError, match="the reference of step 4 is gone"):
        late.log_probs(batch, step=5)
    assert said == ["waiting for weights"], "it does not seem to work"

    other = FrozenModel(Path(config.model.path), config.model, temperature=config.rollout.temperature, device=CPU)
    other.load_weights({name: torch.full(need.shape, 0.01) for name, need in other.weight_needs().items()})
    (written := tmp_path / "reference" / "lineage0000-step_000004").mkdir(parents=True)
    other.save_weights(written)
    assert torch.equal(late.log_probs(batch, step=5), other.log_probs(batch))
    assert not torch.equal(late.log_probs(batch, step=6), before)


def test_reference_without_rows_takes_a_later_one_when_its_own_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others served step 5 and all after it, up to the next refresh, while this one slept."""
    config = load_config(find_recipe("quickstart"), overrides=["algorithm.ref_update_interval=4"])
    context: Any = SimpleNamespace(
        config=config, device=CPU, gang=SimpleNamespace(role="ref"), rank=0, start_step=0,
        job=SimpleNamespace(lineage=0, resume_from=""), run_dir=tmp_path, timeline=NoTimeline(), stopping=None,
        reporting=lambda _: nullcontext(), report_state=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr("workers.tasks.reference.open_receiver", lambda _, needs, **__: LateReceiver(needs))
    late = ReferencePolicy(context)
    assert late.version == 0
    late.take_weights(4)
    assert late.version == 8
    assert (tmp_path / "reference" / "lineage0000-step_000008").is_dir(), "those that come later still find it"
