"""dead-letter Groups, the groups that replace them, and the trainer that hears of both."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from peers import CountingPrompts, Credentials
from waiting import wait_until

from tq import ControllerService, QueueClient, StorageUnit, StreamingDataLoader, TaskSpec
from tq.config import QueueConfig
from tq.refill import Refill, RemovalCause
from workers.admission.admission_state import AdmissionState
from workers.admission.admitter import prompt_admission
from workers.settings.schedule import ScheduleConfig

CONFIG = QueueConfig(num_controllers=2, request_timeout_s=20)
SCHEDULE = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=2, max_staleness=1)
TASKS = (
    TaskSpec("judge", frozenset({"x"}), frozenset({"score"}), max_deliveries=2),
    TaskSpec("train", frozenset({"x", "score"}), keeps_leases=True),
)
"""Served by one controller each, `judge` by the lead."""
Start = Callable[[str], ControllerService]


@pytest.fixture(name="start_controller")
def _start_controller(credentials: Credentials) -> Iterator[Start]:
    started: list[Any] = [StorageUnit(credentials, "storage-0", CONFIG, controllers=CONFIG.controllers)]

    def start(name: str) -> ControllerService:
        # Of the lead.
        admission = prompt_admission(
            credentials, name, CountingPrompts(), AdmissionState(SCHEDULE, last_step=2, version=0), config=CONFIG
        )
        service = ControllerService(credentials, name, tasks=TASKS, config=CONFIG, admission=admission, refill=True)
        started.append(service)
        return service

    yield start
    for one in reversed(started):
        one.close()


def judge(client: QueueClient, *, groups: set[int], refused: int | None = None) -> None:
    """Score groups; release the refused one until it does not come any more."""
    left, failures = set(groups), 0
    while left or (refused is not None and failures < 2):
        lease = client.fetch("judge", num_rows=2, timeout_s=20)
        group = lease.groups[0]
        if group == refused:
            lease.release()
            failures += 1
            continue
        lease.put({"score": lease["x"]})
        left.discard(group)


@pytest.mark.gate
def test_step_is_full_and_the_trainer_hears_of_the_refill(credentials: Credentials, start_controller: Start) -> None:
    lead = start_controller("controller-0")
    start_controller("controller-1")
    client = QueueClient(credentials, "everybody", config=CONFIG)
    judge(client, groups={0, 2, 3, 4}, refused=1)
    loader = StreamingDataLoader(client, "train", ["x"], first_partition=1, last_partition=2, rows_per_round=2)
    loader.next_partition()
    assert sorted(group for batch in loader for group in batch.groups) == [0, 0, 4, 4]
    refill = Refill(4, 1, 1, RemovalCause("judge", 2))
    assert client.publish_version(1) == [refill]
    assert client.publish_version(1, refills_known=1) == []
    lead.close()
    start_controller("controller-0")
    assert client.publish_version(1) == [refill]
    loader.close()
    client.close()


def test_filtered_group_is_replaced_once_also_when_the_lead_starts_again(
    credentials: Credentials, start_controller: Start
) -> None:
    lead = start_controller("controller-0")
    start_controller("controller-1")
    client = QueueClient(credentials, "everybody", config=CONFIG)
    filtered: list[int] = []
    while len(filtered) < 2:  # the first groups that come
        lease = client.fetch("judge", num_rows=2, timeout_s=20)
        lease.filter(lease.rows)
        lease.filter(lease.rows)
        filtered.append(lease.groups[0])
        if len(filtered) == 1:
            wait_until(lambda: client.publish_version(0), "no refill", deadline_s=20)  # else the group comes again
            lead.close()
            lead = start_controller("controller-0")
    assert filtered == [0, 1]
    judge(client, groups={2, 3, 4, 5})
    loader = StreamingDataLoader(client, "train", ["x"], first_partition=1, last_partition=2, rows_per_round=2)
    loader.next_partition()
    assert sorted(group for batch in loader for group in batch.groups) == [4, 4, 5, 5]
    refills = client.publish_version(1)
    # Which one came first, a restarted lead learns from the other controller.
    assert [(refill.group, refill.step) for refill in refills] == [(4, 1), (5, 1)]
    assert {refill.replaced for refill in refills} == {0, 1}
    assert {refill.cause for refill in refills} == {RemovalCause("judge", filtered=True)}
    loader.close()
    client.close()


def test_many_filtered_groups_are_known_to_the_next_lead(credentials: Credentials) -> None:
    """More of them than the store keeps in one value."""
    number = 600
    config, schedule = QueueConfig(request_timeout_s=20), ScheduleConfig(rollout_batch_size=100, n_samples_per_prompt=1)
    unit = StorageUnit(credentials, "storage-0", config, controllers=config.controllers)

    def start() -> ControllerService:
        admission = prompt_admission(
            credentials,
            "controller-0",
            CountingPrompts(),
            AdmissionState(schedule, last_step=1, version=0),
            config=config,
        )
        return ControllerService(
            credentials, "controller-0", tasks=TASKS, config=config, admission=admission, refill=True
        )

    lead, client = start(), QueueClient(credentials, "everybody", config=config)
    filtered = 0
    while filtered < number:
        lease = client.fetch("judge", num_rows=number - filtered, timeout_s=20)
        lease.filter(lease.rows)
        filtered += len(lease.rows)
    wait_until(lambda: len(client.publish_version(0)) == number, "not all were replaced", deadline_s=20)
    known = client.publish_version(0)
    lead.close()
    lead = start()
    assert client.publish_version(0) == known
    lease = client.fetch("judge", num_rows=number, timeout_s=20)
    assert min(lease.groups) >= number and max(lease.groups) < number + 100
    for one in (client, lead, unit):
        one.close()
