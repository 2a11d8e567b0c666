"""Models that several ranks share and none trains, in processes of this script: for a test, `benchmarks/devices`.

python shared_models.py DIR CASE RANK       DIR/FAMILY/0 and 1: models of one shape; writes DIR/CASE-RANK.pt
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.7
DEADLINE_S = 500
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "fsdp-2": ("llama", 2, ("ref.engine=fsdp", "ref.shards=2")),
    "fsdp-4": ("qwen2", 4, ("ref.engine=fsdp", "ref.shards=4")),
    "fsdp-2-lora": (
        "adapted",
        2,
        ("ref.engine=fsdp", "ref.shards=2", 'lora={"rank": 4}', "algorithm.ref_update_interval=1"),
    ),
    "tp2": ("qwen2", 2, ("ref.engine=megatron", "ref.megatron.tensor_parallel=2")),
    "pp2": ("llama", 2, ("ref.engine=megatron", "ref.megatron.pipeline_parallel=2")),
    "tp2-pp2": (
        "qwen3",
        4,
        ("ref.engine=megatron", "ref.megatron.tensor_parallel=2", "ref.megatron.pipeline_parallel=2"),
    ),
    "reward-2": ("reward_model", 2, ()),
    "cp2": ("qwen2", 2, ("ref.engine=megatron", "ref.megatron.context_parallel=2")),
}
"""Case -> family, ranks, settings of the reference. Llama's embeddings are tied; 13 tokens do not divide by two.
`adapted`: the first model is the base of the second, whose weights are an adapter."""


def available() -> list[str]:
    """Return the cases whose libraries are installed."""
    missing = importlib.util.find_spec("megatron") is None
    return [case for case, (_, _, settings) in CASES.items() if not (missing and "ref.engine=megatron" in settings)]


def save_models(root: Path) -> None:
    """Write two models of every family."""
    from asyncflow.testing.training import FAMILIES, save_adapted_model, save_tiny_model
    from workers.settings.lora import LoraConfig

    base = save_tiny_model(root / "adapted" / "0", "qwen2", seed=0, changes={})
    save_adapted_model(root / "adapted" / "1", base, LoraConfig(rank=4), seed=1)
    for family in FAMILIES:
        for number in range(2):
            save_tiny_model(root / family / str(number), family, seed=number, changes={})


def run_case(root: Path, case: str) -> list[dict[str, Tensor]]:
    """Run the ranks of a case; returns what each found."""
    _, num_ranks, _ = CASES[case]
    paths = [str(ROOT), *filter(None, sys.path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(root), case, str(rank)], env=environment)
        for rank in range(num_ranks)
    ]
    try:
        if any(codes := [process.wait(DEADLINE_S) for process in ranks]):
            raise RuntimeError(f"{case}: ranks ended with {codes}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(root / f"{case}-{rank}.pt") for rank in range(num_ranks)]


def expected(root: Path, case: str) -> dict[str, Tensor]:
    """Return what one process with the whole model finds."""
    from workers.engines.hf.frozen import FrozenModel
    from workers.settings.run import ModelConfig

    family, _, _ = CASES[case]
    if family == "reward_model":
        return _scored(shared=False)
    first, second = (
        FrozenModel(path, ModelConfig(path=str(path)), temperature=TEMPERATURE, device=torch.device("cpu"))
        for path in (root / family / "0", root / family / "1")
    )
    return {
        "initial": first.log_probs(_batch(8)),
        "one sample": first.log_probs(_batch(1)),
        "loaded": second.log_probs(_batch(8)),
        "read": (second if family == "adapted" else first).log_probs(_batch(8)),
    }


def weights_of(root: Path, family: str) -> dict[str, Tensor]:
    """Return what a version with the second model is."""
    file = "adapter/adapter_model.safetensors" if family == "adapted" else "model.safetensors"
    return load_file(root / family / "1" / file)


def _batch(size: int) -> Any:
    """Samples of different lengths, of which pairs share a prompt."""
    from workers.rows.packed_rows import Sequences

    prompts = [_tokens(2 + row // 2 % 2, 100 + row // 2) for row in range(size)]
    return Sequences.from_turns(prompts, [_tokens(1 + row % 5, row) for row in range(size)])


def _tokens(count: int, seed: int) -> Tensor:
    return torch.randint(2, 13, (count,), generator=torch.Generator().manual_seed(seed))


def _views(weights: dict[str, Tensor], needs: Any) -> dict[str, Tensor]:
    """Return what a receiver would give an engine of these weights."""
    from weightsync.plan import Box, ShardSpec, match_needs, plan_transfer
    from weightsync.slot_memory import Region, RegionLayout

    held = [
        ShardSpec(name, tuple(one.shape), "float32", Box.from_shape(tuple(one.shape))) for name, one in weights.items()
    ]
    plan = plan_transfer([held], bucket_bytes=2**20, dtype="float32")
    region = Region(torch.empty(plan.region_bytes, dtype=torch.uint8), RegionLayout(plan))
    for number, name in enumerate(plan.names):
        region.view_tensor(number).copy_(weights[name])
    return region.view_matched(match_needs(plan, needs, whole=False))


def _scored(*, shared: bool) -> dict[str, Tensor]:
    from workers.engines.hf.frozen import RewardModel

    path = ROOT / "configs" / "quickstart" / "reward_model"
    model = RewardModel(path, dtype=torch.float32, device=torch.device("cpu"), shared=shared)
    return {"scores": model.score_samples(_batch(8)), "score of one": model.score_samples(_batch(1))}


def _run(root: Path, case: str) -> dict[str, Tensor]:
    from launcher.config.load_config import load_config
    from launcher.config.paths import find_recipe
    from workers.engines.load_engine import load_frozen_model

    family, _, settings = CASES[case]
    if family == "reward_model":
        return _scored(shared=True)
    overrides = (*settings, f"model.path={root / family / '0'}", f"rollout.temperature={TEMPERATURE}")
    config = load_config(find_recipe("quickstart"), overrides=overrides)
    model = load_frozen_model(config, device=torch.device("cpu"), weights_dir=None)
    found = {"initial": model.log_probs(_batch(8)), "one sample": model.log_probs(_batch(1))}
    model.load_weights(_views(weights_of(root, family), model.weight_needs()))
    found["loaded"] = model.log_probs(_batch(8))
    model.save_weights(root / f"written-{case}")
    dist.barrier()  # the first rank has written
    model.read_weights(root / f"written-{case}" if family == "adapted" else root / family / "0")
    return found | {"read": model.log_probs(_batch(8))}


def _main() -> None:
    root, case, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _, num_ranks, settings = CASES[case]
    torch.set_num_threads(1)
    if "ref.engine=megatron" in settings:
        from tests.megatron_engine import cpu_shim

        cpu_shim.install()
    store = dist.FileStore(str(root / f"store-{case}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.save(_run(root, case), root / f"{case}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
