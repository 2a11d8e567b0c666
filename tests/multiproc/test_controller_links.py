"""A storage unit and its controllers: notices, fences, registrations, restarts."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_controller import (
    Bench,
    done,
    numbers,
    refused,
    stats,
    until,
)

from asyncflow.errors import LeaseFenced, PeerRefused, PutPending, QueueFull, RowsExist, TransportError
from asyncflow.transport.meeting import Credentials
from tq.config import QueueConfig
from tq.messages import (
    Done,
    FenceRows,
    FenceTask,
    OutputsWritten,
    RegisterUnit,
    RemovalReason,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
    RowsRemoved,
    Stored,
    UnitAccepted,
)
from tq.wire import disclose


@pytest.fixture(name="bench")
def _bench(credentials: Credentials) -> Iterator[Bench]:
    bench = Bench(credentials)
    yield bench
    bench.close()


def test_rows_that_one_controller_refuses_are_taken_back_from_the_others(bench: Bench) -> None:
    controllers = [bench.controller(f"controller-{k}") for k in range(3)]
    bench.unit(controllers=3)
    for controller in controllers:
        controller.hears(RegisterUnit)
    controllers[1].refusals[RowsCreated] = QueueFull("no room")
    controllers[2].parking.add(RowsCreated)
    refused(bench.client().create([7, 8], {"x": numbers(1, 2)}), QueueFull, "controller-1: no room")
    for controller in controllers:
        controller.hears(RowsCreated)
        assert controller.hears(RowsRemoved) == RowsRemoved("storage-0", 1, [7, 8], RemovalReason.REFUSED)


@pytest.mark.gate
def test_fence_is_confirmed_only_when_its_controller_knows_what_was_written_before(bench: Bench) -> None:
    """Else the controller would hand out a row that is done."""
    controller, client = bench.started()
    done(client.create([0, 1], {"x": numbers(0, 1)}))
    controller.parking.add(OutputsWritten)
    put = client.put("ref", 3, [0], {"ref": numbers(1)})
    parked = controller.parks()
    orders = bench.client("controller-0")
    fence = orders.connection.submit(FenceRows("ref", 5, [0]))
    whole_task = orders.connection.submit(FenceTask("ref", 5, []))
    assert isinstance(bench.client("controller-9").ask(FenceRows("train", 5, [0])), Done)
    assert isinstance(orders.ask(FenceRows("ref", 5, [1])), Done)
    assert not fence.done() and not whole_task.done() and not put.done()
    parked.send_reply(Done())
    assert isinstance(done(put), Stored)
    assert isinstance(done(fence), Done) and isinstance(done(whole_task), Done)
    refused(client.put("ref", 4, [1], {"ref": numbers(1)}), LeaseFenced, "row 1")


def test_fence_of_one_controller_does_not_wait_for_another(bench: Bench) -> None:
    controllers = [bench.controller(f"controller-{k}") for k in range(2)]
    bench.unit(controllers=2)
    for controller in controllers:
        controller.hears(RegisterUnit)
    client = bench.client()
    done(client.create([0], {"x": numbers(0)}))
    controllers[1].parking.add(OutputsWritten)
    put = client.put("ref", 3, [0], {"ref": numbers(1)})
    parked = controllers[1].parks()
    for message in (RowsCreated, RowsConfirmed, OutputsWritten):
        controllers[0].hears(message)
    assert isinstance(bench.client("controller-0").ask(FenceRows("ref", 5, [0])), Done)
    parked.send_reply(Done())
    done(put)


@pytest.mark.gate
def test_put_waits_for_the_first_controller_and_is_in_its_inventory(bench: Bench) -> None:
    bench.unit(controllers=2)
    put = bench.client().create([3], {"x": numbers(0)}, groups=[9], group_size=4)
    controller = bench.controller()
    assert isinstance(done(put), Stored)
    known = [record.rows for record in controller.hears(RegisterUnit).records]
    assert known or controller.hears(RowsCreated).rows == [3], "told one way or the other"


def test_put_without_any_controller_fails_at_its_deadline(bench: Bench) -> None:
    bench.unit(QueueConfig(request_timeout_s=1), controllers=2)
    client = bench.client()
    refused(client.put("ref", 1, [0]), LeaseFenced, "row 0")
    refused(client.create([3], {"x": numbers(0)}, timeout_s=-4.5), TransportError, "controller-[01] has never been up")
    assert stats(client).num_rows == 0


def test_unit_registers_again_and_what_was_in_flight_is_covered(bench: Bench) -> None:
    controller, client = bench.started()
    done(client.create([0, 1], {"x": numbers(0, 1)}))
    controller.parking |= {OutputsWritten, RowsCreated}
    put = client.put("ref", 3, [0], {"ref": numbers(1)})
    create = client.create([5], {"x": numbers(5)})
    controller.parks()
    controller.parks()
    controller.close()
    controller = bench.controller(accept=UnitAccepted(["ref", "train"], [1], {"train": [0]}))
    inventory = controller.hears(RegisterUnit)
    assert {tuple(record.rows): (record.columns, record.done) for record in inventory.records} == {
        (0,): (["ref", "x"], ["ref"]),
        (1, 5): (["x"], []),
    }
    assert isinstance(done(put), Stored) and isinstance(done(create), Stored)
    assert stats(client).num_rows == 1, "row 0 is done by both tasks, row 1 lives elsewhere"


def test_rows_in_flight_that_the_controller_knows_elsewhere_are_refused(bench: Bench) -> None:
    controller, client = bench.started()
    controller.parking.add(RowsCreated)
    create = client.create([5], {"x": numbers(5)})
    controller.parks()
    controller.close()
    bench.controller(accept=UnitAccepted(["ref"], [5]))
    refused(create, PutPending, "elsewhere")
    assert stats(client).num_rows == 0


@pytest.mark.parametrize("answer", [RowsAccepted(), PutPending("elsewhere"), QueueFull("no room")])
def test_put_whose_rows_were_dropped_fails_and_harms_no_later_one(bench: Bench, answer: Any) -> None:
    """One controller took it, started anew, and knows its row elsewhere; the other one answers late."""
    first, second = (bench.controller(f"controller-{k}") for k in range(2))
    bench.unit(controllers=2)
    for controller in (first, second):
        controller.hears(RegisterUnit)
    client = bench.client()
    second.parking.add(RowsCreated)
    put = client.create([5], {"x": numbers(5)})
    late = second.parks()
    first.close()
    first = bench.controller(accept=UnitAccepted(["ref"], [5]))
    until(lambda: stats(client).num_rows == 0)
    refused(client.create([5], {"x": numbers(5)}), PutPending, "row 5 is just being put here")
    if isinstance(answer, RowsAccepted):
        late.send_reply(answer)
    else:
        late.send_refusal(answer)
    refused(put, QueueFull if isinstance(answer, QueueFull) else PutPending, "no room|elsewhere")
    second.parking.clear()
    assert isinstance(done(client.create([5], {"x": numbers(5)})), Stored)
    assert stats(client).num_rows == 1


@pytest.mark.parametrize(
    ("answers", "refusal"),
    [
        ([RowsExist("at storage-1"), RowsExist("at storage-1")], RowsExist),
        ([None, RowsExist("at storage-1")], PutPending),
        ([PutPending("at storage-1"), RowsExist("at storage-1")], PutPending),
        ([RowsExist("at storage-1"), QueueFull("no room")], QueueFull),
    ],
)
def test_rows_exist_when_all_controllers_say_so(
    bench: Bench, answers: list[PeerRefused | None], refusal: type[PeerRefused]
) -> None:
    """One of them may be about to hear that the rows are gone."""
    controllers = [bench.controller(f"controller-{k}") for k in range(2)]
    bench.unit(controllers=2)
    client = bench.client()
    for controller, answer in zip(controllers, answers, strict=True):
        controller.hears(RegisterUnit)
        if answer is not None:
            controller.refusals[RowsCreated] = answer
    refused(client.create([5], {"x": numbers(5)}), refusal, "storage-1|no room")
    assert stats(client).num_rows == 0
    for controller in controllers:
        controller.hears(RowsCreated)
        assert controller.hears(RowsRemoved).rows == [5]


def test_controller_that_joins_later_hears_of_everything(bench: Bench) -> None:
    bench.controller()
    bench.unit(controllers=2)
    client = bench.client()
    done(client.create([0], {"x": numbers(0)}))
    late = bench.controller("controller-1")
    assert [record.rows for record in late.hears(RegisterUnit).records] == [[0]]
    done(client.create([1], {"x": numbers(1)}))
    assert late.hears(RowsCreated).rows == [1]


def test_fence_during_a_registration_does_not_wait_for_it(bench: Bench) -> None:
    controller, client = bench.started()
    done(client.create([0], {"x": numbers(0)}))
    controller.parking.add(OutputsWritten)
    put = client.put("ref", 3, [0], {"ref": numbers(1)})
    controller.parks()
    orders = bench.client("controller-0")
    controller.close()
    registration = bench.controller(parking={RegisterUnit}).parks()
    assert isinstance(orders.ask(FenceRows("ref", 5, [0])), Done)
    assert not put.done()
    registration.send_reply(UnitAccepted(["ref"], []))
    assert isinstance(done(put), Stored)


@pytest.mark.gate
def test_restarted_controllers_hear_of_every_row_exactly_once(bench: Bench) -> None:
    """In the inventory or after it, never both, never neither, whenever the channel breaks."""
    controller, _ = bench.started()
    stop, created = threading.Event(), list[int]()

    def produce(first: int) -> None:
        client = bench.client(f"producer-{first}")
        for row in range(first, first + 10**6):
            if stop.is_set():
                return
            done(client.create([row], {"x": numbers(row)}))
            done(client.put("ref", 1, [row], {"ref": numbers(row)}))
            created.append(row)

    producers = [threading.Thread(target=produce, args=(k * 10**6,)) for k in range(3)]
    for producer in producers:
        producer.start()
    for life in range(4):
        until(lambda life=life: len(created) > 40 * (life + 1))
        controller.close()
        controller = bench.controller()
    inventory = controller.hears(RegisterUnit)
    until(lambda: len(created) > 240)
    stop.set()
    for producer in producers:
        producer.join()
    rows = [row for record in inventory.records for row in record.rows]
    written = [row for record in inventory.records if record.done for row in record.rows]
    while not controller.heard.empty():
        message = controller.heard.get_nowait()
        (rows if isinstance(message, RowsCreated) else written).extend(message.rows)
    assert sorted(rows) == sorted(written) == sorted(created)


def test_commits_from_before_rows_were_lost_are_learnt(bench: Bench) -> None:
    controller, client = bench.started()
    controller.parking.add(RowsCreated)
    create = client.create([5, 6], {"x": numbers(5, 6)})
    controller.parks().send_reply(RowsAccepted({"ref": [1], "train": [0, 1]}))
    done(create)
    assert stats(client).num_rows == 1
    done(client.put("ref", 1, [5]))
    assert stats(client).num_rows == 0


def check_confirmed(message: RowsConfirmed, rows: list[int], commits: dict[str, list[int]]) -> None:
    """It names these rows, with their numbers, and what controllers know of them."""
    assert (message.unit, message.rows, message.commits) == ("storage-0", rows, commits)
    assert disclose(message.values)["x"].values.tolist() == rows


def test_rows_are_confirmed_when_every_controller_agreed_and_with_what_each_of_them_knows(bench: Bench) -> None:
    controllers = [bench.controller(f"controller-{k}") for k in range(2)]
    bench.unit(controllers=2)
    for controller in controllers:
        controller.hears(RegisterUnit)
        controller.parking.add(RowsCreated)
    controllers[1].parking.add(RowsConfirmed)
    client = bench.client()
    put = client.create([5, 6], {"x": numbers(5, 6)})
    announced = [controller.parks() for controller in controllers]
    assert all(call.message.announced for call in announced)
    announced[0].send_reply(RowsAccepted({"train": [1]}))
    announced[1].send_reply(RowsAccepted({"ref": [0, 1]}))
    confirmed = controllers[1].parks()
    check_confirmed(confirmed.message, [5, 6], {"ref": [0, 1], "train": [1]})
    assert not put.done(), "a controller that does not know yet could not report the rows as lost"
    confirmed.send_reply(RowsAccepted({"train": [0]}))
    done(put)
    assert stats(client).num_rows == 0


def test_rows_that_not_all_agreed_to_are_held_in_the_inventory_of_a_late_controller(bench: Bench) -> None:
    controller = bench.controller()
    bench.unit(controllers=2)
    controller.hears(RegisterUnit)
    controller.parking.add(RowsCreated)
    put = bench.client().create([5], {"x": numbers(5)})
    announced = controller.parks()
    late = bench.controller("controller-1")
    assert [record.announced for record in late.hears(RegisterUnit).records] == [True]
    announced.send_reply(RowsAccepted({"ref": [0]}))
    done(put)
    check_confirmed(late.hears(RowsConfirmed), [5], {"ref": [0]})


def test_commits_that_one_controller_knows_are_told_to_the_others(bench: Bench) -> None:
    controllers = [bench.controller(f"controller-{k}") for k in range(2)]
    bench.unit(controllers=2)
    for controller in controllers:
        controller.hears(RegisterUnit)
    client = bench.client()
    done(client.create([5, 6], {"x": numbers(5, 6)}))
    controllers[1].close()
    bench.controller("controller-1", accept=UnitAccepted(["ref", "train"], [], {"ref": [6]}))
    for message in (RowsCreated, RowsConfirmed):
        controllers[0].hears(message)
    assert controllers[0].hears(RowsConfirmed) == RowsConfirmed("storage-0", [6], {"ref": [0]})


def test_close_fails_what_waits_and_is_idempotent(bench: Bench) -> None:
    controller = bench.controller()
    unit = bench.unit(controllers=2)
    controller.hears(RegisterUnit)
    controller.parking.add(RowsCreated)
    put = bench.client().create([0], {"x": numbers(0)})
    controller.parks()
    unit.close()
    unit.close()
    refused(put, TransportError, "clos")
