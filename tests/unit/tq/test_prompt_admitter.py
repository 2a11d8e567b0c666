"""Admission's shell: what it does when the lead controller starts again."""

import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest

from asyncflow.errors import RowsExist
from asyncflow.process import ServiceThreads
from tq import Column
from tq.config import QueueConfig
from tq.control.controller import AdmissionPlace
from tq.control.events import GroupRemoved, PutAgain
from tq.refill import AdmissionMark, RemovalCause
from tq.snapshot import SnapshotChunk
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.admission.admitter import Pause, PauseChanged, PromptAdmitter, prompt_admission
from workers.data.feed_file import Fed
from workers.settings.schedule import Fill, ScheduleConfig

SCHEDULE = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=2, max_staleness=1)


class FakeClient:
    """Notes what is opened and put; `quiet` is set by the last step's put. A put of rows that exist is refused."""

    def __init__(self, last_step: int, exist: Collection[int]) -> None:
        self._exist = exist
        self.opened: dict[int, int] = {}
        self.put: dict[int, list[int]] = {}
        self.commits: dict[int, tuple[str, ...]] = {}
        self.quiet = threading.Event()
        self.stopped = threading.Event()
        self._last_step = last_step

    def open_partition(self, partition: int, num_rows: int) -> None:
        self.opened[partition] = num_rows

    def put_rows(self, columns: Any, *, partition: int, rows: list[int], **fields: Any) -> None:
        assert partition in self.opened, "rows of a step that nobody knows the size of"
        if not set(rows).isdisjoint(self._exist):
            raise RowsExist("some are here")
        self.put.setdefault(partition, []).extend(rows)
        self.commits.update(dict.fromkeys(rows, tuple(fields.get("commits", ()))))
        if partition == self._last_step:
            self.quiet.set()

    def stop(self) -> None:
        assert not self.stopped.is_set()
        self.stopped.set()

    def close(self) -> None:
        pass


class Prompts:
    """Columns do not matter here."""

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        return {}


def run(mark: AdmissionMark, known: Mapping[int, Collection[int]] | None, *, last_step: int) -> FakeClient:
    """Start admission from a mark, and let it put everything."""
    return run_state(
        AdmissionState(SCHEDULE, version=0, last_step=last_step).restore_mark(mark), known, last_step=last_step
    )


class Saved:
    """Finished rows of a checkpoint; the rest must be generated."""

    def __init__(self, *rows: int) -> None:
        self._rows = set(rows)

    def take_groups(self, groups: Sequence[AdmittedGroup], *, most: int) -> Iterator[SnapshotChunk]:
        for group in groups:
            for row in self._rows.intersection(group.rows):
                self._rows.remove(row)
                yield SnapshotChunk(group.step, len(group.rows), [row], [group.group], {}, {"rollout": [0]})


def new_admitter(
    state: AdmissionState, client: FakeClient, *, threads: ServiceThreads | None = None, **options: Any
) -> PromptAdmitter:
    threads = threads or ServiceThreads("controller-0")
    return PromptAdmitter(state, client, Prompts(), num_units=1, save=lambda mark: None, threads=threads, **options)


def run_state(
    state: AdmissionState,
    known: Mapping[int, Collection[int]] | None,
    *,
    last_step: int,
    saved: Saved | None = None,
    events: Sequence[int | PutAgain] = (),
    exist: Collection[int] = (),
) -> FakeClient:
    client = FakeClient(last_step, exist)
    threads = ServiceThreads("controller-0")
    admitter = new_admitter(state, client, threads=threads, saved=saved)
    for event in events:
        admitter.add_event(event)
    admitter.start(known)
    assert client.quiet.wait(10)
    admitter.close()
    threads.check()
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


def test_finished_samples_of_the_checkpoint_take_the_place_of_prompts_when_their_step_is_opened() -> None:
    state = AdmissionState(SCHEDULE, version=1, last_step=4, trained={0, 1})
    client = run_state(state, None, last_step=4, saved=Saved(4, 5, 7, 8, 12), events=[2])
    assert client.opened == {2: 4, 3: 4, 4: 4}
    assert {step: sorted(rows) for step, rows in client.put.items()} == {
        2: [4, 5, 6, 7],
        3: [8, 9, 10, 11],
        4: [12, 13, 14, 15],
    }
    assert {row for row, tasks in client.commits.items() if tasks} == {4, 5, 7, 8, 12}


def test_lost_rows_that_came_back_do_not_end_admission() -> None:
    """A unit that was away may bring them before they are put again."""
    state = AdmissionState(SCHEDULE, version=0, last_step=2).restore_mark(AdmissionMark(version=1, next_step=3))
    client = run_state(state, {2: [4, 5]}, last_step=2, events=[PutAgain((4, 5))], exist={5, 6})
    assert {step: sorted(rows) for step, rows in client.put.items()} == {2: [4, 7]}


def test_rows_that_are_put_again_are_prompts() -> None:
    """Somebody may have them in hand, or have written more."""
    state = AdmissionState(SCHEDULE, version=0, last_step=3).restore_mark(AdmissionMark(version=1, next_step=3))
    client = run_state(state, {2: [4, 5]}, last_step=3, saved=Saved(6, 7, 8), events=[PutAgain((4, 8))])
    assert {step: sorted(rows) for step, rows in client.put.items()} == {2: [4, 6, 7], 3: [8, 8, 9, 10, 11]}
    assert client.put[3][0] == client.put[3][-1] == 8, "first finished, then lost"
    assert not any(client.commits.values())


