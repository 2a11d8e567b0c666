"""The size of a partition outlives the controller, whenever it got smaller: its trainer hears that it is over."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from asyncflow.sealed_store import SealedStore
from asyncflow.transport.handshake import Credentials
from tq import TaskSpec
from tq.control.controller import ControllerService
from tq.control.durable_mark import DurableMark
from tq.control.events import Instruction, RecoveryDeadline
from tq.control.memory import Memory
from tq.control.recovery import Recovering
from tq.messages import OpenPartition

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
        for event in self.memory.events():
            self.world.handle(event)

    def restart(self, *rows: int) -> None:
        """The controller dies; its next life finds these rows at the unit."""
        self.start(first_token=1000, recovering=Recovering(frozenset({"storage-0"}), frozenset()))
        self.world.register("storage-0", rows)
        self.world.handle(RecoveryDeadline())
        self.world.confirm_fences()

    def open(self, num_rows: int) -> None:
        """Somebody declares the partition."""
        self.memory.remember(OpenPartition(1, num_rows))
        self.world.open(num_rows)

    def quarantine(self, row: int) -> None:
        """A task fails on a row, the only one of its group, and the unit takes it out."""
        granted = self.world.granted(self.world.ask("ref"))
        assert granted.rows == [row]
        self.world.give_back("ref", granted)
        self.world.confirm_fences()
        self.tell(self.world.remove([row], reason="quarantined"))

    def tell(self, instructions: list[Instruction]) -> None:
        """Have the shell carry out what an event caused."""
        service = object.__new__(ControllerService)
        service._state, service._memory, service._admitting = self.world.state, self.memory, None
        service._send(cast(Any, instructions))


@pytest.fixture(name="shell")
def _shell(make_world: World) -> Shell:
    return Shell(make_world)


@pytest.mark.parametrize("order", ["before it is declared", "after", "between two declarations", "and a life between"])
def test_partition_that_a_group_left_ends_also_after_a_restart(shell: Shell, order: str) -> None:
    if order != "before it is declared" and order != "and a life between":
        shell.open(3)
    shell.world.put([0, 1, 2])
    shell.quarantine(0)
    if order == "and a life between":
        shell.restart(1, 2)
    if order != "after":
        shell.open(3)
    shell.restart(1, 2)
    share = shell.world.granted(shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9))
    assert (share.rows, share.last) == ([1, 2], True)
    shell.world.write("train", share)
    assert shell.world.refused(shell.world.ask_round("train", 1, 0, num_ranks=1)) == "partition_done"


def test_partition_that_is_cleared_has_its_whole_size_again(shell: Shell) -> None:
    shell.open(3)
    shell.world.put([0, 1, 2])
    shell.quarantine(0)
    shell.tell(shell.world.remove([1, 2]))
    shell.open(2)
    shell.restart()
    shell.world.put([3, 4])
    share = shell.world.granted(shell.world.ask_round("train", 0, 0, num_ranks=1, num_rows=9))
    assert (share.rows, share.last) == ([3, 4], True)
