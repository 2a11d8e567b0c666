"""The queue and the weights between two hosts: what travels goes over the network, once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tq import TaskSpec
from weightsync.version import Version
from workers.settings.schedule import ScheduleConfig, ScheduleMode

from .hosts import Host, Party

Start = Callable[..., Party]
SYNC = ScheduleConfig(mode=ScheduleMode.SYNC, max_staleness=0, rollout_batch_size=4, n_samples_per_prompt=2)
DOUBLE = TaskSpec("double", frozenset({"x"}))
SLACK_BYTES = 600_000
"""Handshakes (of four channels each way between agents), frames and headers of TCP."""


@pytest.fixture(name="start")
def _start(two_hosts: list[Host]) -> Iterator[Start]:
    """Return a function that starts `MODULE.FUNCTION` on host K; the store is on host 0."""
    server = Party(two_hosts[0], "parties", "serve", (two_hosts[0].address, 0), two_hosts[0].address)
    opened, store = [server], (two_hosts[0].address, server.hear())

    def start(number: int, module: str, function: str, *arguments: Any) -> Party:
        opened.append(Party(two_hosts[number], module, function, store, *arguments))
        return opened[-1]

    yield start
    for party in opened:
        party.close()


@pytest.mark.parametrize("unit_on", [0, pytest.param(1, marks=pytest.mark.gate)])
def test_rows_go_over_gloo_between_hosts_and_through_shared_memory_within_one(
    start: Start, two_hosts: list[Host], unit_on: int
) -> None:
    services = [
        start(0, "peers", "controller", [DOUBLE], SYNC, 0),
        start(unit_on, "peers", "storage_unit", "storage-0"),
    ]
    for service in services:
        assert service.hear() == "ready"
    before = two_hosts[0].received_bytes()
    num_values = 1_000_000
    client = start(0, "parties", "client", num_values)
    same, shared, on_wire = client.hear()
    assert same
    assert (shared, on_wire) == ((0, 1) if unit_on else (1, 0))
    read_bytes = 4 * num_values * 4 if unit_on else 0  # four rows of float32
    assert read_bytes <= two_hosts[0].received_bytes() - before < read_bytes * 1.1 + SLACK_BYTES


@pytest.mark.parametrize("trainers_on", [(0, 0), (0, 1)])
def test_weights_reach_another_host_once_whatever_the_number_of_its_receivers(
    start: Start, two_hosts: list[Host], trainers_on: tuple[int, int]
) -> None:
    from weight_run import WeightRun, ask, ask_all

    def on_its_host(target: Callable[..., None], *arguments: Any) -> Party:
        node = int(str(arguments[0]).removeprefix("weights-"))
        return start(node, "weight_peers", target.__name__, *arguments)

    run = WeightRun(on_its_host)
    run.configure(wide=1200, bucket_bytes=2**18, num_ranks=2)
    run.agent, other = run.start_agent(0, nodes=2), run.start_agent(1, nodes=2)
    run.trainers = [
        start(node, "weight_peers", "weight_trainer", f"weights-{node}", rank, run.setup)
        for rank, node in enumerate(trainers_on)
    ]
    for trainer in run.trainers:
        assert trainer.hear() == "ready"
    far = run.start_receivers("far-0", "far-1", node=1)
    near = run.start_receivers("near", node=0)
    num_bytes = run.plan().num_bytes
    before = two_hosts[1].received_bytes()
    for version in (Version(0, 1), Version(0, 2)):
        run.publish(version)
        assert ask_all([*far, *near], "load", version.step) == [(version, True)] * 3
    fetched = [run.status(agent).fetched_bytes for agent in (run.agent, other)]
    assert sum(fetched) == 2 * num_bytes
    assert (fetched[0] == 0) == (trainers_on == (0, 0))
    assert fetched[1] <= two_hosts[1].received_bytes() - before < fetched[1] * 1.1 + SLACK_BYTES
    assert ask(run.trainers[0], "wait") == "delivered"
