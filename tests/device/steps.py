"""Steps of the trainer on a device: their results, and what they make the host wait for. Modes of `ranks.py`."""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.device import group_backends
from tests.multiproc.step_rank import CASES, configure, train
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.trainer.step_trainer import StepTrainer

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"


def waits(device: torch.device) -> Counter[str]:
    """Return what made the host wait for the device so far -> how often."""
    if device.type == "cpu":
        return Counter()
    from late_device import extension

    return Counter(extension.census()[0])


def steps(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """A step of each case: losses, gradient norms, log-probabilities after it, and the waits of its parts."""
    store = dist.FileStore(str(directory / "store"), num_ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=num_ranks, timeout=limit)
    said = {}
    for name in os.environ.get("STEP_CASES", " ".join(CASES)).split():
        micro_batches: list[Counter[str]] = []
        updates: list[Counter[str]] = []

        class Counted(StepTrainer):
            def _train_micro_batch(self, *given: Any, parts: Any = micro_batches) -> None:
                before = waits(device)
                super()._train_micro_batch(*given)
                parts.append(waits(device) - before)

            def _update_models(self, *given: Any, parts: Any = updates) -> None:
                before = waits(device)
                super()._update_models(*given)
                parts.append(waits(device) - before)

        found = train(configure(*CASES[name]), rank, num_ranks, device=device, kind=Counted)
        said[name] = found | {"micro_batches": micro_batches, "updates": updates}
    dist.destroy_process_group()
    return said


def megatron(device: torch.device, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """Two updates of two micro-batches by the `megatron` engine: what they give, and the waits of each part.
    MEGATRON_DIVIDED says what several ranks divide: `pipeline_parallel` or `tensor_parallel`."""
    from tests.megatron_engine import cpu_shim

    cpu_shim.install("cpu" if device.type == "cpu" else str(device))
    from workers.engines.megatron.engine import MegatronEngine

    store = dist.FileStore(str(directory / "store"), num_ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group(group_backends(device), store=store, rank=rank, world_size=num_ranks, timeout=limit)
    actor = ActorConfig(
        engine="megatron",
        lr=1e-2,
        eps=0.05,
        gradient_checkpointing=True,
        megatron={  # type: ignore[arg-type]
            os.environ.get("MEGATRON_DIVIDED", "pipeline_parallel"): num_ranks,
            "pipeline_pieces": 2,
        },
    )
    engine = MegatronEngine(MODEL, actor=actor, temperature=0.7, device=device, seed=0, timeout_s=60)
    generator = torch.Generator().manual_seed(0)
    norms: list[float] = []
    micro_batches: list[Counter[str]] = []
    updates: list[Counter[str]] = []
    for _ in range(2):
        for _ in range(2):
            samples = [torch.randint(0, 14, (length,), generator=generator) for length in (6, 9, 7, 8)]
            batch = Sequences.from_turns([one[:3] for one in samples], [one[3:] for one in samples])
            before = waits(device)
            engine.forward_backward(batch, lambda log_probs, entropy: ((log_probs + 1).square() - entropy).sum())
            micro_batches.append(waits(device) - before)
        before = waits(device)
        norms.append(engine.step(0.1).grad_norm)
        updates.append(waits(device) - before)
    found = {"norms": norms, "log_probs": engine.log_probs(batch).tolist()}
    dist.destroy_process_group()
    return {"megatron": found | {"micro_batches": micro_batches, "updates": updates}}
