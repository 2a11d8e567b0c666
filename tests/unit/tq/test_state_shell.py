"""What the shell of the control state tells, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
from counting_store import CountingStore, memory_in, shell_of

from tq import TaskSpec
from tq.control.events import Answer
from tq.control.state import ControlState
from tq.messages import (
    Done,
    FetchRound,
    FetchRows,
    LeaseGrant,
    Message,
    NoRows,
    NoRowsReason,
    RowsAccepted,
    RowsConfirmed,
    RowsCreated,
)


@dataclass
class FakeCall:
    """Writes down its reply."""

    send_reply: Callable[[Any], None]
    message: Message = Done()  # noqa: RUF009


def test_answers_to_fetches_go_out_first_and_the_others_in_their_order() -> None:
    shell = shell_of(ControlState([TaskSpec("look", frozenset({"x"}))]), memory_in(CountingStore()))
    told: list[Any] = []
    grant, nothing = LeaseGrant("look", 1, 1, [0], [0], ["storage-0"]), NoRows(NoRowsReason.STOP, 0)
    replies = [RowsAccepted(), grant, Done(), nothing]
    call = cast(Any, FakeCall(told.append))
    shell.send([(call, Answer(k, cast(Any, reply))) for k, reply in enumerate(replies)])
    assert told == [grant, nothing, replies[0], replies[2]]


CREATED = RowsCreated("storage-0", 1, [4, 5], [4, 4], ["x"], [1, 1], 16, values=b"both")
FETCH = FetchRows("look", "me", 2, 0, 1.0)
ROUND = FetchRound("look", "me", 1, 0, 2, 0, 1, 1.0)


@pytest.mark.parametrize(
    ("event", "rows", "units", "fetch", "values"),
    [
        (CREATED, [4, 5], ["storage-0"] * 2, FETCH, b"both"),
        (RowsConfirmed("storage-0", [4, 5], values=b"both"), [4, 5], ["storage-0"] * 2, FETCH, b"both"),
        (CREATED, [4], ["storage-0"], FETCH, b""),  # the values are of both rows
        (CREATED, [3, 4], ["storage-0"] * 2, FETCH, b""),
        (CREATED, [4, 5], ["storage-0", "storage-1"], FETCH, b""),  # row 5 is another put's
        (CREATED, [4, 5], ["storage-0"] * 2, ROUND, b""),  # loaders read rounds by themselves
        (None, [4, 5], ["storage-0"] * 2, FETCH, b""),
    ],
)
def test_a_lease_brings_the_values_of_the_put_that_it_waited_for(
    event: RowsCreated | RowsConfirmed | None, rows: list[int], units: list[str], fetch: Message, values: bytes
) -> None:
    shell = shell_of(ControlState([TaskSpec("look", frozenset({"x"}))]), memory_in(CountingStore()))
    told: list[Any] = []
    grant = LeaseGrant("look", 1, 1, rows, rows, units)
    shell.send([(cast(Any, FakeCall(told.append, fetch)), Answer(1, grant))], event)
    assert [answer.values for answer in told] == [values]
    assert not grant.values, "the state keeps this one, for a fetch that asks again"
