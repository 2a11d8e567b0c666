"""One rank on a device; what it finds is written to DIR/said-RANK.json.

python ranks.py MODE DEVICE DIR RANK NUM_RANKS      MODE: a function below, such as `train`
PLANT names a mistake to make in the project, see `plants.py`; STEP_CASES cases of `steps`, with blanks between them.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import asyncflow.device
from asyncflow.device import connect_group, copied_ahead, group_backends, open_device, pin
from tests.device.asleep_mode import asleep
from tests.device.handover_mode import handover
from tests.device.memory import memory
from tests.device.paused_mode import paused
from tests.device.plants import PLANTS
from tests.device.rows_mode import rows
from tests.device.steps import megatron, steps

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
FIRST_DEVICE = 3  # not 0, which threads and careless code use


def mistakes(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """What each mistake reads, and what it reads when done right."""

    def copied_out(*, waits: bool, ends: bool) -> float:
        source, host, side = torch.full((8,), 3.0, device=device), torch.zeros(8, pin_memory=True), stream()
        if waits:
            side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            host.copy_(source, non_blocking=True)
            end = side.record_event()
        if ends:
            end.synchronize()
        return float(host.sum())

    def host_reused(*, ends: bool) -> float:
        host, target = torch.ones(8, pin_memory=True), torch.empty(8, device=device)
        target.copy_(host, non_blocking=True)
        if ends:
            torch.accelerator.synchronize()
        host.fill_(5.0)
        return float(target.sum())

    def freed(*, recorded: bool) -> float:
        side, host, source = stream(), torch.zeros(8, pin_memory=True), torch.ones(8, device=device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            host.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        torch.full((8,), 7.0, device=device)
        side.synchronize()
        return float(host.sum())

    def reduced(*, waits: bool) -> float:
        group = connect_group(dist.HashStore(), 0, 1, device)
        values, side = torch.empty(8, device=device), stream()
        work = group.allgather([[values]], [torch.full((8,), 2.0, device=device)])
        if waits:
            work.wait()
        side.wait_stream(torch.accelerator.current_stream(device))
        host = torch.zeros(8, pin_memory=True)
        with side:
            host.copy_(values, non_blocking=True)
        side.synchronize()
        return float(host.sum())

    def stream() -> torch.Stream:
        return torch.Stream(device=device)

    return {
        "read before the copy's end": [copied_out(waits=True, ends=False), copied_out(waits=True, ends=True), 24.0],
        "copied before the kernel's end": [copied_out(waits=False, ends=True), copied_out(waits=True, ends=True), 24.0],
        "host buffer used again": [host_reused(ends=False), host_reused(ends=True), 8.0],
        "freed while another stream reads": [freed(recorded=False), freed(recorded=True), 8.0],
        "group not waited for": [reduced(waits=False), reduced(waits=True), 16.0],
    }


def train(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Three updates; a version of the weights and a checkpoint are copied while the third one is computed."""
    from asyncflow.timeline import NoTimeline
    from weightsync.plan import plan_transfer
    from weightsync.sender import ShardCopies, ShardWriter, describe
    from weightsync.slot_memory import Region, RegionLayout, SlotMemory, map_slot
    from weightsync.version import Version
    from workers.checkpoint.saved_shards import HostCopy
    from workers.engines.fsdp.sharding import FsdpEngine
    from workers.rows.packed_rows import Sequences
    from workers.settings.engines import ActorConfig

    store = dist.FileStore(str(directory / "store"), num_ranks)
    dist.init_process_group(
        group_backends(device),
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    actor = ActorConfig(lr=1e-2, eps=0.05)
    engine = FsdpEngine(MODEL, actor=actor, temperature=1.0, device=device, seed=0)
    generator = torch.Generator().manual_seed(rank)

    def batch() -> Sequences:
        lengths = torch.randint(6, 12, (4,), generator=generator).tolist()
        samples = [torch.randint(0, 14, (length,), generator=generator) for length in lengths]
        return Sequences.from_turns([sample[:3] for sample in samples], [sample[3:] for sample in samples])

    def step() -> float:
        forward_backward()
        return engine.step(0.1).grad_norm

    def forward_backward() -> None:
        engine.forward_backward(batch(), lambda log_probs, _: (log_probs + 1).square().sum())

    norms = [step(), step()]
    held = describe(engine.shards())
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, held)
    plan = plan_transfer(everyone, bucket_bytes=1 << 16, dtype="bfloat16")
    layout = RegionLayout(plan)
    memory = SlotMemory(plan.region_bytes)
    writer = ShardWriter(plan, rank)
    mapped: list[Tensor] = []
    receiving = threading.Thread(target=lambda: mapped.append(map_slot(memory.offer, write=True, device=device)))
    receiving.start()  # weights are mapped, and so page-locked, by threads that did not open the device
    receiving.join()
    target = writer.target(mapped[0])
    copies, host = ShardCopies(writer, device=device, timeline=NoTimeline()), HostCopy(device)
    copies.start_copies(Version(0, 1), target, list(engine.shards()))
    saved = host.begin({"state": engine.state_dict()})
    forward_backward()
    waits = [threading.Thread(target=wait) for wait in (copies.wait, host.wait)]
    for thread in waits:
        thread.start()
    for thread in waits:
        thread.join()
    held_here = {}
    for shard in engine.shards():
        held_here[shard.name] = torch.zeros(shard.shape, dtype=torch.bfloat16)
        held_here[shard.name][shard.box.slices] = shard.values.detach().cpu().to(torch.bfloat16)
    region = Region(mapped[0], layout)
    wrong = sum(
        not torch.equal(region.view_piece(piece), held_here[plan.names[piece.tensor]][piece.box.slices])
        for bucket in plan.of_sender(rank)
        for piece in bucket.pieces
    )
    live = _tensors({"state": engine.state_dict()})
    lost = sum(not torch.equal(one, other.cpu()) for one, other in zip(_tensors(saved), live, strict=True))
    norms.append(engine.step(0.1).grad_norm)
    last = batch()
    said = {
        "norms": norms,
        "log_probs": engine.log_probs(last).tolist(),
        "wrong_pieces": wrong,
        "lost_in_checkpoint": lost,
        "contexts": _contexts(device),
    }
    del region, target
    copies.close()
    host.close()
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    dist.destroy_process_group()
    return said


