"""What a Hugging Face model directory holds: which files are the model, and whether they are whole. Loads nothing.

`stored_tensors` is the one place that decides which files are the model, as transformers does; checks, the count of
parameters, the planner and the engines of all roles ask it. Torch-free: `--dry-run` and `--resume` call this.
"""

import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncflow.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")
TOKENIZER_SETTINGS = "tokenizer_config.json"
POLICY_KEY = "model.path"


class ModelKind(NamedTuple):
    """A kind of transformers' classes.

    Attributes:
        endings: of their names.
        lacks: what a class with another name does not do, for a message.
    """

    endings: tuple[str, ...]
    lacks: str


GENERATES = ModelKind(("ForCausalLM", "LMHeadModel"), "is not a causal language model of text alone")
SCORES = ModelKind(("ForSequenceClassification",), "scores no text")
BACKBONE = ModelKind((*GENERATES.endings, *SCORES.endings), "is not a language model of text alone")
"""What a critic may begin with."""
SCORE_HEAD = "score"
"""What transformers calls the head of a language model's backbone that gives numbers."""
_SENSES = ("vision", "visual", "audio", "speech", "image", "img")
"""How parts of config.json begin that are for images or sound."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_LIKE = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin", "consolidated*", "*.gguf",
)  # fmt: skip
"""Files that a user may take for the model."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types of tensors that are values as they stand."""
_NOT_WEIGHTS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|causal_mask|position_ids|num_batches_tracked)$")
"""Masks and numbers that older files have among the weights, of any element type."""
_OF_QUANTIZED = re.compile(
    r"(weight_scale(_inv|_2)?|input_scale|activation_scale|\.(qweight|qzeros|scales|g_idx|SCB|absmax))$"
)
"""Tensors without which those beside them are raw numbers."""
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight")
HEAD_TENSORS = (*OUTPUT_HEADS, "lm_head.bias", "embed_out.bias")
"""What a model without an output layer may leave in its files."""
_EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size", "hidden_size", "n_embd", "d_model")
_LAYER = re.compile(r"(?P<stack>(?:\w+\.)*?(?:layers|h|blocks))\.(?P<number>\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_NAMED = 5
_COMPARED_BYTES = 16 * 2**20
LFS_POINTER = b"version https://git-lfs"
ARCHITECTURE_KEYS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
"""Keys of config.json that decide which weights exist and what shapes they have."""


class BadModelDir(ConfigError):
    """Unusable model directory; the message starts with the setting that names it."""

    def __init__(self, problem: str, *, key: str = POLICY_KEY) -> None:
        """Args:
        problem: what is wrong, and what to do.
        key: of the setting.
        """
        super().__init__(f"{key}: {problem}")
        self.problem = problem


def check_model_dir(path: Path) -> None:
    """Check the policy's directory: config, tokenizer and every weight file are there and complete.

    Reads the headers of weight files, not the weights.

    Raises:
        ConfigError: the first thing that is missing or broken.
    """
    _check_parts(path, GENERATES)
    _check_tied(path)
    _check_layers(path)
    eos_token_ids(path)


def check_other_model_dir(path: Path, kind: ModelKind, *, key: str) -> None:
    """Check as `check_model_dir` does a model that generates nothing.

    Args:
        path: of the directory.
        kind: what the model must be.
        key: of the setting that names the directory; begins the message.

    Raises:
        ConfigError: the first thing that is missing or broken.
    """
    try:
        _check_parts(path, kind)
        check_trainable(path)
    except BadModelDir as error:
        raise BadModelDir(error.problem, key=key) from None


def check_trainable(path: Path) -> None:
    """Refuse what no engine trains yet.

    The weights of most mixtures of experts have other names in memory than in their files. Most models with images or
    sound are refused by their architecture already, which does not end in ForCausalLM.

    Raises:
        ConfigError: config.json has a number of experts, a part for images or sound, or says how weights are quantized.
    """
    config = read_model_config(path)
    architecture = config["architectures"][0]
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in part.items():
            if name in ("quantization_config", "compression_config") and value:
                method = f" {value['quant_method']}" if isinstance(value, dict) and "quant_method" in value else ""
                raise BadModelDir(
                    f"{path} is quantized ({name}{method} in config.json), and AsyncFlow would read raw numbers; name "
                    f"the model in bfloat16 or float32"
                )
            if name.endswith("experts") and type(value) is int and value > 1:
                raise BadModelDir(
                    f"{path} is a mixture of experts ({name} {value} in config.json), which AsyncFlow cannot use "
                    f"yet; name a dense model"
                )
            if name.startswith(_SENSES) and isinstance(value, dict):
                raise BadModelDir(
                    f"{path} is of a {architecture}, which takes more than text ({name} in config.json); AsyncFlow "
                    f"cannot use it yet, so name a model of text alone"
                )


def read_model_config(path: Path) -> dict[str, Any]:
    """Return config.json of a model directory.

    Raises:
        ConfigError: it is missing, malformed, or names no architecture.
    """
    config = read_object(path / "config.json", "the model's configuration")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise BadModelDir(
            f"{path / 'config.json'} names no architectures (found {architectures!r}); "
            "use the config.json that belongs to the weights"
        )
    return config


def max_positions(path: Path) -> int | None:
    """Return the longest sequence (tokens) that the model was built for, or None when config.json does not say."""
    config = read_model_config(path)
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            limit = part.get(key)
            if type(limit) is int and limit > 0:
                return max(limit, _scaled_positions(part))
    return None


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the tokens that end a response: those of generation_config.json, else of config.json.

    Raises:
        ConfigError: neither file names one, or one is not a token.
    """
    config = read_model_config(path)
    generation = path / "generation_config.json"
    settings = read_object(generation, "the settings of generation") if generation.is_file() else {}
    ids = settings.get("eos_token_id")
    ids = config.get("eos_token_id") if ids is None else ids
    if ids is None or ids == []:
        raise BadModelDir(f"{path} names no eos_token_id, the token that ends a response; add it to {generation.name}")
    tokens = tuple(ids) if isinstance(ids, list) else (ids,)
    vocab_size = config.get("vocab_size")
    for token in tokens:
        if type(token) is not int or token < 0 or (type(vocab_size) is int and token >= vocab_size):
            raise BadModelDir(
                f"eos_token_id {token!r} of {path} is not a token of its {vocab_size}; "
                f"correct it in {generation.name} or config.json"
            )
    return tokens


def vocabulary_size(path: Path) -> int | None:
    """Return how many tokens the model has an embedding for, or None when config.json does not say."""
    config = read_model_config(path)
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if type(size) is int else None


def load_raw_tokenizer(path: Path) -> "Tokenizer | None":
    """Return the tokenizer in tokenizer.json without limits of its own, or None when there is no such file.

    Raises:
        ConfigError: the file is not a tokenizer.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    facts = file.stat()
    return _parsed_tokenizer(file, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=3)
def _parsed_tokenizer(file: Path, modified_ns: int, size_bytes: int) -> "Tokenizer":
    """Parse a file once: several checks of one start need it, and a large vocabulary takes a good part of a second."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise BadModelDir(f"{file} is not a tokenizer: {error}; copy it from the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file of the model directory; `what` names it in the error.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise BadModelDir(
            f"cannot read {file}, {what}: {error.strerror}; name a complete Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise BadModelDir(f"{file} is malformed JSON: {error}; copy it from the model again") from error
    if not isinstance(value, dict):
        raise BadModelDir(f"{file} does not hold a JSON object; copy it from the model again")
    return value


def model_fingerprint(path: Path) -> str:
    """Return a SHA-256 (hex) over what config.json says about the weights' names and shapes.

    Two directories with the same fingerprint can load each other's weights; element type and version of transformers
    do not count.

    Raises:
        ConfigError: config.json is missing or malformed.
    """
    config = read_model_config(path)
    parts: list[Mapping[str, Any]] = [config]
    if isinstance(config.get("text_config"), dict):
        parts.append(config["text_config"])
    shape = [{key: part[key] for key in ARCHITECTURE_KEYS if part.get(key) is not None} for part in parts]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


class StoredTensor(NamedTuple):
    """A tensor of a model's files.

    Attributes:
        file: that has it.
        dtype: as safetensors names it: F32, BF16, F8_E4M3 and so on.
        shape: of it.
        start, stop: its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_tensors(path: Path, *, key: str = POLICY_KEY) -> dict[str, StoredTensor]:
    """Return all tensors of the model in a directory by name; reads the headers of its files.

    A tensor that two of the files hold is compared: transformers would take the one that it happens to read last.

    Args:
        path: of the directory.
        key: of the setting that names it; begins messages.
    Raises:
        ConfigError: see `weight_files`; or a file is cut off, lacks a tensor that the index puts there, or has other
            values of a tensor than another file.
    """
    files, weight_map = _chosen_files(path, key=key)
    assigned: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        assigned.setdefault(file, []).append(name)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held = _read_header(path / file, key=key)
        for name in assigned.get(file, ()):
            if name not in held:
                raise _broken_weights(path / file, f"it lacks {name}, which {INDEX_FILE} puts there", key=key)
        for name, stored in held.items():
            first = tensors.setdefault(name, stored)
            if first is not stored and not same_values(first, stored):
                types = f"with another element type ({stored.dtype}, not {first.dtype})"
                how = "with other values" if first.dtype == stored.dtype else types
                raise BadModelDir(
                    f"{path} holds {name} twice, in {first.file.name} and {how} in {file}; remove the stale one, or "
                    f"save the model again",
                    key=key,
                )
    return tensors


def name_pattern(name: str) -> str:
    """Return a weight's name with `*` for its numbers: the same in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def weight_files(path: Path, *, key: str = POLICY_KEY) -> tuple[Path, ...]:
    """Return the files that are the model: model.safetensors if it is there, else those that the index names.

    Source: transformers 5.24, `modeling_utils._get_resolved_checkpoint_files`.

    Raises:
        ConfigError: neither is there, a file that the index names is missing, or the index is malformed.
    """
    return tuple(path / file for file in _chosen_files(path, key=key)[0])


def ignored_weights(path: Path, *, key: str = POLICY_KEY) -> str:
    """Return a line that names files which are not read though they may be taken for the model; "": there are none.

    Raises:
        ConfigError: see `weight_files`.
    """
    files, weight_map = _chosen_files(path, key=key)
    read = {*files, *([INDEX_FILE] if weight_map else [])}
    found = sorted({file.name for pattern in _WEIGHT_LIKE for file in path.glob(pattern)} - read)
    if not found:
        return ""
    source = INDEX_FILE if weight_map else files[0]
    return f"{key}: {path} is read from {source}; not from {few_of(found)}"


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors have the same element type, shape and bytes; reads them."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as stream, other.file.open("rb") as beside:
        stream.seek(one.start)
        beside.seek(other.start)
        for left in range(one.stop - one.start, 0, -_COMPARED_BYTES):
            size = min(left, _COMPARED_BYTES)
            if stream.read(size) != beside.read(size):
                return False
    return True


def _check_parts(path: Path, kind: ModelKind) -> None:
    if not path.is_dir():
        state = "is not a directory" if path.exists() else "does not exist"
        make = f", which `asyncflow import-gguf {path} DIRECTORY` makes of it" if path.suffix == ".gguf" else ""
        raise BadModelDir(f"{path} {state}; name a Hugging Face model directory{make}")
    _check_architecture(path, kind)
    _check_tokenizer(path)
    _check_values(path)


def _check_architecture(path: Path, kind: ModelKind) -> None:
    config = read_model_config(path)
    file = path / "config.json"
    if not isinstance(config.get("model_type"), str):
        raise BadModelDir(f"{file} names no model_type; use the config.json that belongs to the weights")
    names: list[str] = config["architectures"]
    if not any(name.endswith(kind.endings) for name in names):
        raise BadModelDir(
            f"{file} is of a {names[0]}, which {kind.lacks}; name a model whose architecture ends in "
            f"{' or '.join(kind.endings)}"
        )


def _scaled_positions(config: Mapping[str, Any]) -> int:
    """Return the length that rotary scaling reaches, 0 without; some models give only the length before scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return 0
    before, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return int(before * factor) if type(before) is int and isinstance(factor, int | float) else 0


def _check_tokenizer(path: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not found and not ((path / "vocab.json").is_file() and (path / "merges.txt").is_file()):
        raise BadModelDir(f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy it from the model")
    if (path / TOKENIZER_SETTINGS).is_file():
        read_object(path / TOKENIZER_SETTINGS, "the tokenizer's settings")
    load_raw_tokenizer(path)


def _check_values(path: Path) -> None:
    """Refuse weights that are not values as they stand: quantized ones, which would be read as raw numbers."""
    for name, stored in stored_tensors(path).items():
        if stored.dtype not in FLOATS and not _NOT_WEIGHTS.search(name):
            raise quantized(path, name, f"has elements of type {stored.dtype}")
        if _OF_QUANTIZED.search(name):
            raise quantized(path, name, "belongs to quantized weights")


def quantized(path: Path, name: str, why: str, *, key: str = POLICY_KEY) -> BadModelDir:
    """Return the refusal of a tensor that is not a value as it stands."""
    return BadModelDir(
        f"{path} is quantized: {name} {why}, and would be read as a raw number; name the model in bfloat16 or float32",
        key=key,
    )


def untied(path: Path, one: str, other: str, *, key: str = POLICY_KEY) -> BadModelDir:
    """Return the refusal of two names of one weight under which the files hold different values."""
    return BadModelDir(
        f"{path} holds {one} and, with other values, {other}, which config.json ties (tie_word_embeddings), so one "
        f"would be dropped; set tie_word_embeddings to false there, or remove the tensor that is not the model's",
        key=key,
    )


def _check_tied(path: Path) -> None:
    """Refuse a head of its own beside `tie_word_embeddings`; where config.json leaves that out, loading does."""
    if read_model_config(path).get("tie_word_embeddings") is not True:
        return
    tensors = stored_tensors(path)
    inputs = [name for name in tensors if name.endswith(_INPUT_EMBEDDINGS)]
    heads = [name for name in OUTPUT_HEADS if name in tensors]
    if len(inputs) == 1 and heads and not same_values(tensors[inputs[0]], tensors[heads[0]]):
        raise untied(path, inputs[0], heads[0])


def _check_layers(path: Path) -> None:
    """Refuse a config.json of another depth or size than the weights; what is not plain, loading decides."""
    config = read_model_config(path)
    inner = config.get("text_config")
    part = inner if isinstance(inner, dict) else config
    if config.get("is_encoder_decoder") is True or any(
        key.endswith("decoder_layers") or (key.startswith(_SENSES) and isinstance(part[key], dict)) for key in part
    ):
        return
    tensors = stored_tensors(path)
    layers: dict[str, set[int]] = {}
    for name in tensors:
        if found := _LAYER.match(name):
            layers.setdefault(found["stack"], set()).add(int(found["number"]))
    counts = {key: part[key] for key in _LAYER_COUNTS if type(part.get(key)) is int and part[key] > 0}
    if len(layers) == 1 and counts:
        (numbers,) = layers.values()
        more = part.get("num_nextn_predict_layers")
        most = more if type(more) is int else 0
        if not any({*range(count)} <= numbers <= {*range(count + most)} for count in counts.values()):
            key, count = next(iter(counts.items()))
            lacking = sorted({*range(count)} - numbers)
            what = f"lack layer {lacking[0]}" if lacking else f"have a layer {max(numbers)}"
            raise BadModelDir(
                f"{path / 'config.json'} says {count} layers ({key}), but the weights {what}; use the config.json that "
                f"belongs to the weights"
            )
    inputs = [name for name in tensors if name.endswith(_INPUT_EMBEDDINGS)]
    if len(inputs) != 1 or len(tensors[inputs[0]].shape) != 2:
        return
    width = next((key for key in _EMBEDDING_WIDTHS if type(part.get(key)) is int), "")
    for key, size in zip(("vocab_size", width), tensors[inputs[0]].shape, strict=True):
        if type(part.get(key)) is int and part[key] != size:
            raise BadModelDir(
                f"{path / 'config.json'} says {key} {part[key]}, but {inputs[0]} of the weights has {size}; use the "
                f"config.json that belongs to the weights"
            )


def _chosen_files(path: Path, *, key: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of the files that are the model, and, where the index decides, which tensor it puts where."""
    own = path / WEIGHTS_FILE
    if own.is_file():
        files, weight_map = [WEIGHTS_FILE], {}
    elif own.is_symlink():  # else an index beside it would decide, unlike where the link was made
        raise BadModelDir(f"{own} is a link to a file that is not there; download it again", key=key)
    elif (path / INDEX_FILE).is_file():
        weight_map = _read_index(path, key=key)
        files = sorted(set(weight_map.values()))
    else:
        raise BadModelDir(_without_weights(path), key=key)
    _check_named_weights(path, INDEX_FILE if weight_map else WEIGHTS_FILE, key=key)
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise BadModelDir(
            f"{path} lacks {len(missing)} of {len(files)} weight files, the first is {missing[0]}; finish the download",
            key=key,
        )
    return files, weight_map


def _read_index(path: Path, *, key: str) -> dict[str, str]:
    try:
        weight_map = read_object(path / INDEX_FILE, "the index of the weights").get("weight_map")
    except BadModelDir as error:
        raise BadModelDir(error.problem, key=key) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelDir(f"{path / INDEX_FILE} has no weight_map; copy it from the model again", key=key)
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise BadModelDir(
                f"{path / INDEX_FILE} puts {name} into {file!r}, which is not a file name; copy the model again",
                key=key,
            )
    return weight_map


def _without_weights(path: Path) -> str:
    """Return what is wrong with a directory that has neither model.safetensors nor an index."""
    found = sorted(file.name for file in path.glob("*.safetensors"))
    candidates = [name for name in found if not name.startswith("adapter")]
    if len(candidates) == 1:
        return (
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; if {candidates[0]} is the model, rename it to "
            f"{WEIGHTS_FILE}"
        )
    if candidates:
        return (
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, and nothing says which of {few_of(candidates)} is "
            f"the model; rename that one to {WEIGHTS_FILE}, or copy the index from the model"
        )
    if found:
        return f"{path} holds the adapter {found[0]}, but no model; merge it into the model that it was made for"
    others = sorted(file.name for file in path.glob("*.bin"))
    hint = f"convert {others[0]} to safetensors" if others else "copy them from the model"
    return f"{path} holds no *.safetensors weights; {hint}"


def _check_named_weights(path: Path, chosen: str, *, key: str) -> None:
    """Refuse a config.json that has transformers read another file."""
    if not (path / "config.json").is_file():  # of a reference that a run saved
        return
    named = read_object(path / "config.json", "the model's configuration").get("transformers_weights")
    if named not in (None, chosen):
        raise BadModelDir(
            f"{path / 'config.json'} has transformers read {named!r} (transformers_weights), AsyncFlow reads {chosen}; "
            f"name the weights {WEIGHTS_FILE}, and remove that key",
            key=key,
        )


def _read_header(file: Path, *, key: str) -> dict[str, StoredTensor]:
    """Return the tensors of a complete safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):  # compares header and length; numpy: the launcher stays without torch
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise BadModelDir(f"cannot read {file}: {error}", key=key) from error
    except SafetensorError as error:
        with file.open("rb") as stream:
            beginning = stream.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            raise BadModelDir(
                f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` there", key=key
            ) from error
        raise _broken_weights(file, str(error), key=key) from error
    header.pop("__metadata__", None)
    begin = 8 + length
    return {
        name: StoredTensor(file, each["dtype"], tuple(each["shape"]), *(begin + at for at in each["data_offsets"]))
        for name, each in header.items()
    }


def _broken_weights(file: Path, reason: str, *, key: str) -> BadModelDir:
    return BadModelDir(f"{file} is not a complete safetensors file: {reason}; download it again", key=key)


def few_of(names: Collection[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(sorted(names)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
