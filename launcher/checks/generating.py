"""What must hold of the engines that generate before a run is accepted. Torch-free."""

from collections.abc import Iterator
from pathlib import Path

from asyncflow.errors import ConfigError
from launcher.config.paths import check_makeable
from workers.calls.user_function import check_function
from workers.config import RunConfig
from workers.engines.model_files import max_positions, read_model_config


def check_generating(config: RunConfig) -> None:
    """Check what the configuration alone decides.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    _check_deterministic(config)
    _check_openai(config)
    _check_vllm(config)


def check_positions(config: RunConfig) -> None:
    """Refuse sequences that are longer than the model's positions: its answers there would be noise, or an error.

    Raises:
        ConfigError: says which setting to lower.
    """
    limit = max_positions(Path(config.model.path))
    prompt = config.data.max_prompt_tokens
    for section, engine, response in _generating(config):
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


def ranks_per_instance(config: RunConfig) -> dict[str, int]:
    """Return role -> ranks that share one copy of the model."""
    size = config.vllm.tensor_parallel_size
    return {section: size for section, engine, _ in _generating(config) if engine == "vllm"}


def check_tensor_parallel(config: RunConfig) -> None:
    """Refuse a model that vLLM cannot divide.

    Raises:
        ConfigError: names both numbers.
    """
    size = max(ranks_per_instance(config).values(), default=1)
    if size == 1:
        return
    model = read_model_config(Path(config.model.path))
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = model.get(name)
        repeats = name == "num_key_value_heads" and isinstance(value, int) and value and size % value == 0
        if isinstance(value, int) and value % size and not repeats:
            raise ConfigError(
                f"vllm.tensor_parallel_size: {size} does not divide the model's {name} {value}; choose a divisor"
            )


def _generating(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    """Yield section, engine and longest answer (tokens) of the roles that generate."""
    for section, sampling in (("rollout", config.rollout), ("evaluate", config.evaluate.sampling(config.rollout))):
        if section in config.roles:
            yield section, sampling.engine, sampling.max_response_tokens


def _check_deterministic(config: RunConfig) -> None:
    """Refuse engines that choose their own batches."""
    if config.deterministic and config.rollout.engine in ("vllm", "openai"):
        raise ConfigError(
            f"deterministic: true cannot be with rollout.engine {config.rollout.engine}, which computes together what "
            f"comes together; set rollout.engine to hf, or deterministic to false"
        )


def _check_vllm(config: RunConfig) -> None:
    """Refuse a limit below prompt and answer together: vLLM would refuse such prompts one by one, during the run."""
    longest, prompt = config.vllm.max_model_len, config.data.max_prompt_tokens
    for section, engine, response in _generating(config):
        if engine == "vllm" and longest is not None and longest < prompt + response:
            raise ConfigError(
                f"vllm.max_model_len: {longest} is less than data.max_prompt_tokens {prompt} and "
                f"{section}.max_response_tokens {response} together; set it to {prompt + response} or more, or leave "
                f"it out"
            )


def _check_openai(config: RunConfig) -> None:
    """Refuse missing servers, instances that would replace each other's weights, and paths that are not absolute."""
    if config.rollout.engine != "openai":
        return
    own = config.openai
    if not own.urls:
        raise ConfigError(
            "openai.urls: is missing; name the servers, e.g. --set openai.urls=[http://127.0.0.1:8000], or set "
            "rollout.engine to hf or vllm"
        )
    if not own.weights_dir:
        raise ConfigError("openai.weights_dir: is missing; name a directory that the servers can read, too")
    if config.roles["rollout"] > 1:
        raise ConfigError(
            f"roles: rollout:{config.roles['rollout']} cannot be with rollout.engine openai, whose servers have one "
            f"version of the weights; launch rollout:1, which feeds all of openai.urls, and raise rollout.batch_size"
        )
    if not Path(own.weights_dir).is_absolute():
        raise ConfigError(
            f"openai.weights_dir: {own.weights_dir!r} is not absolute, but the servers read it under this name; write "
            f"the path out, from /"
        )
    check_makeable(own.weights_dir, "openai.weights_dir")
    if own.update != "vllm":
        check_function(own.update, field="openai.update")