def fed_admitter(state: AdmissionState, client: FakeClient, ended: list[tuple[int, ...]]) -> PromptAdmitter:
    return new_admitter(
        state, client, feed_ended=lambda last_step, num_left: ended.append((last_step, num_left, state.version))
    )


def test_fed_rows_open_steps_and_the_last_step_that_they_fill_ends_the_run_once_it_is_trained() -> None:
    state = AdmissionState(SCHEDULE, version=0, last_step=9, num_fed=0)
    client, ended = FakeClient(2, ()), list[tuple[int, ...]]()
    admitter = fed_admitter(state, client, ended)
    removed = GroupRemoved(1, 0, 2, RemovalCause("rewards", 3))
    for event in (Fed(2, ended=False), removed, Fed(6, ended=False), 1, 1, Fed(6, ended=True)):
        admitter.add_event(event)
    admitter.start(None)
    assert client.quiet.wait(10)
    admitter.add_event(2)
    admitter.add_event(2)
    assert client.stopped.wait(10)
    admitter.close()
    assert client.put == {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8, 9]}, "group 2 takes the place of group 0, of step 1"
    assert ended == [(2, 1, 2)], "when step 2 is trained"


def test_feed_that_ended_long_ago_ends_a_resumed_run_after_its_first_weights() -> None:
    """The trainer would be told to stop while it sends them."""
    state = AdmissionState(SCHEDULE, version=0, last_step=9, num_fed=0).restore_mark(
        AdmissionMark(version=1, next_step=2)
    )
    client, ended = FakeClient(1, ()), list[tuple[int, ...]]()
    client.opened[1] = 4
    admitter = fed_admitter(state, client, ended)
    for event in (Fed(2, ended=True), PutAgain((0,))):
        admitter.add_event(event)
    admitter.start(None)
    assert client.quiet.wait(10)
    assert not client.stopped.is_set()
    admitter.add_event(1)
    assert client.stopped.wait(10)
    admitter.close()
    assert ended == [(1, 0, 1)]


def test_lead_that_starts_again_admits_what_weights_allow_that_came_after_its_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody publishes them again: it would wait for ever."""
    client, threads = FakeClient(3, ()), ServiceThreads("controller-0")
    monkeypatch.setattr("workers.admission.admitter.QueueClient", lambda *_, **__: client)
    state = AdmissionState(SCHEDULE, version=0, last_step=9)
    credentials: Any = None
    make = prompt_admission(credentials, "controller-0", Prompts(), state, config=QueueConfig())
    admission = make(AdmissionPlace(2, AdmissionMark(version=0, next_step=3), 1, lambda mark: None, threads))
    admission.start({2: [4, 5, 6, 7]})
    assert client.quiet.wait(10)
    admission.close()
    assert client.put == {3: [8, 9, 10, 11]}


class Pauses:
    """The user's pauses, and what admission says of them; the lead's heartbeat calls `change`."""

    def __init__(self, *, asked: bool) -> None:
        self.asked = asked
        self.said: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()

    def admit(self, state: AdmissionState, client: FakeClient) -> PromptAdmitter:
        return new_admitter(state, client, pause=Pause(lambda: self.asked, self.said.put))

    def change(self, admitter: PromptAdmitter, *, asked: bool) -> None:
        self.asked = asked
        admitter.add_event(PauseChanged())


def test_a_pause_completes_the_steps_that_were_given_out_and_admits_none() -> None:
    state, client, pauses = AdmissionState(SCHEDULE, version=0, last_step=9), FakeClient(2, ()), Pauses(asked=False)
    admitter = pauses.admit(state, client)
    admitter.start(None)
    assert client.quiet.wait(10)
    pauses.change(admitter, asked=True)
    assert pauses.said.get(timeout=10) == (2, 0)
    admitter.add_event(1)
    assert pauses.said.get(timeout=10) == (2, 1), "the weights of step 1 admit step 3, but for the pause"
    admitter.add_event(GroupRemoved(2, 2, 2, RemovalCause("rewards", filtered=True)))
    assert pauses.said.get(timeout=10) == (2, 1)
    admitter.add_event(2)
    assert pauses.said.get(timeout=10) == (2, 2), "everything is trained"
    assert client.put == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7, 8, 9]}, "a refill is a part of its step"
    client.quiet.clear()
    client._last_step = 4
    pauses.change(admitter, asked=False)
    assert client.quiet.wait(10) and pauses.said.get(timeout=10) is None
    admitter.close()
    assert client.opened == {1: 4, 2: 4, 3: 4, 4: 4}


def test_lead_that_starts_again_in_a_pause_stays_in_it_and_puts_lost_rows_again() -> None:
    state, client, pauses = AdmissionState(SCHEDULE, version=1, last_step=9), FakeClient(2, ()), Pauses(asked=True)
    admitter = pauses.admit(state.restore_mark(AdmissionMark(version=1, next_step=3)), client)
    admitter.start({2: [4, 5]})
    assert pauses.said.get(timeout=10) == (2, 1)
    admitter.close()
    assert client.put == {2: [6, 7]}
