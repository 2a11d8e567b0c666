"""Clients of a storm while the queue's services are away."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from transferqueue_parts import storm_clients

from asyncflow.errors import TransportError
from tq.messages import Granted


class NobodyAnswers:
    """A queue client whose services are gone, after `granted` was given out."""

    def __init__(self, granted: Granted | None = None) -> None:
        self._granted = granted

    def fetch(self, *_: Any, **__: Any) -> Granted:
        if self._granted is None:
            raise TransportError("gone")
        return self._granted

    def ack(self, *_: Any) -> None:
        raise TransportError("gone")


def consumer(pipe: Any, ledger: Path, client: NobodyAnswers, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(storm_clients, "_RETRY_S", 3600.0)
    return storm_clients._Consumer(pipe, client, ledger, storm_clients.LOOK, 1)  # type: ignore[arg-type]


@pytest.mark.timeout(30)
def test_consumer_that_is_told_to_end_does_not_wait_for_its_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = multiprocessing.Pipe()
    mine.send("end")
    consumer(theirs, tmp_path / "ledger", NobodyAnswers(), monkeypatch).step()


@pytest.mark.timeout(30)
def test_ack_is_not_repeated_when_everything_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = multiprocessing.Pipe()
    mine.send("end")
    granted = Granted("look", 7, 1, [1], [1], ["storage-0"], [1])
    acking = consumer(theirs, tmp_path / "ledger", NobodyAnswers(granted), monkeypatch)
    acking._settle(granted, granted.rows)
    deeds = [record.deed for record in storm_clients.read_ledger(tmp_path / "ledger")]
    assert deeds == [storm_clients.Deed.INTENT], "nobody knows whether it counted"
