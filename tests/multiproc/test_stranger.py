"""Somebody who reaches the port of a queue's store, and does not have the secret: nothing that he says is believed."""

import os
import signal
from pathlib import Path

import msgspec
import pytest
from waiting import wait_until

import tq
from asyncflow.errors import SealBroken
from asyncflow.transport.meeting import ask_key
from tq.control.durable_facts import Mark
from tq.directory import QueueAddress

CONFIG = tq.QueueConfig(request_timeout_s=20, lease_timeout_s=3, unit_grace_s=0.5)
DEADLINE_S = 60.0


def test_stranger_at_the_port_of_a_queue_is_refused_by_name(tmp_path: Path) -> None:
    with tq.start({"score": ["x"]}, num_units=1, config=CONFIG, log_dir=tmp_path) as queue:
        address = QueueAddress.load(queue.address)
        stranger = address.connect_store().store
        client = queue.client("me")
        client.put_rows({"x": tq.column([1, 2])})
        assert not any(address.secret in stranger.get(key) for key in stranger.list_keys() if key.startswith("tq/"))

        for item in (b"close", b"garbage", b""):
            for service in ("controller-0", "storage-0"):
                stranger.queue_push(ask_key(service), item)
        log = tmp_path / "controller-0.log"
        wait_until(
            lambda: log.read_text().count(ask_key("controller-0")) == 3, "refusal of asks", deadline_s=DEADLINE_S
        )
        lease = queue.client("another").fetch("score", num_rows=1)
        assert isinstance(lease, tq.Lease) and len(lease.rows) == 1

        base = "tq/0/controller-0"
        stopped = msgspec.msgpack.encode(Mark(stopped=True))
        for key, value in (
            (f"{base}/mark", stopped),
            (f"{base}/owner/ghost@1", b"1"),
            (f"{base}/finished/0/0", b"\x90"),
        ):
            before = stranger.get(key) if stranger.check([key]) else None
            stranger.set(key, value)  # type: ignore[arg-type]  # the stub lacks bytes
            os.kill(queue.pids()["controller-0"], signal.SIGKILL)
            line = f"ERROR job store: the value of {key!r} was not written by this job"
            wait_until(lambda line=line: line in log.read_text(), line, deadline_s=DEADLINE_S)  # type: ignore[misc]
            if before is None:
                stranger.delete_key(key)
            else:
                stranger.set(key, before)  # type: ignore[arg-type]  # the stub lacks bytes
            queue.wait_until_up(DEADLINE_S)
        lease = client.fetch("score", num_rows=1, timeout_s=CONFIG.request_timeout_s)
        assert isinstance(lease, tq.Lease) and len(lease.rows) == 1, "the queue goes on where it was"

        key = "tq/outputs/score/x"
        stranger.set(key, "1")
        os.kill(queue.pids()["storage-0"], signal.SIGKILL)
        line = f"ERROR job store: the value of {key!r} was not written by this job"
        wait_until(lambda: line in log.read_text(), line, deadline_s=DEADLINE_S)
        stranger.delete_key(key)
        queue.wait_until_up(DEADLINE_S)

        stranger.set("tq/next_row", "0")
        with pytest.raises(SealBroken, match="'tq/next_row'"):
            queue.client("producer").put_rows({"x": tq.column([3])})
        stranger.set("tq/directory", "mine")
        with pytest.raises(SealBroken, match="'tq/directory'"):
            queue.client("late").fetch("score", num_rows=1)
