"""Who is believed."""

import msgspec
import pytest

from asyncflow.errors import TransportError
from launcher.nodes.node_messages import (
    Envelope,
    FromNode,
    Opener,
    Order,
    Ping,
    Sealer,
    StopAsked,
    read_body,
    read_envelope,
)

SECRET = b"secret"


def sealed(sealer: Sealer, message: msgspec.Struct | None = None) -> Envelope:
    envelope = read_envelope(sealer.seal(message))
    assert envelope is not None
    return envelope


def test_messages_arrive_as_they_were_said() -> None:
    sealer, opener = Sealer(SECRET, "1.a", "head"), Opener(SECRET, "1.a", "head")
    for message in (StopAsked(1), Ping(2.5)):
        body = opener.open(sealed(sealer, message))
        assert body is not None
        assert read_body(body, FromNode) == message


@pytest.mark.parametrize("other", [(b"guess", "1.a", "head"), (SECRET, "2.b", "head"), (SECRET, "1.a", "nodes")])
def test_who_does_not_know_the_secret_or_speaks_to_others_is_not_heard(other: tuple[bytes, str, str]) -> None:
    assert Opener(SECRET, "1.a", "head").open(sealed(Sealer(*other), StopAsked(1))) is None


def test_changed_message_is_not_heard() -> None:
    genuine = sealed(Sealer(SECRET, "1.a", "head"), StopAsked(1))
    body = msgspec.msgpack.encode(StopAsked(2))
    for changes in ({"body": body}, {"number": 2}, {"number": 2**64 - 1}, {"proof": b""}, {"sender": "1.b"}):
        assert Opener(SECRET, "1.a", "head").open(msgspec.structs.replace(genuine, **changes)) is None


def test_message_that_is_said_again_is_not_heard() -> None:
    envelope = sealed(Sealer(SECRET, "1.a", "head"), StopAsked(1))
    opener = Opener(SECRET, "1.a", "head")
    assert opener.open(envelope) is not None
    assert opener.open(envelope) is None


def test_message_that_was_taken_away_is_missed() -> None:
    sealer, opener = Sealer(SECRET, "1.a", "head"), Opener(SECRET, "1.a", "head")
    sealed(sealer, StopAsked(1))
    with pytest.raises(TransportError, match=r"1 messages of 1\.a are missing; something else reads them"):
        opener.open(sealed(sealer, StopAsked(2)))


def test_sign_of_life_replaces_those_before_it() -> None:
    sealer, opener = Sealer(SECRET, "head/beat", "nodes"), Opener(SECRET, "head/beat", "nodes")
    first, second, third = (sealed(sealer) for _ in range(3))
    assert [opener.newest(envelope) for envelope in (first, third, second)] == [1, 3, 3]
    forged = msgspec.structs.replace(third, number=9)
    assert opener.newest(forged) == 3


def test_what_nobody_wrote_is_no_envelope() -> None:
    for data in (b"", b"hello", b"\xc1", b"\x00" * 2**21, msgspec.msgpack.encode({"sender": 1})):
        assert read_envelope(data) is None


def test_message_of_another_version_says_so() -> None:
    with pytest.raises(TransportError, match="do all nodes run one version"):
        read_body(msgspec.msgpack.encode(StopAsked(1)), Order)
