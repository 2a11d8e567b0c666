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
from workers.trainer.step_trainer import StepTrainer


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
