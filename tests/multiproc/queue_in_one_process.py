"""A whole queue and a weight transfer in one process, closed cleanly; run as a script by `test_exit.py`.

A thread that is still inside Gloo while the interpreter ends would abort the process (`terminate called`).
"""

import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from asyncflow.transport.handshake import Credentials
from tq import Column, ControllerService, QueueClient, StorageUnit, StreamingDataLoader, TaskSpec
from tq.config import QueueConfig, ScheduleConfig
from weightsync.groups import Membership, agree_on_plan, connect_receiver, connect_sender
from weightsync.plan import ShardSpec
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender


def main() -> None:
    """Leave everything in the middle of something, then close it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    credentials = Credentials(store, b"secret", 20)
    config = QueueConfig()
    schedule = ScheduleConfig(rollout_batch_size=2, n_samples_per_prompt=1)
    tasks = [TaskSpec("train", frozenset({"x"}), keeps_leases=True)]
    names = ("storage-0", "storage-1")
    service = ControllerService(credentials, "controller-0", tasks=tasks, config=config, schedule=schedule)
    units = [StorageUnit(credentials, name, config, controllers=config.controllers) for name in names]
    client = QueueClient(credentials, "client", config=config)
    client.put_rows({"x": Column.of_scalars(torch.ones(1))}, partition=1)
    client.get(client.fetch("train", num_rows=1), ["x"])
    parked = threading.Event()
    loader = StreamingDataLoader(client, "train", ["x"], first_partition=1, last_partition=9, rows_per_round=1)
    loader.next_partition()
    while not client.stats()[0].tasks[0].parked_requests:
        parked.wait(0.01)

    members = Membership("0", 1, ("rollout-0",))
    held = [ShardSpec("w", (4,), 0, 4)]
    plan = agree_on_plan(credentials.own_store(), members, 0, held, bucket_bytes=1024, dtype="float32")
    groups: list[torch.distributed.ProcessGroup] = []
    cpu = torch.device("cpu")
    receiving = threading.Thread(
        target=lambda: groups.extend(connect_receiver(credentials.own_store(), members, "rollout-0", cpu))
    )
    receiving.start()
    sender = WeightSender(connect_sender(credentials.own_store(), members, 0, cpu), plan, 0, cpu)
    receiving.join(20)
    receiver = WeightReceiver(groups, plan, cpu)

    loader.close()
    client.close()
    for unit in units:
        unit.close()
    service.close()
    if sys.argv[1] == "cut":
        receiver.join(0)
        sender.close(0)
    else:
        sender.close()
        receiver.join(10)
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join(1)
    left = sorted(thread.name for thread in others if thread.is_alive())
    print("left:", *left)


if __name__ == "__main__":
    main()
