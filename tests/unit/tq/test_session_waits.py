"""How long a client waits for a unit, and whom it believes about an ack that nobody confirmed."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.errors import LeaseFenced, TransportError
from tq.client.session import Absence, DataPlane
from tq.messages import LeaseGrant


def test_a_unit_is_away_only_since_somebody_said_so() -> None:
    now = 0.0
    absence = Absence(lambda: now)
    assert absence.note_answer(away=False) == 0.0
    now = 10.0  # the lead was gone so long; the one that was started in its place knows no unit yet
    assert absence.note_answer(away=True) == 0.0
    now = 14.0
    assert absence.note_answer(away=True) == 4.0
    assert absence.note_answer(away=False) == 0.0
    now = 20.0
    assert absence.note_answer(away=True) == 0.0


class OneUnit:
    """A session whose only controller was started again: it takes every earlier lease for void."""

    def __init__(self, answers: list[Exception | None], *, may_answer: bool) -> None:
        self.directory = SimpleNamespace(controllers=["controller-0"], controller_of=lambda task: "controller-0")
        self.held = SimpleNamespace(done=lambda grant, rows: None)
        self._answers = answers
        self._may_answer = may_answer

    def may_answer(self, unit: str) -> bool:
        return self._may_answer

    def start_deadline(self) -> Any:
        return SimpleNamespace(left_s=1.0)

    def connect_unit(self, name: str, timeout_s: float) -> Any:
        return SimpleNamespace(submit=lambda message: Future())

    connect_controller = connect_unit

    def answer(self, future: Any, service: str, message: Any, timeout_s: float) -> Any:
        if service == "controller-0":
            raise LeaseFenced("the lease is void")
        answer = self._answers.pop(0)
        if answer is not None:
            raise answer
        return None

    def retry_until(self, attempt: Any, deadline: Any) -> Any:
        while True:
            try:
                return attempt()
            except LeaseFenced:
                raise
            except TransportError:
                assert self._answers, "nothing is left to try"

    def post_message(self, service: str, message: Any) -> None:
        pass


def grant() -> LeaseGrant:
    return LeaseGrant(task="train", token=7, partition=0, rows=[1, 2], units=["storage-0", "storage-0"], groups=[0, 0])


def test_an_ack_that_a_unit_took_counts_though_the_controller_was_started_again() -> None:
    session = OneUnit([TransportError("storage-0 does not answer"), None], may_answer=True)
    DataPlane(session, max_message_bytes=1).ack(grant(), [1, 2])  # type: ignore[arg-type]


def test_a_lease_is_void_where_the_unit_says_so_or_is_given_up() -> None:
    lost = OneUnit([TransportError("storage-0 does not answer")], may_answer=False)
    refused = OneUnit([LeaseFenced("given to another")], may_answer=True)
    for session in (lost, refused):
        with pytest.raises(LeaseFenced):
            DataPlane(session, max_message_bytes=1).ack(grant(), [1, 2])  # type: ignore[arg-type]
