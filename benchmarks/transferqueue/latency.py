"""Part `latency`: one row from a put in one process to its data in the hands of a consumer that waits in another."""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

import tq
from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.gloo_pair import GlooPair
from benchmarks.transferqueue.part import Result, Settings
from benchmarks.transferqueue.samples import percentile
from tq.columns import column_of

_SAMPLES = 300
_TRIPS_PER_SAMPLE = 5
_WARM_UP = 20
_TOKENS = 512
_PARKED_AFTER_S = 0.005
"""How long after its word the consumer's request is at the controller; a request on its way would look faster."""


def run(settings: Settings) -> Result:
    """Measure round trips and deliveries in turn. The figure is against trips back to back, the shortest there are."""
    torch.set_num_threads(1)
    count = 50 if settings.quick else _SAMPLES
    trips: list[float] = []
    idle_trips: list[float] = []
    deliveries: list[float] = []
    row = {"response": column_of([torch.arange(_TOKENS)])}
    pause = threading.Event()
    with GlooPair(1) as pair, tq.start({"train": ("response",)}, num_units=2, log_dir=settings.directory) as queue:
        consumer = Child(_consume, str(queue.address))
        producer = queue.client("producer")
        try:
            for number in range(_WARM_UP + count):
                assert consumer.hear() == "asking"
                pause.wait(_PARKED_AFTER_S)
                idle_trip, *taken = pair.round_trips_s(1 + _TRIPS_PER_SAMPLE)
                pause.wait(_PARKED_AFTER_S)
                began = time.monotonic_ns()  # one clock for all processes of a host
                producer.put_rows(row)
                delivered = consumer.hear()
                if number >= _WARM_UP:
                    trips += taken
                    idle_trips.append(idle_trip)
                    deliveries.append((delivered - began) / 1e9)
        finally:
            consumer.kill()
    trip, idle_trip, delivery = (statistics.median(times) for times in (trips, idle_trips, deliveries))
    settings.say(
        f"latency: {delivery * 1e6:.0f} us; Gloo round trip {trip * 1e6:.0f} us: {delivery / trip:.1f} of it; "
        f"{idle_trip * 1e6:.0f} us where both ends had been idle, as they are before a delivery"
    )
    details = {
        name: _spread(times)
        for name, times in {"delivery_s": deliveries, "rtt_s": trips, "rtt_after_idle_s": idle_trips}.items()
    }
    return Result({"latency_vs_gloo_rtt": delivery / trip}, {"latency": details})


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p10": percentile(values, 0.1), "p90": percentile(values, 0.9)}


def _consume(pipe: Any, address: str) -> None:
    torch.set_num_threads(1)
    client = tq.connect(Path(address), "consumer")
    while True:
        pipe.send("asking")
        granted = client.fetch("train", num_rows=1, timeout_s=60)
        assert isinstance(granted, tq.Lease)
        batch = granted.read(["response"])
        assert int(batch["response"].values[-1]) == _TOKENS - 1
        delivered = time.monotonic_ns()
        granted.ack()
        pipe.send(delivered)
