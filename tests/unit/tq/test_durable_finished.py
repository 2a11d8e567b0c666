"""Rows that were finished outlive the controller and the units that knew: nobody works on one that is put again."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from counting_store import CountingStore, memory_in, shell_of

from asyncflow.errors import TransportError
from asyncflow.mac import MAC_BYTES
from tq import TaskSpec
from tq.control.durable_facts import KEPT_PARTITIONS, Finished
from tq.control.events import RecalledFinished, RecalledLosses, RecoveryDeadline, UnitGone
from tq.control.row_table import RowSet
from tq.control.state import Recovering
from tq.messages import ClearPartition, Held, OpenPartition, OutputsWritten

World = Callable[..., Any]
LOOK = TaskSpec("look", frozenset({"x"}))
WHOLE = TaskSpec("train", frozenset({"x"}), whole_groups=True)
_STORE_LIMIT = 2**23
"""Bytes of one value that torch's TCPStore takes."""


@pytest.fixture(name="store")
def _store() -> CountingStore:
    return CountingStore()


def remembered(store: CountingStore) -> dict[int, list[int]]:
    """Return what the next incarnation is told."""
    found: dict[int, RowSet] = {}
    for event in memory_in(store).replay_events():
        assert isinstance(event, RecalledFinished)
        found.setdefault(event.partition, RowSet()).update(event.rows)
    return {partition: list(rows) for partition, rows in found.items()}


def newly(rows: dict[int, Any]) -> Callable[[], Finished]:
    return lambda: {partition: RowSet(numbers) for partition, numbers in rows.items()}


def test_grows_from_call_to_call_and_over_starts(store: CountingStore) -> None:
    memory = memory_in(store)
    memory.remember_finished(newly({1: [0, 1], 2: [5]}))
    memory.remember_finished(newly({1: [2**62]}))
    memory_in(store).remember_finished(newly({1: [3]}))
    assert remembered(store) == {1: [0, 1, 3, 2**62], 2: [5]}


def test_only_what_grew_is_written(store: CountingStore) -> None:
    memory = memory_in(store)
    memory.remember_finished(newly({1: range(1_000_000), 2: range(9)}))
    store.written.clear()
    memory.remember_finished(newly({1: [1_000_001]}))
    assert len(store.written) == 1
    assert sum(store.written.values()) < 100


@pytest.mark.parametrize(
    "rows", [range(0, 1_600_000, 8), random.Random(0).sample(range(2**62), 200_000)], ids=["every eighth", "random"]
)
def test_no_value_is_larger_than_the_store_takes(store: CountingStore, rows: Sequence[int]) -> None:
    memory_in(store).remember_finished(newly({1: rows}))
    assert len(store.written) <= 256
    assert max(store.written.values()) < _STORE_LIMIT // 50
    assert sum(store.written.values()) < len(msgspec.msgpack.encode(RowSet(rows).list_spans())) + 256 * (5 + MAC_BYTES)


def test_oldest_partitions_are_forgotten(store: CountingStore) -> None:
    memory_in(store).remember_finished(newly({partition: [partition] for partition in range(KEPT_PARTITIONS + 2)}))
    assert sorted(remembered(store)) == list(range(2, KEPT_PARTITIONS + 2))


def test_rows_that_could_not_be_saved_are_saved_the_next_time(store: CountingStore) -> None:
    memory = memory_in(store)
    store.failures = 1
    with pytest.raises(TransportError):
        memory.remember_finished(newly({1: [0, 2**20], 2: [5]}))
    assert remembered(store) == {}
    memory.remember_finished(newly({}))
    assert remembered(store) == {1: [0, 2**20], 2: [5]}


def test_cleared_partition_is_forgotten(store: CountingStore) -> None:
    memory = memory_in(store)
    memory.remember_finished(newly({1: [0, 2**20], 2: [5]}))
    memory.remember_event(OpenPartition(1, 4))
    memory.clear(1)
    memory.clear(7)
    assert remembered(store) == {2: [5]}, "nor is the size of the other one"


def test_controller_forgets_finished_rows_when_their_partition_is_cleared(
    make_world: World, store: CountingStore
) -> None:
    world = make_world(LOOK)
    shell = shell_of(world.state, memory_in(store))
    world.put([0])
    world.put([5], partition=2)
    for _ in range(2):
        world.write("look", world.granted(world.ask("look")))
    shell.save_finished()
    assert remembered(store) == {1: [0], 2: [5]}
    shell.apply_event(ClearPartition(1))
    assert remembered(store) == {2: [5]}


