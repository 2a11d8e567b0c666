"""How a restarted controller finds out where everything stands, before it hands out anything. Pure.

collecting --every known unit registered, every known consumer joined, or the deadline passed--> rebuild leases
fencing    --FenceAll per served task confirmed by the units that are up--> over
"""

from collections.abc import Iterable
from dataclasses import dataclass

from asyncflow.errors import PeerRefused
from tq.control.events import FenceAll
from tq.control.row_table import RowTable
from tq.control.rows import Row, UnitLife
from tq.control.task_state import TaskState
from tq.messages import AckLost, Held, Release

_GROUP_UNKNOWN = -1


@dataclass(frozen=True)
class Recovering:
    """Units and consumers that were there when the earlier incarnation ended.

    Attributes:
        units: storage units.
        owners: consumers.
    """

    units: frozenset[str]
    owners: frozenset[str]


def fence_void_leases(table: RowTable, task: TaskState, units: Iterable[str]) -> dict[int, str]:
    """Have units refuse puts under all leases so far that are not alive; returns token -> unit of each fence."""
    alive = tuple(sorted(task.leases.by_token))
    fences = {table.token(): unit for unit in sorted(units)}
    table.out += [FenceAll(task.spec.name, token, unit, alive) for token, unit in fences.items()]
    return fences


class Recovery:
    """One controller's way back."""

    def __init__(self, table: RowTable, expected: Recovering) -> None:
        """Args:
        table: rows and tasks, empty so far.
        expected: whom to wait for.
        """
        self._table = table
        self._units = set(expected.units)
        self._all_units = set(expected.units)
        self._owners = set(expected.owners)
        self._holds: dict[str, list[Held]] = {}
        self._fences: dict[int, str] = {}
        """Token -> unit that has not confirmed it; one that is away is told when it registers."""
        self._collecting = True
        self._later: list[AckLost | Release] = []

    @property
    def collected(self) -> bool:
        """Whether all known peers are back."""
        return not self._units and not self._owners

    @property
    def collecting(self) -> bool:
        """Whether leases are not rebuilt yet."""
        return self._collecting

    @property
    def over(self) -> bool:
        """Whether rows may be handed out."""
        return not self._collecting and not self._fencing

    @property
    def waiting_for(self) -> str:
        """Return, for a message, the peers that are waited for."""
        if self._collecting:
            return " ".join(sorted(self._units | self._owners))
        return f"fences at {' '.join(sorted(self._fencing))}"

    def registered(self, unit: str) -> None:
        """Stop waiting for this unit."""
        self._units.discard(unit)
        self._all_units.add(unit)

    def joined(self, owner: str, holds: list[Held]) -> None:
        """Take in a consumer's leases, and stop waiting for it."""
        self._owners.discard(owner)
        earlier = {(one.task, one.token): one for one in self._holds.get(owner, ())}
        for one in holds:
            before = earlier.pop((one.task, one.token), None)
            if before is not None:  # what it acked since may not have arrived
                one.rows = sorted({*one.rows, *before.rows})
        self._holds[owner] = [*holds, *earlier.values()]

    def defer(self, event: AckLost | Release) -> None:
        """Keep an ack or release until leases are rebuilt.

        Raises:
            PeerRefused: an ack of a lease that may have ended meanwhile cannot be promised.
        """
        task = self._table.tasks.get(event.task)
        if isinstance(event, AckLost) and task is not None and not task.spec.keeps_leases:
            raise PeerRefused(f"the controller was restarted and waits for {self.waiting_for}; ack again")
        self._later.append(event)

    def deferred(self) -> list[AckLost | Release]:
        """Take what was told meanwhile."""
        later, self._later = self._later, []
        return later

    def gone(self, owner: str) -> None:
        """A consumer is gone; trainers keep what they hold."""
        self._owners.discard(owner)
        holds = self._holds.pop(owner, ())
        kept = [one for one in holds if one.task in self._table.tasks and self._table.tasks[one.task].spec.keeps_leases]
        if kept:
            self._holds[owner] = kept

    def keeps_leases(self, owner: str) -> bool:
        """Whether a departed consumer is a trainer with leases; other consumers lose theirs."""
        return bool(self._holds.get(owner))

    def cleared(self, partition: int) -> None:
        """A partition is cleared: no consumer holds its rows any more."""
        for owner, holds in self._holds.items():
            self._holds[owner] = [one for one in holds if one.partition != partition]

    def rebuild(self) -> None:
        """No further peer is waited for: restore leases and rounds, and fence all other leases."""
        self._collecting = False
        for name, task in self._table.tasks.items():
            held = [(owner, one) for owner, holds in self._holds.items() for one in holds if one.task == name]
            self._restore(task, held)
            task.leases.some_void = True
            self._fences |= fence_void_leases(self._table, task, self._all_units)
        self._holds.clear()

    def fenced(self, token: int) -> None:
        """A task's fence holds at a unit."""
        self._fences.pop(token, None)

    @property
    def _fencing(self) -> set[str]:
        units = self._table.rows.units
        return {unit for unit in self._fences.values() if unit in units and units[unit].online}

    def _restore(self, task: TaskState, held: list[tuple[str, Held]]) -> None:
        """Give rows to the consumer with the newest token for them."""
        newest: dict[int, int] = {}
        for _, one in held:
            if task.spec.keeps_leases:
                self._remember_unknown(task, one)
            else:  # the lease may be alive for its other rows
                task.leases.owe_fence(number for number in one.rows if number not in self._table.rows.rows)
            for number in one.rows:
                newest[number] = max(one.token, newest.get(number, 0))
        for owner, one in sorted(held, key=lambda item: item[1].token):
            rows = [number for number in one.rows if newest[number] == one.token and self._undone(task, number)]
            if one.token in task.leases.by_token:
                task.leases.read(one.token, owner)
            elif rows:
                self._hold(task, one, owner, rows)
            if one.round_index >= 0:
                self._table.assigners[task.spec.name].restore(one, owner)

    def _hold(self, task: TaskState, one: Held, owner: str, rows: Iterable[int]) -> None:
        all_rows = self._table.rows.rows
        for number in rows:
            if all_rows[number].queued & task.bit:
                task.partition(one.partition).queue.withdraw(number, all_rows[number])
        task.lease(one.token, one.partition, rows, owner)

    def _undone(self, task: TaskState, number: int) -> bool:
        row = self._table.rows.rows.get(number)
        return row is not None and bool(row.left & task.bit)

    def _remember_unknown(self, task: TaskState, one: Held) -> None:
        """A trainer has rows in hand that no unit has: they were lost, and must not be trained again.

        Whatever wrote the trainer's inputs was done with them, and its outputs are lost like they.
        """
        upstream = self._table.graph.upstream(task.bit)
        left, written = self._table.rows.every_task & ~upstream, task.inputs | self._table.graph.outputs(upstream)
        for number in one.rows:
            row = Row(UnitLife(""), one.partition, _GROUP_UNKNOWN, 1, written, left, tokens=0, num_bytes=0)
            self._table.add_lost(number, row)
