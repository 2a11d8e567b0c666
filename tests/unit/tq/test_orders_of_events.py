"""A unit dies with rows that a consumer has in hand or just returned: whatever comes first, all work is done once."""

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from modelled_controller import CONTROLLER_OF, SERVED
from queue_model import check_counters
from two_controllers import TwoControllers

from tq.control.events import UnitLost

ROWS = [0, 1]


class Story(TwoControllers):
    """Begins when `a` has row 0 in hand, at the unit u0. What cannot happen at its time does not."""

    def begin(self, task: str) -> None:
        self.reset()
        self.task, self.server = task, CONTROLLER_OF[task]
        self.to_put = set(ROWS)
        self.put("u0", ROWS)
        self.everybody_talks()
        if task == "ref":
            self.fetch("rollout", 2, "a")
            self.finish_leases()
            self.everybody_talks()
        self.fetch(task, 1, "a")
        assert (task, 0) in self.held

    def tell(self, events: Iterable[str]) -> None:
        for event in events:
            getattr(self, event)()
            for controller in self.controllers.values():
                check_counters(controller.state)

    def return_row(self) -> None:
        for lease in self.leases.values():
            if lease.task == self.task:
                self.release(lease, list(lease.rows))

    def fence_holds(self) -> None:
        fences = self.controllers[self.server].fences
        if fences:
            self.carry_out(self.server, fences[0])

    def last_fence_holds(self) -> None:
        fences = self.controllers[self.server].fences
        if fences:
            self.carry_out(self.server, fences[-1])

    def unit_dies_alone(self) -> None:
        self.unit_dies("u0")

    def lead_meets_unit(self) -> None:
        self.meet("lead")

    def other_meets_unit(self) -> None:
        self.meet("other")

    def meet(self, name: str) -> None:
        if not self.units["u0"].links[name].connected:
            self.connect("u0", name)

    def unit_is_given_up(self) -> None:
        link = self.units["u0"].links[self.server]
        if not link.connected:
            if not link.noticed:
                self.notice("u0", self.server)
            self.apply(self.server, UnitLost("u0"))

    def put_again_there(self) -> None:
        self.put_again("u0")

    def put_again_elsewhere(self) -> None:
        self.put_again("u1")

    def put_again(self, unit: str) -> None:
        missing = self.missing()
        if missing:
            self.put(unit, missing)
            for _ in range(2):  # both rounds, as far as controllers hear
                for name in SERVED:
                    self.flush(unit, name)

    def somebody_else_asks(self) -> None:
        self.fetch(self.task, 1, "b")

    def finish_leases(self) -> None:
        for (owner, _), lease in list(self.leases.items()):
            for row in list(lease.rows):
                self.finish(owner, lease, row)

    def lead_dies(self) -> None:
        self.controller_dies("lead")

    def other_dies(self) -> None:
        self.controller_dies("other")

    def consumer_ends(self) -> None:
        self.consumer_dies("a")

    def fences_hold(self) -> None:
        self.everybody_talks()


@pytest.mark.parametrize("task", ["look", "ref"])
@pytest.mark.parametrize(
    "events",
    [
        ["unit_dies_alone", "lead_meets_unit", "other_meets_unit", "put_again_there", "finish_leases"],
        ["return_row", "fence_holds", "fence_holds", "unit_dies_alone", "other_meets_unit", "put_again_elsewhere"],
    ],
    ids=["in hand", "returned"],
)
def test_all_orders_of_few_events_end_well(task: str, events: Sequence[str]) -> None:
    for order in sorted(set(itertools.permutations(events))):
        ends_well(task, order)


@pytest.mark.parametrize("task", ["look", "ref", "rollout"])
@pytest.mark.parametrize("dies", ["lead_dies", "other_dies", "consumer_ends"])
def test_random_orders_of_many_events_end_well(task: str, dies: str) -> None:
    events = ["return_row", "fence_holds", "last_fence_holds", "unit_dies_alone", "unit_is_given_up", "ask_lead"]
    events += ["lead_meets_unit", "other_meets_unit", "put_again_there", "put_again_elsewhere"]
    events += ["somebody_else_asks", "finish_leases", dies]
    chance = random.Random(0)
    for _ in range(60):
        ends_well(task, chance.sample(events, len(events)))


@pytest.mark.parametrize("voids", [[], ["other_dies"]], ids=["its rows were fenced", "its task was fenced"])
def test_row_of_a_void_lease_is_handed_out_again_though_its_unit_starts_empty(voids: Sequence[str]) -> None:
    events = ["consumer_ends", "fences_hold", "unit_dies_alone", "lead_meets_unit", "other_meets_unit"]
    ends_well("look", [*voids, *events, "put_again_there", "somebody_else_asks"])


def ends_well(task: str, order: Sequence[str]) -> None:
    story = Story()
    story.begin(task)
    try:
        story.tell(order)
        story.finish_everything(ROWS)
    except AssertionError as error:
        raise AssertionError(f"{task}: {', '.join(order)}") from error
