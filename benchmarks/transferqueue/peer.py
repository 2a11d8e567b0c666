"""Drives PyPI `transferqueue` (ZeroMQ and Ray) from the peer's own environment, one round per request.

    PEER_PYTHON -m benchmarks.transferqueue.peer        (in benchmarks/; started by `side_process`)

    <- {"do": "rows", "micro_batch": 16, "num_rows": 1024}       one JSON object per line on stdin
    -> {"put_s": 0.5, "get_s": 0.3, "num_bytes": ..., "checksum": ...}    and on stdout

Used as its README and its own benchmark do: the sync client of `get_client()`, `put` of TensorDicts with jagged nested
tensors, `get_meta` + `get_data`, SimpleStorage with two units. `polling_mode`: an empty answer instead of a wait of
whole seconds. Its variables (`TQ_*`) stay as they are; see `SETTINGS` in the answer.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.transferqueue.workload import MicroBatch, checksum, dense_columns, micro_batches

SETTINGS = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}},
}
NAMES = ["prompt", "response", "logprobs"]


class Peer:
    """One client, two storage units."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        ray.init(num_cpus=8, namespace="benchmark", logging_level="ERROR", include_dashboard=False)
        transfer_queue.init(OmegaConf.create(SETTINGS))
        self._client = transfer_queue.get_client()
        self._partition = 0
        self._batches: dict[tuple[int, int], list[TensorDict]] = {}
        self._dense: TensorDict | None = None

    def rows(self, micro_batch: int, num_rows: int) -> dict[str, float]:
        """Put micro-batches, then get them until all rows came."""
        key = (micro_batch, num_rows)
        if key not in self._batches:
            self._batches[key] = [_tensor_dict(batch) for batch in micro_batches(num_rows, micro_batch)]
        partition = self._next_partition()
        began = time.perf_counter()
        for batch in self._batches[key]:
            self._client.put(batch, partition_id=partition)
        put_s = time.perf_counter() - began
        received, num_received = [], 0
        began = time.perf_counter()
        while num_received < num_rows:
            meta = self._client.get_meta(NAMES, micro_batch, partition_id=partition, mode="fetch", task_name="train")
            if meta.size:
                received.append(self._client.get_data(meta))
                num_received += meta.size
        get_s = time.perf_counter() - began
        self._client.clear_partition(partition)
        total = sum(checksum(data[name].values()) for data in received for name in NAMES)
        return {"put_s": put_s, "get_s": get_s, "checksum": total}

    def dense(self) -> dict[str, float]:
        """One put and one get of 288 MB."""
        if self._dense is None:
            columns = dense_columns()
            self._dense = TensorDict(columns, batch_size=[len(columns["f0"])])
        partition = self._next_partition()
        names = sorted(self._dense.keys())
        began = time.perf_counter()
        self._client.put(self._dense, partition_id=partition)
        put_s = time.perf_counter() - began
        meta = self._client.get_meta(names, len(self._dense), partition_id=partition, mode="fetch", task_name="train")
        began = time.perf_counter()
        data = self._client.get_data(meta)
        get_s = time.perf_counter() - began
        self._client.clear_partition(partition)
        return {"put_s": put_s, "get_s": get_s, "checksum": sum(checksum(data[name]) for name in names)}

    def close(self) -> None:
        """End it and Ray's processes."""
        transfer_queue.close()
        ray.shutdown()

    def _next_partition(self) -> str:
        self._partition += 1
        return f"round-{self._partition}"


def _tensor_dict(batch: MicroBatch) -> TensorDict:
    columns = {
        name: torch.nested.as_nested_tensor(list(torch.split(values, lengths.tolist())), layout=torch.jagged)
        for name, (values, lengths) in batch.columns.items()
    }
    return TensorDict(columns, batch_size=[batch.prompt_lengths_N.numel()])


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until stdin ends."""
    peer = Peer()
    say(answers, {"ready": True, "version": transfer_queue.__version__, "settings": SETTINGS})
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        what = request.pop("do")
        say(answers, peer.rows(**request) if what == "rows" else peer.dense())
    peer.close()


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray and the peer print to stdout
    serve(sys.stdin, channel)
