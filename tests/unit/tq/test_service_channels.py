"""A caller that waits for a service which is away can be told to stop waiting."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Limits
from asyncflow.transport.meeting import Credentials, ask_key
from tq.config import QueueConfig
from tq.messages import CONTROLLER_REPLIES
from tq.service_channels import ServiceChannels
from tq.unit.storage import StorageUnit

SOON_S = 10.0
"""Less than the wait for a service takes, if nobody ends it."""


@pytest.fixture(name="credentials")
def _credentials() -> Credentials:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return Credentials(store, b"secret", timeout_s=30.0)


def asked_for(credentials: Credentials, service: str) -> None:
    """Wait until somebody asks an absent service for a channel."""
    credentials.own_store().queue_pop(ask_key(service))


def test_closing_ends_the_wait_for_a_service_that_is_away(credentials: Credentials) -> None:
    links = ServiceChannels(credentials, "me", Limits(), lambda *_: None)
    ended: list[str] = []

    def connect() -> None:
        with pytest.raises(TransportError) as caught:
            links.get("controller-0", CONTROLLER_REPLIES)
        ended.append(str(caught.value))

    connecting = threading.Thread(target=connect)
    connecting.start()
    asked_for(credentials, "controller-0")
    links.close()
    connecting.join(SOON_S)
    assert ended == ["me: closed while controller-0 was asked for a channel"]
    with pytest.raises(TransportError, match="me: its channels are closed"):
        links.get("controller-0", CONTROLLER_REPLIES)


def test_unit_whose_controller_is_away_closes_at_once(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq.unit.controller_link._HANDSHAKE_S", 60.0)  # `close` does not wait for a thread so long
    unit = StorageUnit(credentials, "storage-0", QueueConfig(), controllers=["controller-0"])
    asked_for(credentials, "controller-0")
    unit.close()
    assert not [one.name for one in threading.enumerate() if one.name == "link-controller-0"]


def test_who_waits_for_an_earlier_life_of_a_service_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of a handshake that a dying process answered cannot be interrupted."""
    entered, release = threading.Event(), threading.Event()
    made: list[object] = []

    class Slow:
        closed = False

        def __init__(self, *arguments: object, **fields: object) -> None:
            made.append(self)
            if len(made) == 1:
                entered.set()
                assert release.wait(10)

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr("tq.service_channels.Connection", Slow)
    channels = ServiceChannels(None, "me", Limits(), lambda *_: None)  # type: ignore[arg-type]
    first = threading.Thread(target=channels.get, args=("storage-0", None))
    first.start()
    assert entered.wait(10)
    channels.give_up_waiting("storage-0")
    assert channels.get("storage-0", None) is made[1]
    release.set()
    first.join(10)
