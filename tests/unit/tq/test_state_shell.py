"""What the shell of the control state tells, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from counting_store import CountingStore, memory_in, shell_of

from tq import TaskSpec
from tq.control.events import Answer
from tq.control.state import ControlState
from tq.messages import Done, LeaseGrant, NoRows, NoRowsReason, RowsAccepted


@dataclass
class FakeCall:
    """Writes down its reply."""

    reply: Callable[[Any], None]


def test_answers_to_fetches_go_out_first_and_the_others_in_their_order() -> None:
    shell = shell_of(ControlState([TaskSpec("look", frozenset({"x"}))]), memory_in(CountingStore()))
    told: list[Any] = []
    grant, nothing = LeaseGrant("look", 1, 1, [0], [0], ["storage-0"]), NoRows(NoRowsReason.STOP, 0)
    replies = [RowsAccepted(), grant, Done(), nothing]
    call = cast(Any, FakeCall(told.append))
    shell.send([(call, Answer(k, cast(Any, reply))) for k, reply in enumerate(replies)])
    assert told == [grant, nothing, replies[0], replies[2]]
