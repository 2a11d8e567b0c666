"""Admission's shell: what it does when the lead controller starts again."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tq import Column
from tq.config import Fill, ScheduleConfig
from tq.control.admission import AdmissionMark, AdmissionState, AdmittedGroup
from tq.control.prompt_admitter import PromptAdmitter

SCHEDULE = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=2, max_staleness=1)


class FakeClient:
    """Notes what is opened and put; `quiet` is set by the last step's put."""

    def __init__(self, last_step: int) -> None:
        self.opened: dict[int, int] = {}
        self.put: dict[int, list[int]] = {}
        self.quiet = threading.Event()
        self._last_step = last_step

    def open_partition(self, partition: int, num_rows: int) -> None:
        self.opened[partition] = num_rows

    def put_rows(self, columns: Any, *, partition: int, rows: list[int], **fields: Any) -> None:
        assert partition in self.opened, "rows of a step that nobody knows the size of"
        self.put.setdefault(partition, []).extend(rows)
        if partition == self._last_step:
            self.quiet.set()


class Prompts:
    """Columns do not matter here."""

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        return {}


def never(error: Exception) -> None:
    raise AssertionError("admission failed") from error


def run(mark: AdmissionMark, known: Mapping[int, Collection[int]] | None, *, last_step: int) -> FakeClient:
    """Start admission from a mark, and let it put everything."""
    return run_state(AdmissionState.from_mark(mark, SCHEDULE, last_step=last_step), known, last_step=last_step)


def run_state(state: AdmissionState, known: Mapping[int, Collection[int]] | None, *, last_step: int) -> FakeClient:
    client = FakeClient(last_step)
    admitter = PromptAdmitter(
        state,
        client,
        Prompts(),
        num_units=1,
        save=lambda mark: None,
        failed=never,  # type: ignore[arg-type]
    )
    admitter.start(known)
    assert client.quiet.wait(10)
    admitter.close()
    return client


def test_steps_that_were_marked_but_perhaps_not_opened_are_opened_again() -> None:
    """The mark is durable first; the lead may die before it opens the step, and nobody else does."""
    client = run(AdmissionMark(version=1, next_step=4), {2: [4, 5, 6, 7]}, last_step=3)
    assert client.opened == {2: 4, 3: 4}
    assert client.put == {3: [8, 9, 10, 11]}, "what is there is not put again"


def test_first_start_opens_and_puts_what_the_gate_allows() -> None:
    client = run(AdmissionMark(version=0, next_step=1), None, last_step=2)
    assert client.opened == {1: 4, 2: 4}
    assert client.put == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}


def test_resumed_run_puts_the_groups_that_were_not_trained() -> None:
    schedule = SCHEDULE.model_copy(update={"max_staleness": 2, "fill": Fill.FIRST_READY})
    state = AdmissionState(schedule, version=1, last_step=3, trained={0, 2})
    client = run_state(state, None, last_step=3)
    assert client.opened == {2: 4, 3: 4}
    assert client.put == {2: [2, 3, 6, 7], 3: [8, 9, 10, 11]}
