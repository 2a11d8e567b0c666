"""What must hold before a run with a reward model is accepted. Torch-free."""

from pathlib import Path

from asyncflow.errors import ConfigError
from workers.config import RunConfig
from workers.engines.model_files import (
    SCORE_HEAD,
    SCORES,
    check_other_model_dir,
    load_raw_tokenizer,
    max_positions,
    tensor_shapes,
    vocabulary_size,
)

KEY = "reward.model.path"
HEAD_WEIGHT = f"{SCORE_HEAD}.weight"


def check_reward_role(config: RunConfig) -> None:
    """Refuse a reward model without a role that computes it, and settings that cannot be combined with one.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    if config.reward.model is None:
        return
    if "reward" not in config.roles:
        roles = ",".join(f"{role}:{count}" for role, count in config.roles.items())
        raise ConfigError(
            f"roles: 'reward' is missing, which computes with reward.model; add it (--roles {roles},reward:1), or "
            f"remove reward.model"
        )
    if config.algorithm.filters_groups:
        raise ConfigError(
            "algorithm.dynamic_sampling: true cannot be with reward.model, under which the rewards of a group are "
            "practically never all equal; set it to false"
        )


def check_reward_model(config: RunConfig) -> None:
    """Check the directory of the reward model: files, head, tokens, positions.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    if config.reward.model is None:
        return
    path = Path(config.reward.model.path)
    check_other_model_dir(path, SCORES, key=KEY)
    _check_head(path)
    _check_tokens(path, Path(config.model.path))
    limit = max_positions(path)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{KEY}: {path} has {limit} positions, but prompt and answer may have {longest} tokens "
            f"(data.max_prompt_tokens + rollout.max_response_tokens); lower these, or name another model"
        )


def _check_head(path: Path) -> None:
    """Refuse a model whose files have no head, or one of several numbers."""
    shapes = {
        name: shape
        for file in path.glob("*.safetensors")
        for name, shape in tensor_shapes(file).items()
        if name == HEAD_WEIGHT
    }
    if not shapes:
        raise ConfigError(
            f"{KEY}: {path} has no weight {HEAD_WEIGHT}, the head that gives an answer its score; name a reward model "
            f"on a language model of the policy's family"
        )
    labels = shapes[HEAD_WEIGHT][0]
    if labels != 1:
        raise ConfigError(f"{KEY}: {path} has {labels} labels; a reward model has 1, name one")


def _check_tokens(path: Path, policy: Path) -> None:
    """Refuse a model to which the policy's tokens mean something else."""
    known, wanted = _vocabulary(path), _vocabulary(policy)
    for token, number in sorted(wanted.items(), key=lambda entry: entry[1]):
        if known.get(token) != number:
            raise ConfigError(
                f"{KEY}: {path} has other tokens than the policy: {token!r} is number {number} in {policy} and "
                f"{known.get(token, 'not there')} in the reward model; name one with the policy's tokenizer"
            )
    size, highest = vocabulary_size(path), max(wanted.values())
    if size is not None and size <= highest:
        raise ConfigError(
            f"{KEY}: {path} has embeddings of {size} tokens, but the tokenizer has number {highest}; name one with the "
            f"policy's tokenizer"
        )


def _vocabulary(path: Path) -> dict[str, int]:
    tokenizer = load_raw_tokenizer(path)
    if tokenizer is None:
        raise ConfigError(
            f"{KEY}: {path} has no tokenizer.json, without which the tokens of policy and reward model cannot be "
            f"compared; save the tokenizer there with transformers' save_pretrained"
        )
    return tokenizer.get_vocab(with_added_tokens=True)
