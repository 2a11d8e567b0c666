"""A whole queue and a weight transfer in one process, closed cleanly; run as a script by `test_exit.py`.

A thread that is still inside Gloo while the interpreter ends would abort the process (`terminate called`).
"""

import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from asyncflow.transport.meeting import Credentials
from tq import Column, ControllerService, QueueClient, StorageUnit, StreamingDataLoader, TaskSpec
from tq.config import QueueConfig
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import Broadcaster, BroadcastMember
from weightsync.config import WeightSyncConfig
from weightsync.plan import Box, Need, plan_transfer
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender, describe
from weightsync.version import Version
from workers.engines.base import LocalShard
from workers.settings.schedule import ScheduleConfig


def main() -> None:
    """Leave everything in the middle of something, then close it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    credentials = Credentials(store, b"secret", 20)
    config = QueueConfig()
    schedule = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=1)
    tasks = [TaskSpec("train", frozenset({"x"}), keeps_leases=True)]
    names = ("storage-0", "storage-1")
    service = ControllerService(credentials, "controller-0", tasks=tasks, config=config, row_limit=schedule.live_rows)
    units = [StorageUnit(credentials, name, config, controllers=config.controllers) for name in names]
    client = QueueClient(credentials, "client", config=config)
    client.put_rows({"x": Column.of_scalars(torch.ones(1))}, partition=1)
    client.fetch("train", num_rows=1).read(["x"])
    parked = threading.Event()
    loader = StreamingDataLoader(client, "train", ["x"], first_partition=1, last_partition=9, rows_per_round=1)
    loader.next_partition()
    while not client.stats()[0].tasks[0].parked_requests:
        parked.wait(0.01)

    cpu, whole = torch.device("cpu"), Box.from_shape((4,))
    agent = WeightAgent(credentials, "weights-0", WeightSyncConfig(), peers=["weights-1"])
    shards = [LocalShard("w", (4,), whole, torch.ones(4))]
    plan = plan_transfer([describe(shards)], bucket_bytes=1024, dtype="float32")
    broadcaster = Broadcaster(credentials, "weights-0", "actor/0", plan, 0, device=cpu, epoch="0", timeout_s=20)
    sender = WeightSender(credentials, "weights-0", "actor/0", plan, 0, device=cpu, broadcaster=broadcaster)
    member = BroadcastMember(credentials.group_store(), "rollout-0", cpu)
    receiver = WeightReceiver(
        credentials, "weights-0", "rollout-0", {"w": Need((4,))}, device=cpu, member=member, lead="weights-0"
    )
    sender.publish(Version(0, 1), shards, timeout_s=20)
    receiver.wait_for(1, timeout_s=20)

    loader.close()
    client.close()
    for unit in units:
        unit.close()
    service.close()
    if sys.argv[1] == "cut":
        agent.close()
        receiver.close()
        sender.close(0)
    else:
        sender.close()
        receiver.close()
        agent.close()
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join(1)
    left = sorted(thread.name for thread in others if thread.is_alive())
    print("left:", *left)


if __name__ == "__main__":
    main()
