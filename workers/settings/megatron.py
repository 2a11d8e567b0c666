"""Settings of the `megatron` engine, its layout of ranks, and the models that it trains. Torch-free, for preflight."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from asyncflow.errors import ConfigError
from asyncflow.settings import Settings

# Supported `model_type` values of config.json.
FAMILIES = ("llama", "qwen2", "qwen3")
# What megatron-core's `rope_scaling` assumes (`RotaryEmbedding._apply_scaling`).
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class MegatronConfig(Settings):
    """How engine `megatron` divides the model; the remaining factor of the actor's ranks is data-parallel replicas."""

    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share every layer, and between layers its tokens (sequence parallelism)."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share the tokens of every micro-batch, for long sequences."""
    pipeline_parallel: int = Field(1, ge=1)
    """Pipeline stages that the layers are divided into."""
    virtual_pipeline: int = Field(1, ge=1)
    """Chunks of layers per pipeline stage. With more than 1, stages are interleaved: they idle less while the pipeline
    fills and drains, send more, and keep more activations."""
    pipeline_pieces: int = Field(4, ge=1)
    """Pieces that a micro-batch is cut into, of whole samples each, so that stages work at the same time."""

    @model_validator(mode="after")
    def _chunks_need_stages(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise self.refusal(
                "virtual_pipeline", "only several stages (pipeline_parallel) are interleaved; set it to 1"
            )
        return self

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    def layout(self, num_ranks: int) -> "MegatronLayout":
        """Return the layout of the ranks. Raises ConfigError if `num_ranks` is not a whole number of replicas."""
        size = self.ranks_per_copy
        if num_ranks % size:
            raise ConfigError(
                f"roles: actor:{num_ranks} makes no whole replicas of actor.megatron.tensor_parallel "
                f"{self.tensor_parallel} x context_parallel {self.context_parallel} x pipeline_parallel "
                f"{self.pipeline_parallel}; give a multiple of {size}"
            )
        return MegatronLayout(
            tensor=self.tensor_parallel,
            context=self.context_parallel,
            replicas=num_ranks // size,
            stages=self.pipeline_parallel,
            chunks=self.virtual_pipeline,
        )


@dataclass(frozen=True)
class MegatronPlace:
    tensor: int  # Its part of every layer
    replica: int  # Copy of the model, the data-parallel rank
    stage: int  # Pipeline stage
    context: int = 0  # Its part of a micro-batch's tokens


@dataclass(frozen=True)
class MegatronLayout:
    """Which part of the model each rank of the actor has, and which ranks share rows.

    Megatron's own order: tensor parallelism changes fastest, then context parallelism, data parallelism, pipeline
    stages. Tensor 2, data 2, pipeline 2:

        rank            0 1   2 3   4 5   6 7
        stage           0     0     1     1
        replica         0     1     0     1        replica 0 is ranks 0 1 4 5: they train on the same rows

    Source: megatron-core 0.16.1, `core/parallel_state.py`, `initialize_model_parallel(order="tp-cp-ep-dp-pp")`.
    """

    # `tensor`, `replicas`, `stages`, `context`: their number; the product is the number of ranks
    tensor: int
    replicas: int
    stages: int
    context: int = 1
    chunks: int = 1  # of layers per stage

    def place(self, rank: int) -> MegatronPlace:
        left, tensor = divmod(rank, self.tensor)
        left, context = divmod(left, self.context)
        stage, replica = divmod(left, self.replicas)
        return MegatronPlace(tensor, replica, stage, context)

    def rank(self, place: MegatronPlace) -> int:
        column = place.replica + self.replicas * place.stage
        return place.tensor + self.tensor * (place.context + self.context * column)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one copy of the model, stage by stage; the first is its lead."""
        return tuple(
            self.rank(MegatronPlace(tensor, replica, stage, context))
            for stage in range(self.stages)
            for context in range(self.context)
            for tensor in range(self.tensor)
        )

    def context_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return, for every part of every copy of the model, the ranks that share tokens."""
        return tuple(
            tuple(self.rank(MegatronPlace(tensor, replica, stage, context)) for context in range(self.context))
            for stage in range(self.stages)
            for replica in range(self.replicas)
            for tensor in range(self.tensor)
        )


@dataclass(frozen=True)
class DenseModel:
    """Sizes of a dense Llama, Qwen2 or Qwen3 model, from config.json. `MegatronGeometry` describes the others."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int  # Longest sequence (tokens)
    norm_eps: float  # RMSNorm's epsilon
    rope_base: float  # Base of the rotary embedding
    rope_factor: float  # Llama 3's scaling factor; 0: none
    qkv_bias: bool  # Query, key and value have a bias
    qk_norm: bool  # Queries and keys are normalized per head
    tied: bool  # Input and output embedding share their weight

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "DenseModel":
        """Read config.json. Raises ConfigError for another family, or a feature that has no mapping to Megatron."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise _cannot(f"model_type {family!r}", f"use one of {' '.join(FAMILIES)}")
        _refuse_variants(config)
        try:
            return DenseModel._read_config(config, family)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            what = f"a config.json that lacks numbers ({type(error).__name__}: {error})"
            raise _cannot(what, "use the one that belongs to the weights") from error

    @staticmethod
    def _read_config(config: Mapping[str, Any], family: str) -> "DenseModel":
        rope_base, rope_factor = _rope(config)
        num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        return DenseModel(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            ffn_hidden_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_base=rope_base,
            rope_factor=rope_factor,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def check_division(model: DenseModel, config: MegatronConfig, *, section: str = "actor") -> None:
    """Raise ConfigError, about `section` (`actor` or `ref`), if the model cannot be divided as configured."""
    tensor, stages, chunks = config.tensor_parallel, config.pipeline_parallel, config.virtual_pipeline
    for name, value in (
        ("num_attention_heads", model.num_heads),
        ("num_key_value_heads", model.num_kv_heads),
        ("intermediate_size", model.ffn_hidden_size),
    ):
        if value % tensor:
            raise ConfigError(
                f"{section}.megatron.tensor_parallel: {tensor} does not divide the model's {name} {value}; choose a "
                f"divisor"
            )
    heads = model.num_heads // tensor
    if heads % config.context_parallel:
        raise ConfigError(
            f"{section}.megatron.context_parallel: {config.context_parallel} does not divide the {heads} attention "
            f"heads of a tensor-parallel rank; choose a divisor"
        )
    if model.num_layers % stages:
        raise ConfigError(
            f"{section}.megatron.pipeline_parallel: {stages} does not divide the model's {model.num_layers} layers; "
            "choose a divisor"
        )
    if model.num_layers // stages % chunks:
        raise ConfigError(
            f"{section}.megatron.virtual_pipeline: {chunks} does not divide the {model.num_layers // stages} layers of "
            f"a pipeline stage; choose a divisor"
        )


def check_adapted(targets: Iterable[str], model: DenseModel, config: MegatronConfig) -> None:
    """Raise ConfigError if the adapted modules, named by their paths, leave a part of the pipeline without any: nothing
    would be trained there."""
    num_parts = config.pipeline_parallel * config.virtual_pipeline
    size = model.num_layers // num_parts
    adapted = {int(found[1]) // size for path in targets if (found := re.search(r"\blayers\.(\d+)\.", path))}
    if without := sorted({*range(num_parts)} - adapted):
        first = without[0] * size
        raise ConfigError(
            f"lora.targets: no module of layers {first} to {first + size - 1} is adapted, which are a part of "
            f"actor.megatron's pipeline; name some in every part, or set pipeline_parallel to 1"
        )


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise _cannot(f"hidden_act {config['hidden_act']!r}", "use a model with silu")
    if config.get("model_type") != "qwen2" and config.get("attention_bias"):
        raise _cannot("attention_bias", "use a model without")
    if config.get("mlp_bias"):
        raise _cannot("mlp_bias", "use a model without")
    if config.get("use_sliding_window") or config.get("attention_dropout"):
        raise _cannot("a sliding window or attention_dropout", "switch them off in config.json")


def _rope(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return base and Llama 3's factor."""
    # transformers 5 writes `rope_parameters`, older versions two keys.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, 0.0
    if kind == "llama3" and all(rope.get(name) == value for name, value in LLAMA3_SCALING.items()):
        return base, float(rope["factor"])
    raise _cannot(f"rope scaling {rope}", "Megatron supports only Llama 3's with its usual numbers")


def _cannot(what: str, advice: str) -> ConfigError:
    return ConfigError(
        f"actor.engine: megatron cannot train a model with {what}; {advice}, or set actor.engine to fsdp"
    )
