"""The job store as the job's processes use it, and a stranger who has the port but not the secret."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore

from asyncflow.errors import SealBroken
from asyncflow.sealed_store import SealedStore

SECRET = b"secret"


@pytest.fixture(name="strangers")
def _strangers() -> TCPStore:
    """The server's own client."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture(name="store")
def _store(strangers: TCPStore) -> SealedStore:
    return SealedStore(strangers.clone(), SECRET)  # type: ignore[attr-defined]  # the stub lacks it


def test_the_job_reads_what_the_job_wrote(store: SealedStore) -> None:
    store.set("a", "text")
    store.set("b", b"\x00\xff")
    store.set("empty", b"")
    assert store.get("a") == b"text"
    assert store.multi_get(["a", "b", "empty"]) == [b"text", b"\x00\xff", b""]
    assert store.check(["a", "b"]) and not store.check(["a", "c"])
    store.wait(["a"], timedelta(seconds=10))
    with pytest.raises(DistStoreError):
        store.wait(["c"], timedelta(seconds=0.05))
    store.queue_push("queue", b"item")
    assert store.queue_pop("queue") == b"item"
    assert store.set_first("first", "one") == store.set_first("first", "two") == b"one"
    assert store.delete_key("a") and not store.check(["a"])


def test_keys_below_a_prefix_are_those_of_the_whole_key(store: SealedStore) -> None:
    below = store.with_prefix("tq").with_prefix("0")
    below.set("mark", b"facts")
    assert store.get("tq/0/mark") == b"facts"
    assert below.list_keys() == ["mark"]
    assert below.get_existing(["mark"]) == {"mark": b"facts"}


FORGERIES: dict[str, Callable[[TCPStore], bytes]] = {
    "made up": lambda _: b"facts",
    "nothing": lambda _: b"",
    "shorter": lambda strangers: strangers.get("tq/0/mark")[:-1],
    "longer": lambda strangers: strangers.get("tq/0/mark") + b"!",
    "another key's": lambda strangers: strangers.get("tq/1/mark"),
    "another prefix's": lambda strangers: strangers.get("0/mark"),
    "another job's": lambda strangers: strangers.get("other"),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_what_a_stranger_writes_is_refused_by_the_name_of_its_key(
    store: SealedStore, strangers: TCPStore, forgery: Callable[[TCPStore], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("tq/0/mark", "tq/1/mark", "0/mark"):
        store.set(key, b"facts")
    SealedStore(strangers, b"other").set("tq/0/mark", b"facts")
    strangers.set("other", strangers.get("tq/0/mark"))  # type: ignore[arg-type]  # the stub lacks bytes
    store.set("tq/0/mark", b"facts")
    store.list_keys()  # no answer to a `set` is waited for, so what another client does next may be there earlier
    strangers.set("tq/0/mark", forgery(strangers))  # type: ignore[arg-type]  # the stub lacks bytes
    strangers.num_keys()
    mark = store.with_prefix("tq").with_prefix("0")
    for read in (
        lambda: store.get("tq/0/mark"),
        lambda: mark.get("mark"),
        lambda: store.multi_get(["tq/1/mark", "tq/0/mark"]),
    ):
        with pytest.raises(SealBroken, match="job store: the value of 'tq/0/mark' was not written by this job"):
            read()
    caplog.set_level(logging.ERROR)
    for _ in range(2):
        assert store.get_existing(["tq/0/mark", "tq/1/mark", "absent"]) == {"tq/1/mark": b"facts"}
    assert caplog.text.count("'tq/0/mark' was not written by this job") == 1


def test_counter_and_first_word_of_a_stranger_are_refused(store: SealedStore, strangers: TCPStore) -> None:
    strangers.add("next_row", 7)
    strangers.compare_set("first", "", "mine")
    with pytest.raises(SealBroken, match="'next_row'"):
        store.add("next_row", 1)
    with pytest.raises(SealBroken, match="'first'"):
        store.set_first("first", "ours")


def test_item_of_a_stranger_is_refused_and_the_next_one_comes(store: SealedStore, strangers: TCPStore) -> None:
    store.set("queue", b"item")
    for item in (b"garbage", strangers.get("queue")):  # a value of the same key is not an item
        strangers.queue_push("queue", item)
    store.queue_push("queue", b"item")
    for _ in range(2):
        with pytest.raises(SealBroken, match="'queue'"):
            store.queue_pop("queue")
    assert store.queue_pop("queue") == b"item"


def test_many_count_at_once_and_no_number_is_lost(store: SealedStore, strangers: TCPStore) -> None:
    assert store.add("counter", 0) == 0
    sums: list[int] = []

    def count() -> None:
        own = SealedStore(strangers.clone(), SECRET)  # type: ignore[attr-defined]  # the stub lacks it
        sums.extend(own.add("counter", 1) for _ in range(50))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sums) == list(range(1, 201))


class ServerBehind(HashStore):
    """Takes what was set only with the next call that it answers, as a server does whose client waits for no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, bytes]] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub lacks bytes
        self.sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        while self.sent:
            super().set(*self.sent.pop(0))  # type: ignore[arg-type]  # the stub lacks bytes
        return bool(super().check(keys))


def test_what_is_put_is_with_the_server_when_the_call_returns() -> None:
    server = ServerBehind()
    store = SealedStore(server, SECRET)
    store.set("later", b"1")
    assert server.num_keys() == 0
    store.put("now", b"1")
    assert server.num_keys() == 2 and not server.sent
