"""Exchanges before a channel exists: only who knows the job's secret takes part, and each is good for one channel."""

import threading
from datetime import timedelta

import msgspec
import pytest
from torch.distributed import TCPStore

from asyncflow.errors import TransportError
from asyncflow.transport import meeting as handshake
from asyncflow.transport.meeting import ChannelAsk, Credentials, accept_channel, ask_for_channel, ask_key, pair_key

SECRET = b"secret"
ASK = ChannelAsk("0123", "ref-0/0", b"n" * 16)


def test_keys_of_pairs_differ_in_every_field() -> None:
    keys = [
        pair_key(SECRET, "controller", ASK, b"s" * 16),
        pair_key(b"other", "controller", ASK, b"s" * 16),
        pair_key(SECRET, "storage-0", ASK, b"s" * 16),
        pair_key(SECRET, "controller", msgspec.structs.replace(ASK, channel_id="0124"), b"s" * 16),
        pair_key(SECRET, "controller", msgspec.structs.replace(ASK, client="ref-0/1"), b"s" * 16),
        pair_key(SECRET, "controller", msgspec.structs.replace(ASK, nonce=b"m" * 16), b"s" * 16),
        pair_key(SECRET, "controller", ASK, b"t" * 16),
    ]
    assert len(set(keys)) == len(keys)


@pytest.fixture(name="store")
def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def test_client_refuses_a_server_that_does_not_know_the_secret(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    serving = threading.Thread(target=_serve_once, args=(store, b"wrong", refused), kwargs={"patience_s": 2})
    serving.start()
    key = f"channel/controller/{ASK.channel_id}/offer"
    monkeypatch.setattr(handshake.secrets, "token_hex", lambda _: ASK.channel_id)
    with pytest.raises(TransportError, match=f"answered for controller does not know the job's secret .*{key}"):
        ask_for_channel(Credentials(store, SECRET).own_store(), SECRET, "controller", "ref-0/0")
    serving.join(timeout=10)
    assert "vanished" in refused[0], "the client answered a server that it must not trust"


def test_stop_ends_a_handshake_that_nobody_answers(store: TCPStore) -> None:
    stop, ended = threading.Event(), list[str]()

    def ask() -> None:
        with pytest.raises(TransportError) as caught:
            ask_for_channel(Credentials(store, SECRET).own_store(), SECRET, "controller", "ref-0/0", stop=stop)
        ended.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    Credentials(store, SECRET).own_store().queue_pop(ask_key("controller"))
    stop.set()
    asking.join(timeout=10)
    assert ended == ["ref-0/0: closed while controller was asked for a channel"]


def test_handshake_that_nobody_answers_ends_at_its_deadline(store: TCPStore) -> None:
    with pytest.raises(TransportError, match="controller did not answer; is it running"):
        ask_for_channel(Credentials(store, SECRET).own_store(), SECRET, "controller", "ref-0/0", timeout_s=0.01)


@pytest.mark.parametrize("replays", [False, True])
def test_server_refuses_a_client_that_does_not_know_the_secret(store: TCPStore, replays: bool) -> None:
    refused: list[str] = []
    serving = threading.Thread(target=_serve_once, args=(store, SECRET, refused))
    serving.start()
    own = Credentials(store, SECRET).own_store()
    own.queue_push(ask_key("controller"), msgspec.msgpack.encode(ASK))
    own.get(f"channel/controller/{ASK.channel_id}/offer")
    before = store.get(f"channel/controller/{ASK.channel_id}/offer") if replays else b"a guess"
    store.set(f"channel/controller/{ASK.channel_id}/answer", before)
    serving.join(timeout=30)
    assert "ref-0/0 does not know the job's secret" in refused[0]
    assert f"channel/controller/{ASK.channel_id}/answer" in refused[0]


def test_handshake_leaves_no_key_in_the_store(store: TCPStore) -> None:
    before = set(store.list_keys())
    refused: list[str] = []
    serving = threading.Thread(target=_serve_once, args=(store, SECRET, refused))
    serving.start()
    ask_for_channel(Credentials(store, SECRET).own_store(), SECRET, "controller", "ref-0/0")
    serving.join(timeout=10)
    assert refused == []
    assert set(store.list_keys()) == before


def test_both_ends_have_a_key_that_is_new_each_time(store: TCPStore) -> None:
    keys: list[bytes] = []
    for _ in range(2):
        serving = threading.Thread(target=_serve_once, args=(store, SECRET, [], keys))
        serving.start()
        keys.append(ask_for_channel(Credentials(store, SECRET).own_store(), SECRET, "controller", "ref-0/0"))
        serving.join(timeout=10)
    one, other = set(keys[:2]), set(keys[2:])
    assert len(one) == len(other) == 1, "the two ends differ"
    assert one != other


def _serve_once(
    store: TCPStore,
    secret: bytes,
    refused: list[str],
    keys: list[bytes] | None = None,
    *,
    patience_s: float = 30,
) -> None:
    own = Credentials(store, secret).own_store()
    ask = msgspec.msgpack.decode(
        Credentials(store, SECRET).own_store().queue_pop(ask_key("controller")), type=ChannelAsk
    )
    own.set_timeout(timedelta(seconds=patience_s))
    try:
        key = accept_channel(own, secret, "controller", ask)
        if keys is not None:
            keys.append(key)
    except TransportError as error:
        refused.append(str(error))