def generate(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Sampled responses, with weights that change under way. Each version lies in a slot, which is given back then."""
    from safetensors.torch import load_file

    from weightsync.plan import Box, match_needs, plan_transfer
    from weightsync.sender import describe
    from weightsync.slot_memory import Region, RegionLayout, SlotMemory, map_slot
    from workers.engines.base import GenerateRequest, LocalShard
    from workers.engines.base import generate as responses_of
    from workers.engines.hf.engine import HfEngine
    from workers.settings.rollout import SamplingConfig
    from workers.settings.run import ModelConfig

    sampling = SamplingConfig.model_validate({"max_response_tokens": 8, "batch_size": 8, "top_p": 0.95})
    engine = HfEngine(MODEL, ModelConfig(path=str(MODEL)), sampling=sampling, device=device)
    weights = load_file(MODEL / "model.safetensors")
    shards = [LocalShard(name, tuple(w.shape), Box.from_shape(tuple(w.shape)), w) for name, w in weights.items()]
    plan = plan_transfer([describe(shards)], bucket_bytes=1 << 16, dtype="float32")
    layout, pieces = RegionLayout(plan), match_needs(plan, engine.weight_needs())
    slot = SlotMemory(plan.region_bytes)
    written = Region(slot.memory, layout).view_matched(pieces)
    mapped = Region(map_slot(slot.offer, write=False, device=device), layout).view_matched(pieces)
    requests = [GenerateRequest(row, torch.arange(2, 5 + row % 3), seed=row, ticket=row) for row in range(12)]
    done = []
    for factor in (1.0, 1.01):
        for name, view in written.items():
            view.copy_(weights[name] * factor)
        engine.load_weights(mapped)
        slot.memory.zero_()  # given back: the trainer writes its next version there
        done += sorted(responses_of(engine, requests), key=lambda one: one.index)
    return {
        "tokens": [one.response_R.tolist() for one in done],
        "log_probs": [one.log_probs_R.tolist() for one in done],
        "contexts": _contexts(device),
    }


def group(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """What a broadcast group gives, and how long a member waits for one that never comes is bounded by its store."""
    store = dist.FileStore(str(directory / "store"), -1)
    store.set_timeout(timedelta(seconds=60))
    one = connect_group(dist.PrefixStore("all", store), rank, num_ranks, device)
    values = torch.full((4,), float(rank + 1), device=device)
    one.broadcast([values]).wait()
    said = {"broadcast": values.tolist(), "late": ""}
    short = dist.FileStore(str(directory / "short"), -1)
    short.set_timeout(timedelta(seconds=1))
    if rank == 0:
        try:
            connect_group(short, 0, 2, device)
        except RuntimeError as error:
            said["late"] = type(error).__name__
    memory = np.zeros(1 << 16, dtype=np.uint8)
    release = pin(memory.ctypes.data, memory.nbytes, device, writable=True)
    assert release is not None
    releasing = threading.Thread(target=release)  # as a finalizer's
    releasing.start()
    releasing.join()
    return said | {"contexts": _contexts(device)}


def broadcast(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """See `broadcast_mode`."""
    from tests.device.broadcast_mode import follow

    return follow(device, rank, num_ranks, directory) | {"contexts": _contexts(device)}


def stages(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """See `broadcast_mode`."""
    from tests.device.broadcast_mode import stages

    return stages(device, rank, num_ranks, directory) | {"contexts": _contexts(device)}


def ahead(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Copy page-locked tensors ahead of their use, each into memory that an earlier one has left."""
    sources = [torch.full((1 << 12,), float(k)) for k in range(24)]
    if device.type != "cpu":
        sources = [source.pin_memory() for source in sources]
    asyncflow.device._AHEAD_BYTES = 2 * sources[0].nbytes
    used = [there * 2 + k for k, there in enumerate(copied_ahead(sources, device))]
    abandoned = copied_ahead(sources, device)
    next(abandoned)
    abandoned.close()
    return {"sums": [float(one.sum()) for one in used], "contexts": _contexts(device)}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    if isinstance(value, Tensor):
        local: Any = getattr(value, "to_local", lambda: value)()
        return [local]
    return []


def _contexts(device: torch.device) -> list[int]:
    if device.type == "cpu":
        return []
    from late_device import extension

    return sorted(extension.contexts())


MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "mistakes": mistakes, "train": train, "generate": generate, "group": group, "steps": steps,
    "megatron": megatron, "memory": memory, "broadcast": broadcast, "rows": rows, "paused": paused, "ahead": ahead,
    "stages": stages,
    "asleep": asleep, "handover": handover,
}  # fmt: skip


def main() -> None:
    mode, kind, directory, rank, num_ranks = sys.argv[1:]
    torch.set_num_threads(1)
    if planted := os.environ.get("PLANT"):
        PLANTS[planted].make()
    device = open_device(kind if kind == "cpu" else f"{kind}:{FIRST_DEVICE + int(rank)}")
    said = MODES[mode](device, int(rank), int(num_ranks), Path(directory))
    (Path(directory) / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
