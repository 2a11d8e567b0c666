"""What a Hugging Face model directory holds: which files are the model, and whether they are complete.

Reads headers, never loads weights. `stored_tensors` alone decides which files are the model, by transformers' rules;
checks, the parameter count, the planner and the engines of all roles call it. Torch-free for `--dry-run` and
`--resume`.
"""

import functools
import hashlib
import json
import math
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
    """A kind of transformers classes: suffixes of their names, and what other classes lack, for messages."""

    endings: tuple[str, ...]
    lacks: str


GENERATES = ModelKind(("ForCausalLM", "LMHeadModel"), "is not a causal language model of text alone")
SCORES = ModelKind(("ForSequenceClassification",), "scores no text")
BACKBONE = ModelKind((*GENERATES.endings, *SCORES.endings), "is not a language model of text alone")
"""What a critic may be initialized from."""
SCORE_HEAD = "score"
"""transformers' name of the scoring head on a language model's backbone."""
# Prefixes of config.json sections for images or sound
_SENSES = ("vision", "visual", "audio", "speech", "image", "img")
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Files that a user may take for the model
_WEIGHT_LIKE = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin", "consolidated*", "*.gguf",
)  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types whose tensors are usable as stored (not quantized)."""
# Of each, numpy's type of as many bits, since numpy has no bfloat16, and the exponent's bits. All of them are set in
# infinities and NaNs, and in no other number.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48), "F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80),
}  # fmt: skip
# Masks and counters, of any element type, that older files keep among the weights
_NOT_WEIGHTS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|causal_mask|position_ids|num_batches_tracked)$")
# Tensors that accompany quantized weights, which are raw numbers without them
_OF_QUANTIZED = re.compile(
    r"(weight_scale(_inv|_2)?|input_scale|activation_scale|\.(qweight|qzeros|scales|g_idx|SCB|absmax))$"
)
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight")
HEAD_TENSORS = (*OUTPUT_HEADS, "lm_head.bias", "embed_out.bias")
"""Tensors that files may hold though the model has no output layer."""
_EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size", "hidden_size", "n_embd", "d_model")
_LAYER = re.compile(r"(?P<stack>(?:\w+\.)*?(?:layers|h|blocks))\.(?P<number>\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_NAMED = 5
_SAMPLED_BYTES = 4096  # of each weight, for `weights_fingerprint`
_COMPARED_BYTES = 16 * 2**20
LFS_POINTER = b"version https://git-lfs"
ARCHITECTURE_KEYS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
"""Keys of config.json that decide which weights exist, and their shapes."""


class BadModelDir(ConfigError):
    """Unusable model directory.

    Args:
        problem: what is wrong and what to do.
        key: the setting that names the directory; the message starts with it.
    """

    def __init__(self, problem: str, *, key: str = POLICY_KEY) -> None:
        super().__init__(f"{key}: {problem}")
        self.problem = problem


def check_model_dir(path: Path) -> None:
    """Check the policy's directory (config, tokenizer, complete weight files), reading headers only. Raises ConfigError
    for the first thing that is missing or broken."""
    _check_parts(path, GENERATES)
    _check_tied(path)
    _check_layers(path)
    eos_token_ids(path)


def check_other_model_dir(path: Path, kind: ModelKind, *, key: str) -> None:
    """Check, like `check_model_dir`, a model that does not generate; messages begin with the setting `key`."""
    try:
        _check_parts(path, kind)
        check_trainable(path)
    except BadModelDir as error:
        raise BadModelDir(error.problem, key=key) from None


def check_trainable(path: Path) -> None:
    """Raise ConfigError for models that no engine can train yet: experts, quantization, images or sound."""
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
            # Most mixtures of experts name their weights differently in memory than in files.
            if name.endswith("experts") and type(value) is int and value > 1:
                raise BadModelDir(
                    f"{path} is a mixture of experts ({name} {value} in config.json), which AsyncFlow cannot use "
                    f"yet; name a dense model"
                )
            # Most such models were refused already: their architecture does not end in ForCausalLM.
            if name.startswith(_SENSES) and isinstance(value, dict):
                raise BadModelDir(
                    f"{path} holds a {architecture}, which takes more than text ({name} in config.json); AsyncFlow "
                    f"cannot use it yet, so name a model of text alone"
                )


def read_model_config(path: Path) -> dict[str, Any]:
    """Return config.json; raises ConfigError if it is missing or malformed, or names no architecture."""
    config = read_object(path / "config.json", "the model's configuration")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise BadModelDir(
            f"{path / 'config.json'} names no architectures (found {architectures!r}); "
            "use the config.json that belongs to the weights"
        )
    return config


def max_positions(path: Path) -> int | None:
    """Return the longest sequence (tokens) that the model supports, or None if config.json does not say."""
    config = read_model_config(path)
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            limit = part.get(key)
            if type(limit) is int and limit > 0:
                return max(limit, _scaled_positions(part))
    return None


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the tokens that end a response, from generation_config.json or else config.json. Raises ConfigError if
    neither file names one, or one is outside of the vocabulary."""
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
    """Return the number of embeddings, or None if config.json does not say."""
    config = read_model_config(path)
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if type(size) is int else None


