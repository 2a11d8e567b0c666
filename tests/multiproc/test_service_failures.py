"""A service whose thread dies ends, and says which one and why, so that it is started again."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_services import of_queue, weight_agent
from torch.distributed import TCPStore

from tq import Column, Lease, QueueClient
from tq.config import QueueConfig, TaskConfig
from tq.directory import QueueAddress

CONFIG = QueueConfig(num_storage_units=1, request_timeout_s=20, unit_timeout_s=1)
WHY = "KeyError: 'nobody thought of this'"

Start = Callable[..., Any]


@pytest.fixture(name="address")
def _address(store: TCPStore, tmp_path: Path) -> Path:
    """Where a queue with one task is, or will be."""
    path = tmp_path / "queue.json"
    task = TaskConfig(name="train", inputs=("x",))
    QueueAddress("127.0.0.1", store.port, secrets.token_bytes(32), CONFIG, (task,)).save(path)
    return path


@pytest.mark.parametrize(
    ("part", "from_call", "thread"),
    [
        ("tq.unit.unit_puts:UnitUpkeep._has_work", 1, "upkeep"),
        ("tq.unit.storage:StorageUnit.inventory", 1, "link-controller-0"),
        ("tq.unit.controller_link:ControllerLink._send_next", 1, "tell-controller-0"),
        # The second, since the first is made before any thread is there.
        ("tq.unit.controller_link:ControllerLinks.send_beat", 2, "timers"),
    ],
)
def test_storage_unit_whose_thread_dies_ends_and_names_it(
    start: Start, address: Path, part: str, from_call: int, thread: str
) -> None:
    start(of_queue, str(address), "controller-0")
    unit = start(of_queue, str(address), "storage-0", part, from_call)
    assert unit.hear() == f"storage-0: thread {thread} died: {WHY}"
    assert unit.end() == 0


@pytest.mark.gate
def test_controller_whose_thread_dies_ends_and_names_it(start: Start, address: Path) -> None:
    controller = start(of_queue, str(address), "controller-0", "tq.control.durable_facts:UnitBacklog._tell_all", 1)
    start(of_queue, str(address), "storage-0")
    client = QueueClient(QueueAddress.load(address).connect_store(), "me", config=CONFIG)
    client.put_rows({"x": Column.of_scalars(torch.ones(1))})
    lease = client.fetch("train", num_rows=1)
    assert isinstance(lease, Lease)
    lease.release()  # the unit is to be told
    assert controller.hear() == f"controller-0: thread orders-storage-0 died: {WHY}"
    client.close()


@pytest.mark.parametrize(
    ("part", "thread"),
    [
        ("weightsync.agent.agent_state:AgentState.tick", "weights-timer"),
        ("weightsync.agent.agent_state:AgentState.peer_has", "peer-weights-1"),
    ],
)
def test_weight_agent_whose_thread_dies_ends_and_names_it(start: Start, part: str, thread: str) -> None:
    start(weight_agent, "weights-1")
    agent = start(weight_agent, "weights-0", part)
    assert agent.hear() == "serving"
    assert agent.hear() == f"weights-0: thread {thread} died: {WHY}"
