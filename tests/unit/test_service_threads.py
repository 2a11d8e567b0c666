"""A service whose thread dies has failed, and says which one."""

import threading

import pytest

from asyncflow.errors import ConfigError, RoleFailed, TransportError
from asyncflow.process import ServiceThreads

DEADLINE_S = 30.0


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("row 7"), r"storage-0: thread upkeep died: KeyError: 'row 7'"),
        (TransportError("the disk is gone"), "storage-0: thread upkeep died: the disk is gone"),
    ],
)
def test_thread_that_dies_fails_its_service_by_name(error: Exception, text: str) -> None:
    threads = ServiceThreads("storage-0")
    threads.check()
    threads.start(raising, error, name="upkeep")
    assert threads.failed.wait(DEADLINE_S)
    with pytest.raises(RoleFailed, match=text) as raised:
        threads.wait(threading.Event())
    assert raised.value.__cause__ is error


def test_error_that_another_start_would_raise_again_keeps_its_kind() -> None:
    threads = ServiceThreads("controller-0")
    threads.start(raising, ConfigError("the data changed"), name="admission")
    assert threads.failed.wait(DEADLINE_S)
    with pytest.raises(ConfigError, match="the data changed"):
        threads.check()


def test_first_thread_that_dies_is_told() -> None:
    threads = ServiceThreads("controller-0")
    threads.fail("admission", ValueError("first"))
    threads.fail("unit-orders", ValueError("second"))
    with pytest.raises(RoleFailed, match="admission died: ValueError: first"):
        threads.check()


def test_thread_that_ends_fails_nothing() -> None:
    threads, seen, stop = ServiceThreads("storage-0"), list[int](), threading.Event()
    threads.start(seen.append, 3, name="upkeep").join(DEADLINE_S)
    stop.set()
    threads.wait(stop)
    assert (seen, threads.failed.is_set()) == ([3], False)


def test_what_threads_raise_while_the_service_closes_fails_nothing() -> None:
    threads = ServiceThreads("storage-0")
    threads.close()
    threads.start(raising, ValueError("the channel is closed"), name="upkeep").join(DEADLINE_S)
    threads.check()