def load_raw_tokenizer(path: Path) -> "Tokenizer | None":
    """Return the tokenizer of tokenizer.json with truncation and padding off, or None without that file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    facts = file.stat()
    return _parsed_tokenizer(file, facts.st_mtime_ns, facts.st_size)


# Cached: several checks of one start need it, and parsing a large vocabulary takes a good part of a second. Time and
# size are arguments so that a changed file is parsed again.
@functools.lru_cache(maxsize=3)
def _parsed_tokenizer(file: Path, modified_ns: int, size_bytes: int) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise BadModelDir(f"{file} is not a tokenizer: {error}; copy it from the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file of the model directory; `what` is the file's purpose, for errors
    (ConfigError)."""
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
    """Return the SHA-256 (hex) of what config.json says about names and shapes of weights. Directories with equal
    fingerprints can load each other's weights, whatever their element type and transformers version."""
    config = read_model_config(path)
    parts: list[Mapping[str, Any]] = [config]
    if isinstance(config.get("text_config"), dict):
        parts.append(config["text_config"])
    shape = [{key: part[key] for key in ARCHITECTURE_KEYS if part.get(key) is not None} for part in parts]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(path: Path) -> str:
    """Return a hash (hex) of a model's weights: of each, name, shape, element type and 4 KiB of its values. How they
    are divided into files does not matter. Unlike `model_fingerprint`, it tells a model from one trained on from it."""
    digest = hashlib.sha256(model_fingerprint(path).encode())
    for name, stored in sorted(stored_tensors(path).items()):
        digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
        size = min(_SAMPLED_BYTES, stored.stop - stored.start)
        with stored.file.open("rb") as file:
            # From the middle: rows of rare tokens at the ends of an embedding may be equal in related models.
            file.seek(stored.start + (stored.stop - stored.start - size) // 2)
            digest.update(file.read(size))
    return digest.hexdigest()


def changed_weights(path: Path, first: str, *, key: str) -> str:
    """Return what is wrong if a model's weights have another fingerprint than `first`, the one that the run began with;
    "" if they have not. Messages begin with the setting `key`."""
    if weights_fingerprint(path) == first:
        return ""
    return (
        f"{key}: {path} has other weights than the run began with, whose finished samples it scored; restore them, or "
        f"resume with the other model in a directory of its own"
    )


class StoredTensor(NamedTuple):
    """A tensor in a model's files: safetensors dtype name (F32, BF16, F8_E4M3, ...) and byte range within the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_tensors(path: Path, *, key: str = POLICY_KEY) -> dict[str, StoredTensor]:
    """Return all tensors of the model by name, reading only file headers (and tensors that two files hold, to compare
    them).

    Raises ConfigError as `weight_files` does, and if a file is truncated, lacks a tensor that the index puts there, or
    disagrees with another file about a tensor.
    """
    files, weight_map = _chosen_files(path, key=key)
    assigned: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        assigned.setdefault(file, []).append(name)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held = read_header(path / file, key=key)
        for name in assigned.get(file, ()):
            if name not in held:
                raise _broken_weights(path / file, f"it lacks {name}, which {INDEX_FILE} puts there", key=key)
        for name, stored in held.items():
            first = tensors.setdefault(name, stored)
            # transformers would silently take whichever it reads last.
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
    """Return a weight's name with numbers replaced by `*`, so that all layers share it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the files that are the model: model.safetensors if present, otherwise those that the index names.

    Source: transformers 5.24, `modeling_utils._get_resolved_checkpoint_files`. Raises ConfigError if neither exists, a
    file that the index names is missing, or the index is malformed.
    """
    return tuple(path / file for file in _chosen_files(path, key=POLICY_KEY)[0])


def count_parameters(model_dir: Path) -> int:
    """Count the elements in the headers of the model's files; a tensor stored in two files counts once."""
    return sum(math.prod(stored.shape) for stored in stored_tensors(model_dir).values())


def ignored_weights(path: Path, *, key: str = POLICY_KEY) -> str:
    """Return a message about weight-like files that are not read, or "" if there are none."""
    files, weight_map = _chosen_files(path, key=key)
    read = {*files, *([INDEX_FILE] if weight_map else [])}
    found = sorted({file.name for pattern in _WEIGHT_LIKE for file in path.glob(pattern)} - read)
    if not found:
        return ""
    source = INDEX_FILE if weight_map else files[0]
    return f"{key}: {path} is read from {source}; not from {few_of(found)}"


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors have the same element type, shape and bytes; reads both."""
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


def is_finite(stored: StoredTensor) -> bool:
    """Return whether all numbers of a stored tensor, of a type in `FLOATS`, are finite; reads it."""
    import numpy as np

    kind, exponent = _EXPONENTS[stored.dtype]
    bits = np.fromfile(stored.file, dtype=kind, count=math.prod(stored.shape), offset=stored.start)
    return not bool(((bits & exponent) == exponent).any())


def _check_parts(path: Path, kind: ModelKind) -> None:
    if not path.is_dir():
        state = "is not a directory" if path.exists() else "does not exist"
        make = f", which `asyncflow import-gguf {path} DIRECTORY` makes from it" if path.suffix == ".gguf" else ""
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
            f"{file} describes a {names[0]}, which {kind.lacks}; name a model whose architecture ends in "
            f"{' or '.join(kind.endings)}"
        )


def _scaled_positions(config: Mapping[str, Any]) -> int:
    """Return the length that rotary scaling reaches, or 0."""
    # Some models put only the length before scaling into max_position_embeddings.
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
    """Refuse quantized weights, which would be read as raw numbers."""
    for name, stored in stored_tensors(path).items():
        if stored.dtype not in FLOATS and not _NOT_WEIGHTS.search(name):
            raise quantized(path, name, f"has elements of type {stored.dtype}")
        if _OF_QUANTIZED.search(name):
            raise quantized(path, name, "belongs to quantized weights")


def quantized(path: Path, name: str, why: str, *, key: str = POLICY_KEY) -> BadModelDir:
    return BadModelDir(
        f"{path} is quantized: {name} {why}, and would be read as a raw number; name the model in bfloat16 or float32",
        key=key,
    )


def untied(path: Path, one: str, other: str, *, key: str = POLICY_KEY) -> BadModelDir:
    return BadModelDir(
        f"{path} holds {one} and, with other values, {other}, which config.json ties (tie_word_embeddings), so one "
        f"would be dropped; set tie_word_embeddings to false there, or remove the tensor that is not the model's",
        key=key,
    )


def _check_tied(path: Path) -> None:
    # Where config.json leaves it unset, loading decides.
    if read_model_config(path).get("tie_word_embeddings") is not True:
        return
    tensors = stored_tensors(path)
    inputs = [name for name in tensors if name.endswith(_INPUT_EMBEDDINGS)]
    heads = [name for name in OUTPUT_HEADS if name in tensors]
    if len(inputs) == 1 and heads and not same_values(tensors[inputs[0]], tensors[heads[0]]):
        raise untied(path, inputs[0], heads[0])


def _check_layers(path: Path) -> None:
    """Refuse a config.json whose depth or sizes differ from the weights; unclear cases are left to loading."""
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
        # The weights may have further layers for multi-token prediction.
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
    """Return the model's files and, if the index decides, its map from tensor to file."""
    own = path / WEIGHTS_FILE
    if own.is_file():
        files, weight_map = [WEIGHTS_FILE], {}
    elif own.is_symlink():  # dangling: without this, an index beside it would silently win
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
    """Refuse a config.json that makes transformers read another file."""
    if not (path / "config.json").is_file():  # a reference model that a run saved
        return
    named = read_object(path / "config.json", "the model's configuration").get("transformers_weights")
    if named not in (None, chosen):
        raise BadModelDir(
            f"{path / 'config.json'} makes transformers read {named!r} (transformers_weights), AsyncFlow reads "
            f"{chosen}; name the weights {WEIGHTS_FILE}, and remove that key",
            key=key,
        )


def read_header(file: Path, *, key: str) -> dict[str, StoredTensor]:
    """Return the tensors of a complete safetensors file. Raises BadModelDir, about the setting `key`, for any other."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):  # compares header and file size; numpy keeps torch out of the launcher
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadModelDir(f"cannot read {file}: {reason}; put a readable file there", key=key) from error
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
    """Return the first few names and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(sorted(names)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
