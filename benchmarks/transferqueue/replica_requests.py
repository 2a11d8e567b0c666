"""Part `replica`: requests of a replica of four ranks, in two stages: one rank fetches for all, one for each stage, or
each for itself."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

import tq
from asyncflow.device import connect_group
from asyncflow.job import LOOPBACK
from asyncflow.sealed_store import connect_store, serve_store
from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.our_queue import COLUMNS, TASK
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.workload import checksum, micro_batches
from tq.client.dataloader import Replica
from tq.columns import Column
from tq.config import ReplicaFetch

_RANKS, _STAGES = 4, 2
_MICRO_BATCH = 64
_NUM_ROWS = 1024
_TIMEOUT = timedelta(seconds=60)


def run(settings: Settings) -> Result:
    """Read the same partition in every way; all ranks must see the same rows."""
    found = {fetch.value: _read(fetch, settings.directory) for fetch in ReplicaFetch}
    once, stage, each = (
        found[fetch.value]["requests"] for fetch in (ReplicaFetch.BROADCAST, ReplicaFetch.STAGE, ReplicaFetch.EACH)
    )
    settings.say(
        f"replica: {_RANKS} ranks, {_NUM_ROWS} rows: {once} requests with one fetching rank, {stage} with one in each "
        f"of {_STAGES} stages, {each} with all"
    )
    return Result(details={"replica": found})


def _read(fetch: ReplicaFetch, log_dir: Path) -> dict[str, Any]:
    store, port = serve_store(LOOPBACK, _TIMEOUT)
    with tq.start(
        {TASK: tq.TaskConfig(name=TASK, inputs=COLUMNS, keeps_leases=True)}, num_units=2, log_dir=log_dir
    ) as queue:
        producer = queue.client("producer")
        producer.open_partition(1, _NUM_ROWS)
        for batch in micro_batches(_NUM_ROWS, _MICRO_BATCH):
            columns = {name: Column(values, lengths) for name, (values, lengths) in batch.columns.items()}
            producer.put_rows(columns, partition=1)
        ranks = [Child(_rank, str(queue.address), port, rank, fetch.value) for rank in range(_RANKS)]
        try:
            reports = [rank.hear(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    del store
    assert len({report["checksum"] for report in reports}) == 1, f"ranks saw different rows: {reports}"
    return {
        "requests": sum(report["requests"] for report in reports),
        "rows_per_s": _NUM_ROWS / max(report["seconds"] for report in reports),
    }


def _rank(pipe: Any, address: str, port: int, rank: int, fetch: str) -> None:
    torch.set_num_threads(1)
    size = _RANKS // _STAGES if fetch == ReplicaFetch.STAGE else _RANKS
    stage, number = divmod(rank, size)
    store = PrefixStore(f"replica {stage}", connect_store(LOOPBACK, port, _TIMEOUT))
    group = connect_group(store, number, size, torch.device("cpu"))
    replica = Replica(group, fetch=ReplicaFetch(fetch), acks=stage == 0)
    client = tq.connect(Path(address), f"actor-0/{rank}") if replica.fetches else None
    loader = tq.StreamingDataLoader(
        client, TASK, COLUMNS, first_partition=1, last_partition=1, rows_per_round=_MICRO_BATCH, replica=replica
    )
    began = time.perf_counter()
    total = 0.0
    for batch in loader:
        total += sum(checksum(batch[name].values) for name in COLUMNS) if len(batch) else 0.0
    seconds = time.perf_counter() - began
    loader.ack()
    pipe.send({"requests": loader.requests, "seconds": seconds, "checksum": total})
    pipe.recv()  # is killed
