"""The size of a partition outlives the controller, whenever it got smaller: its trainer hears that it is over."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from counting_store import shell_of
from torch.distributed import HashStore

from asyncflow.sealed_store import SealedStore
from asyncflow.transport.meeting import Credentials
from tq import TaskSpec
from tq.control.durable_facts import DurableMark, Memory
from tq.control.events import Instruction, RecoveryDeadline
from tq.control.state import Recovering
from tq.messages import OpenPartition, RegisterUnit, RemovalReason, RowsRemoved

World = Callable[..., Any]
REF = TaskSpec("ref", frozenset({"x"}), frozenset({"ref"}), max_deliveries=1)
TRAIN = TaskSpec("train", frozenset({"x"}), keeps_leases=True)


class Shell:
    """The part of a controller that remembers, with one store over all its lives."""

    def __init__(self, make_world: World) -> None:
        self._make_world = make_world
        self._store = HashStore()
        self.start(first_token=1)

    def start(self, **settings: Any) -> None:
        """Begin a life, told of what the earlier ones remembered."""
        credentials = Credentials(cast(Any, self._store), b"secret")
        credentials._idle.append(SealedStore(self._store, b"secret"))
        self.memory = Memory(DurableMark(credentials, "controller-0"), version=0)
        self.world = self._make_world(REF, TRAIN, **settings)
        for event in self.memory.replay_events():
            self.world.handle(event)

    def restart(self, *rows: int) -> None:
        """The controller dies; its next life finds these rows at the unit."""
        self.start(first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
        self.world.register("storage-0", rows)
        self.world.handle(RecoveryDeadline())
        self.world.confirm_fences()

    def open(self, num_rows: int) -> None:
        """Somebody declares the partition."""
        self.memory.remember_event(OpenPartition(1, num_rows))
        self.world.open(num_rows)

    def lose_group(self, row: int) -> None:
        """A task fails on a row, the only one of its group, and the unit takes it out."""
        granted = self.world.granted(self.world.ask("ref"))
        assert granted.rows == [row]
        self.world.release("ref", granted)
        self.world.confirm_fences()
        self.tell(self.world.remove([row], reason="group_left"))

    def tell(self, instructions: list[Instruction]) -> None:
        """Have the shell carry out what an event caused."""
        shell_of(self.world.state, self.memory).send(cast(Any, instructions))


@pytest.fixture(name="shell")
def _shell(make_world: World) -> Shell:
    return Shell(make_world)


@pytest.mark.parametrize("order", ["before it is declared", "after", "between two declarations", "and a life between"])
def test_partition_that_a_group_left_ends_also_after_a_restart(shell: Shell, order: str) -> None:
    if order != "before it is declared" and order != "and a life between":
        shell.open(3)
    shell.world.put([0, 1, 2])
    shell.lose_group(0)
    if order == "and a life between":
        shell.restart(1, 2)
    if order != "after":
        shell.open(3)
    shell.restart(1, 2)
    rank_slice = shell.world.granted(shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9))
    assert (rank_slice.rows, rank_slice.last) == ([1, 2], True)
    shell.world.write("train", rank_slice)
    assert shell.world.refused(shell.world.ask_round("train", 1, 0, num_ranks=1)) == "partition_done"


def test_partition_that_is_cleared_has_its_whole_size_again(shell: Shell) -> None:
    shell.open(3)
    shell.world.put([0, 1, 2])
    shell.lose_group(0)
    shell.tell(shell.world.remove([1, 2]))
    shell.open(2)
    shell.restart()
    shell.world.put([3, 4])
    rank_slice = shell.world.granted(shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9))
    assert (rank_slice.rows, rank_slice.last) == ([3, 4], True)


def test_sizes_that_are_written_late_do_not_undo_later_ones(shell: Shell) -> None:
    """Two channels' threads carry out what two events caused, in any order."""
    shell.open(3)
    shell.world.put([0, 1, 2])
    first, second = (shell.world.remove([row], reason="group_left") for row in (0, 1))
    shell.tell(second)
    shell.tell(first)
    shell.restart(2)
    rank_slice = shell.world.granted(shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9))
    assert (rank_slice.rows, rank_slice.last) == ([2], True)


def test_size_that_is_written_after_the_partition_was_cleared_is_that_of_the_new_one(shell: Shell) -> None:
    shell.open(3)
    shell.world.put([0, 1, 2])
    late = shell.world.remove([0], reason="group_left")
    shell.tell(shell.world.remove([1, 2]))
    shell.tell(late)
    shell.open(2)
    shell.restart()
    asked = shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9)
    shell.world.put([3])
    assert asked not in shell.world.answers
    shell.world.put([4])
    rank_slice = shell.world.granted(asked)
    assert (rank_slice.rows, rank_slice.last) == ([3, 4], True)


@pytest.mark.parametrize("saved", [False, True])
def test_rows_that_a_unit_took_out_are_counted_once_whether_or_not_the_controller_wrote_it(
    shell: Shell, saved: bool
) -> None:
    shell.open(4)
    shell.world.put([0, 1, 2, 3])
    caused = shell.world.remove([0, 1], reason="group_left")
    if saved:
        shell.tell(caused)
    shell.start(first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
    removed = RowsRemoved("storage-0", 1, [0, 1], RemovalReason.GROUP_LEFT)
    shell.world.request(RegisterUnit("storage-0", "1", [], {1: [2]}, [removed]))
    shell.world.confirm_fences()
    asked = shell.world.ask_round("train", 0, 0, num_ranks=1)
    assert asked not in shell.world.answers, "row 3 may be at another unit"
    shell.world.request(RegisterUnit("storage-1", "1", [], {1: [3]}))
    assert shell.world.refused(asked) == "partition_done"


def test_a_row_that_is_tried_again_after_a_restart_belongs_to_its_partition(shell: Shell) -> None:
    shell.open(3)
    shell.world.put([0, 1])
    shell.tell(shell.world.remove([0], reason="group_left"))
    shell.restart(1)
    shell.world.put([0])
    asked = shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9)
    assert asked not in shell.world.answers, "row 2 is still to come"
    shell.world.put([2])
    rank_slice = shell.world.granted(asked)
    assert (rank_slice.rows, rank_slice.last) == ([0, 1, 2], True)
