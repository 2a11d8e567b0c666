"""`actor.engine: megatron`, on the CPU by the shim of tests/megatron_engine."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from asyncflow.testing.train_adapter import TrainAdapter
from workers.engines.base import TrainEngine
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig
from workers.settings.megatron import MegatronConfig

LAYOUTS = {"tp2": (2, 1, 1), "pp2": (1, 2, 1), "cp2": (1, 1, 2), "dp2": (1, 1, 1)}
"""Tensor parallelism, stages, context parallelism; two ranks each."""


class MegatronAdapter(TrainAdapter):
    """Tensor parallelism, two stages, ranks that share tokens, two replicas over which the optimizer is distributed."""

    name = "megatron"
    layouts = tuple(LAYOUTS)
    packages = ("megatron",)
    shards_over_replicas = False

    def num_ranks(self, layout: str) -> int:
        return 2

    def prepare(self) -> None:
        sys.path.append(str(Path(__file__).parents[2] / "megatron_engine"))
        import cpu_shim

        cpu_shim.install()
        # Megatron warns of libraries that it does without, and of torch's names for collectives.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning)
        # And imports torch's compiler, which warns of torch itself.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")

    def open(self, model_dir: Path, actor: ActorConfig, *, temperature: float, layout: str) -> TrainEngine:
        from workers.engines.megatron.engine import MegatronEngine

        actor = actor.model_copy(update={"engine": "megatron", "megatron": _division(layout)})
        return MegatronEngine(
            model_dir,
            actor=actor,
            temperature=temperature,
            device=torch.device("cpu"),
            seed=0,
            timeout_s=600,
            lora=self.lora,
            merged=self.lora is not None,
        )

    def replica(self, layout: str) -> tuple[int, int]:
        division = _division(layout).layout(dist.get_world_size())
        return division.place(dist.get_rank()).replica, division.replicas


class MegatronLoraAdapter(MegatronAdapter):
    """The same with an adapter beside a frozen model."""

    name = "megatron-lora"
    lora = LoraConfig(rank=3, alpha=6)
    families = ("llama", "qwen2")


def _division(layout: str) -> MegatronConfig:
    tensor, stages, context = LAYOUTS[layout]
    return MegatronConfig(tensor_parallel=tensor, pipeline_parallel=stages, context_parallel=context)
