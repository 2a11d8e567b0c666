"""Two controllers and two units under random events: late messages, broken channels, one service dying, or all of them
that knew of a row."""

from held_unit import BY_INPUTS, NAMES
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modelled_controller import CONTROLLER_OF, SERVED
from queue_model import UNITS, check_counters, partition_of
from two_controllers import ALL_ROWS, TwoControllers, groups

from tq.control.events import UnitLost

units = st.sampled_from(UNITS)
controllers = st.sampled_from(tuple(SERVED))
told = st.sampled_from(("all", "later", "never"))


class TwoControllersMachine(TwoControllers, RuleBasedStateMachine):
    """What services know must survive them."""

    @initialize()
    def begin(self) -> None:
        self.reset()

    # Puts and messages

    @precondition(lambda self: self.to_put)
    @rule(unit=units, data=st.data())
    def put_rows(self, unit: str, data: st.DataObject) -> None:
        """Also rows that are at another unit, as a client does that got no answer."""
        row = data.draw(st.sampled_from(sorted(self.to_put)[:8]))
        size = data.draw(st.integers(1, 4))
        rows = [
            one for one in sorted(self.to_put) if row <= one < row + size and partition_of(one) == partition_of(row)
        ]
        self.put(unit, rows)

    @rule(unit=units, name=controllers, num=st.integers(1, 4))
    def deliver_some(self, unit: str, name: str, num: int) -> None:
        for _ in range(min(num, len(self.units[unit].links[name].outbox))):
            self.deliver(unit, name)

    @rule(unit=units)
    def put_times_out(self, unit: str) -> None:
        creating = [change for change in self.units[unit].changes if change.kind == "create"]
        if creating:
            self.units[unit].give_up_put(creating[0])
            self.hear(self.units[unit])

    @rule()
    def lose_producers(self) -> None:
        self.producers_die()

    @precondition(lambda self: self.acks_to_tell)
    @rule()
    def tell_ack(self) -> None:
        self.apply(*self.acks_to_tell.pop(0))

    @rule()
    def other_asks_lead(self) -> None:
        self.ask_lead()

    # Consumers

    @rule(task=st.sampled_from(NAMES), num_rows=st.integers(1, 4), name=st.sampled_from(("a", "b")))
    def ask_for_rows(self, task: str, num_rows: int, name: str) -> None:
        self.fetch(task, num_rows, name)

    @rule(data=st.data(), told=told)
    def work(self, data: st.DataObject, told: str) -> None:
        leases = [(owner, lease) for (owner, _), lease in self.leases.items() if lease.rows]
        if leases:
            owner, lease = data.draw(st.sampled_from(leases))
            for row in data.draw(st.lists(st.sampled_from(lease.rows), unique=True, min_size=1)):
                self.finish(owner, lease, row, told=told)

    @rule(data=st.data())
    def return_rows(self, data: st.DataObject) -> None:
        leases = [lease for lease in self.leases.values() if lease.rows and lease.task != "train"]
        if leases:
            lease = data.draw(st.sampled_from(leases))
            self.release(lease, data.draw(st.lists(st.sampled_from(lease.rows), unique=True, min_size=1)))

    @rule(name=st.sampled_from(("a", "b")))
    def lose_consumer(self, name: str) -> None:
        self.consumer_dies(name)

    @rule(name=controllers, data=st.data())
    def fence(self, name: str, data: st.DataObject) -> None:
        fences = self.controllers[name].fences
        if fences:
            self.carry_out(name, data.draw(st.sampled_from(fences)))

    # Faults

    def all_connected(self) -> bool:
        connected = all(link.connected for unit in self.units.values() for link in unit.links.values())
        return connected and not any(controller.state.recovering for controller in self.controllers.values())

    def calm(self) -> bool:
        """Everybody is up, and what was lost was put again."""
        lost = sum(controller.state.stats().lost_rows for controller in self.controllers.values())
        return self.all_connected() and not lost

    @precondition(all_connected)
    @rule(unit=units, name=controllers, handled=st.integers(0, 3), given_up=st.booleans())
    def channel_breaks(self, unit: str, name: str, handled: int, given_up: bool) -> None:
        """Some messages were handled, but their answers are lost."""
        self.hear_no_answers(unit, name, handled)
        self.break_link(unit, name)
        if given_up:
            self.notice(unit, name)
            self.apply(name, UnitLost(unit))

    @precondition(calm)
    @rule(unit=units, handled=st.integers(0, 3), name=controllers, acks=st.booleans(), told=told)
    def unit_fails(self, unit: str, handled: int, name: str, acks: bool, told: str) -> None:
        """Consumers may ack what they had in hand as soon as one controller knows of the loss."""
        self.hear_no_answers(unit, name, handled)
        self.unit_dies(unit)
        if acks:
            self.connect(unit, name)
            for (owner, token), lease in list(self.leases.items()):
                if CONTROLLER_OF[lease.task] == name:
                    for row in [row for row in lease.rows if self.where[token, row] == unit]:
                        self.finish(owner, lease, row, told=told)

    @precondition(all_connected)
    @rule(name=controllers, unit=units, handled=st.integers(0, 3))
    def controller_fails(self, name: str, unit: str, handled: int) -> None:
        """Also while lost rows wait to be put again: it made them durable."""
        self.hear_no_answers(unit, name, handled)
        self.controller_dies(name)

    @precondition(calm)
    @rule(unit=units, name=controllers, handled=st.integers(0, 3), first=st.booleans())
    def unit_fails_with_all_controllers(self, unit: str, name: str, handled: int, first: bool) -> None:
        """Nobody is left who knew its rows; some controllers may meet its next life before they die, too."""
        self.hear_no_answers(unit, name, handled)
        self.unit_dies(unit)
        if first:
            self.connect(unit, name)
            self.unit_dies(unit)
        for controller in SERVED:
            self.controller_dies(controller)

    @rule(unit=units, name=controllers)
    def reconnect(self, unit: str, name: str) -> None:
        if not self.units[unit].links[name].connected:
            self.connect(unit, name)

    @rule(unit=units, name=controllers)
    def give_unit_up(self, unit: str, name: str) -> None:
        link = self.units[unit].links[name]
        if not link.connected:
            if not link.noticed:
                self.notice(unit, name)
            self.apply(name, UnitLost(unit))

    def hear_no_answers(self, unit: str, name: str, num: int) -> None:
        for _ in range(min(num, len(self.units[unit].links[name].outbox))):
            self.deliver(unit, name, answer_arrives=False)

    # Quiet

    @rule(unit=units, num_rows=st.integers(1, 4), rank_slice=st.integers(1, 3))
    def quiet_moment(self, unit: str, num_rows: int, rank_slice: int) -> None:
        """Nothing dies for a while, and work goes on; else random events hardly get beyond the first task."""
        self.everybody_talks()
        for rows in groups(self.missing())[:3]:
            self.put(unit, rows)
        self.everybody_talks()
        for task in NAMES:
            self.fetch(task, num_rows, "a")
            for (owner, _), lease in list(self.leases.items()):
                for row in lease.rows[: -(-rank_slice * len(lease.rows) // 3)]:
                    self.finish(owner, lease, row)
            if rank_slice > 1:
                self.everybody_talks()

    @invariant()
    def counters_equal_a_recount(self) -> None:
        for controller in self.controllers.values():
            check_counters(controller.state)

    def teardown(self) -> None:
        """Once everything is up and somebody does the work, all of it is done, and both controllers know."""
        if not hasattr(self, "controllers"):
            return
        self.finish_everything(ALL_ROWS)


class TasksByInputsMachine(TwoControllersMachine):
    """The same with tasks that declare no outputs: what they write is learnt."""

    tasks = BY_INPUTS


TwoControllersMachine.TestCase.settings = settings(
    max_examples=3 * settings.default.max_examples,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
)
TasksByInputsMachine.TestCase.settings = TwoControllersMachine.TestCase.settings
test_random_events = TwoControllersMachine.TestCase
test_random_events_with_tasks_that_declare_inputs_only = TasksByInputsMachine.TestCase