def test_trainer_that_comes_back_does_not_bring_a_cleared_partition_back(make_world: World) -> None:
    train = TaskSpec("train", frozenset({"x"}), keeps_leases=True)
    world = make_world(train, first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset({"a"})))
    world.join("trainer", Held("train", 7, 1, [0]))
    world.handle(ClearPartition(1))
    world.handle(RecoveryDeadline())
    assert world.state.known_rows() == {}


def test_rows_are_asked_for_where_no_clear_can_come_between(store: CountingStore) -> None:
    memory = memory_in(store)

    def take() -> Finished:
        assert memory._saving_finished.locked(), "a clear would be overtaken"
        return {1: RowSet([0])}

    memory.remember_finished(take)
    assert remembered(store) == {1: [0]}


def test_taken_rows_are_those_since_the_last_time_without_cleared_ones(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0, 1])
    world.put([5], partition=2)
    world.write("look", world.granted(world.ask("look", 2)))
    assert {partition: list(rows) for partition, rows in world.state.take_finished().items()} == {1: [0, 1]}
    world.write("look", world.granted(world.ask("look", 2)))
    world.handle(ClearPartition(2))
    assert world.state.take_finished() == {}


def test_controller_that_was_away_when_a_partition_was_cleared_hears_of_it_from_the_client(make_world: World) -> None:
    """The unit's notice is covered by an inventory that does not list what it forgot."""
    world = make_world(LOOK)
    world.register("storage-0")
    world.put([0])
    world.write("look", world.granted(world.ask("look")))
    world.handle(UnitGone("storage-0"))
    world.register("storage-0")
    world.handle(ClearPartition(1))
    world.put([0])
    assert world.granted(world.ask("look")).rows == [0]


def test_cleared_partition_keeps_rows_that_came_since(make_world: World) -> None:
    world = make_world(LOOK)
    world.put([0])
    world.handle(ClearPartition(1))
    assert world.granted(world.ask("look")).rows == [0]


@pytest.mark.parametrize("declared", [False, True])
def test_group_whose_other_row_was_finished_before_the_restart_is_complete(make_world: World, declared: bool) -> None:
    """The unit of both died, and so did the controller; the producer repeats its put."""
    world = make_world(WHOLE, first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
    before = make_world(WHOLE)
    before.put([0, 1], size=2)
    before.granted(before.ask("train", 2))
    before.handle(OutputsWritten("storage-0", "train", [0], [], [], 0))
    finished = before.state.take_finished()
    before.lose("storage-0")
    if declared:
        world.open(2)
    world.handle(RecalledFinished(1, finished[1]))
    world.handle(RecalledLosses(tuple(before.lost_rows())))
    world.register("storage-0", incarnation="2")
    world.handle(RecoveryDeadline())
    world.confirm_fences()
    world.put([0, 1], size=2)
    assert world.granted(world.ask("train", 2)).rows == [1]


def test_group_of_which_only_finished_rows_are_known_is_complete_with_the_others(make_world: World) -> None:
    world = make_world(WHOLE)
    world.handle(RecalledFinished(1, (0, 2)))
    world.put([0, 1], size=2)
    assert world.granted(world.ask("train", 2)).rows == [1]
    world.put([2, 3], size=2)
    assert world.granted(world.ask("train", 2)).rows == [3]
    for unit in ("storage-1", "storage-2"):
        world.put([0, 2], unit, size=2)
    assert world.ask("train", 2) not in world.answers


def test_group_is_complete_when_its_finished_row_comes_last(make_world: World) -> None:
    world = make_world(WHOLE)
    world.handle(RecalledFinished(1, (0,)))
    world.put([1], size=2, group_size=2)
    ask = world.ask("train", 2)
    assert ask not in world.answers
    world.put([0], "storage-1", size=2, group_size=2)
    assert world.granted(ask).rows == [1]


def test_finished_row_that_comes_after_all_are_known_is_not_counted_again(make_world: World) -> None:
    world = make_world(WHOLE)
    world.open(3)
    world.handle(RecalledFinished(1, (0,)))
    world.put([1, 2], size=3, group_size=3)
    world.put([0], "storage-1", size=3, group_size=3)
    assert world.granted(world.ask("train", 3)).rows == [1, 2]
