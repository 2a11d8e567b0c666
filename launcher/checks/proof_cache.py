"""Checks, before a start, that the run's engines compute its models correctly: tries a small model of the same config.

The proof needs torch, so it runs in a child process (`workers.engines.model_proof`). Correct results are cached
under everything they depend on: the small config, the names in the weight files, the versions of transformers and
torch, and our engines' sources. `proven_models.json` lists what was proven when the package was built, so known
families cost nothing.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import workers
from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.data.model_files import POLICY_KEY, name_pattern, read_model_config, stored_tensors
from workers.settings.run import RunConfig

SHIPPED = Path(__file__).with_name("proven_models.json")
_TIMEOUT_S = 300.0

HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
POSITIONS = 64
_WIDE_HEAD_DIM = 32
"""For heads whose total width differs from the hidden size."""
_WINDOW = 5
"""Shorter than the proof's samples, so the window takes effect."""
_VOCABULARY = 48
_MOST_LAYERS = 8

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "feed_forward_proj_dim")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "original_max_position_embeddings", "max_seq_length",
)  # fmt: skip
_WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "sliding_window_size")
_PERIODS = re.compile(r"(_pattern|_interval|_period|_every_n_layers|_freq|_step)$")
_INDICES = re.compile(r"_(idxs|indices|layer_ids)$")
"""Lists of the layers that are of another kind."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COSMETIC = re.compile(
    r"^(_.*|transformers.*|tokenizer_class|model_max_length|return_dict|output_attentions|output_hidden_states"
    r"|problem_type|chunk_size_feed_forward|torch_dtype|dtype|use_cache|initializer_range|.*dropout.*|.*pdrop|.*_drop|id2label"
    r"|label2id|task_specific_params|.*_token_index|finetuning_task|.*router.*|quantization_config|architectures"
    r"|pretraining_tp|rope_theta|use_mrope|rope_interleaved|is_llama_config|name_or_path|attn_implementation"
    r"|unsloth_.*|.*layer_drop.*|layerdrop)$"
)
"""Settings that do not affect whether a model is computed correctly."""


_SCORED_BY = {"hf": ("names", "packed"), "fsdp": ("names", "packed", "sharded")}
"""Engine of a model that only scores -> parts of its proof."""


@dataclass(frozen=True)
class ModelUse:
    """A model of the run, and what is computed with it.

    Attributes:
        key: the setting that names it; messages begin with it.
        parts: of the proof that it needs; see `workers.engines.model_proof`.
    """

    key: str
    path: Path
    parts: tuple[str, ...]


def check_proven(
    config: RunConfig, roles: Collection[str] | None = None, say: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse models that the run's engines do not compute correctly; unknown ones are proven in a child process.

    Args:
        roles: launched ones whose processes have this interpreter, whose libraries the proof is of; None: all.
        say: told before a proof, which takes seconds.

    Raises:
        ConfigError: names the model, the layer and what to do.
    """
    # Proven by computing rather than by a list of families: a family's options (layer types, ALiBi, windows) matter,
    # and a list ages with transformers.
    questions = [(use, question_of(use.path)) for use in models_of(config, roles)]
    verdicts = [known_verdicts(question) for _, question in questions]
    missing = [
        number
        for number, ((use, _), known) in enumerate(zip(questions, verdicts, strict=True))
        if not set(use.parts) <= known.keys()
    ]
    if missing:
        models = sorted({str(questions[number][0].path) for number in missing})
        say(f"proving {', '.join(models)} (once for this machine)")
        asked = [[*questions[number][1], questions[number][0].parts] for number in missing]
        for number, found in zip(missing, _prove(asked, key=questions[missing[0]][0].key), strict=True):
            verdicts[number] |= found
            _remember(questions[number][1], verdicts[number])
    for (use, _), known in zip(questions, verdicts, strict=True):
        for part in use.parts:
            if (problem := known[part]) is not None:
                raise ConfigError(f"{use.key}: {use.path} {problem}{_advice(problem)}")


def models_of(config: RunConfig, here: Collection[str] | None = None) -> list[ModelUse]:
    """Return the models that transformers' classes compute in this run, or in its roles `here`, each with the parts it
    is used for."""
    actor, ref, roles = config.actor, config.ref, config.roles

    def runs(*wanted: str) -> bool:
        return here is None or any(role in here for role in wanted)

    engines = {"rollout": config.rollout.engine, "evaluate": config.evaluate.sampling(config.rollout).engine}
    engines = {role: engine for role, engine in engines.items() if role in roles}
    generating = {engine for role, engine in engines.items() if runs(role)}
    # A task whose role is not launched is the actor's.
    own = actor.engine == "fsdp" and runs("actor")
    scores = runs("ref", "actor_fwd") if roles.keys() & {"ref", "actor_fwd"} else False
    hosts = config.algorithm.kl_coef > 0 and actor.engine != "sim" and runs("actor")
    refers = ref.engine in ("hf", "fsdp") and (scores or hosts)
    critic = config.algorithm.has_critic and actor.engine != "sim" and runs("critic" if "critic" in roles else "actor")
    parts = []
    if own or refers or "hf" in generating:
        parts += ["names", "packed"]
    if (own and roles.get("actor", 1) > 1) or (refers and ref.engine == "fsdp"):
        parts.append("sharded")
    if own and actor.gradient_checkpointing:
        parts.append("checkpointing")
    if "hf" in generating:
        parts.append("generate")
    if set(engines.values()) & {"vllm", "openai"} and own:
        parts.append("export")
    path = Path(config.model.path)
    uses = [ModelUse(POLICY_KEY, path, tuple(parts))]
    if critic:
        shards = (
            ["sharded"] if max(roles.get("critic", 1), 1 if "critic" in roles else roles.get("actor", 1)) > 1 else []
        )
        checkpointing = ["checkpointing"] if config.critic.gradient_checkpointing else []
        wanted = ("packed", "critic", *shards, *checkpointing)
        if config.critic.path is None:
            uses[0] = ModelUse(POLICY_KEY, path, tuple(dict.fromkeys((*parts, *wanted))))
        else:
            uses.append(ModelUse("critic.path", Path(config.critic.path), wanted))
    if ref.path is not None and refers:
        uses.append(ModelUse("ref.path", Path(ref.path), _SCORED_BY[ref.engine]))
    if "teacher" in roles and runs("teacher"):
        teacher = config.teacher
        uses += [ModelUse(key, Path(each), _SCORED_BY[teacher.engine]) for key, each in teacher.models.items()]
    if config.reward.model is not None and runs("reward"):
        uses.append(ModelUse("reward.model.path", Path(config.reward.model.path), ("score",)))
    return [use for use in uses if use.parts]


Question = tuple[dict[str, Any], list[str]]
"""A small config, and the names of the weights in the files with numbers replaced by `*`."""


def question_of(path: Path) -> Question:
    return small_config(read_model_config(path)), name_patterns(stored_tensors(path))


def name_patterns(names: Iterable[str]) -> list[str]:
    """Return the sorted, distinct names of weights without their numbers."""
    return sorted({name_pattern(name) for name in names})


def _prove(asked: Sequence[Sequence[Any]], *, key: str) -> list[dict[str, str | None]]:
    """Have a child process prove the models."""
    pool = CallPool(
        Entry("workers.engines.model_proof:proving"),
        what=f"{key}: the proof that the engines compute it",
        limit="the deadline",
        timeout_s=_TIMEOUT_S,
        concurrency=1,
    )
    try:
        pool.until_ready()
        found: list[dict[str, str | None]] = pool.call_and_wait(asked, on="a small model")
    except UserCodeFailed as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()
    return found


def _advice(problem: str) -> str:
    # A problem with a semicolon already says what to do.
    return "" if ";" in problem else "; name a model of a family that docs/models.md lists as proven"


def shipped_key(question: Question) -> str:
    """Return the key under which `proven_models.json` lists a model."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]


def known_verdicts(question: Question) -> dict[str, str | None]:
    """Return part -> None for the parts known to be correct, from the package or from earlier starts."""
    shipped, parts = _shipped(), ()
    # The package's list holds only for the transformers version that it was proven with.
    if shipped["transformers"] == _version("transformers") and (known := shipped["models"].get(shipped_key(question))):
        parts = shipped["parts"][known]
    try:
        found = json.loads(_cache_file(question).read_text())
    except (OSError, ValueError):  # none yet, or a foreign file
        found = {}
    right = [part for part, problem in found.items() if problem is None] if isinstance(found, dict) else []
    return dict.fromkeys((*right, *parts))


def _remember(question: Question, verdicts: Mapping[str, str | None]) -> None:
    """Record which parts are correct."""
    file = _cache_file(question)
    # Failures are not recorded, since they may be the machine's: the next start proves the model again.
    right = {part: problem for part, problem in verdicts.items() if problem is None}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # A temporary file and a rename: other starts read and write the same file.
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".new")
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(right, stream)
            Path(name).replace(file)
        except OSError:
            Path(name).unlink()


def _cache_file(question: Question) -> Path:
    known = [shipped_key(question), _version("transformers"), _version("torch"), _engines()]
    root = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 (pathlib's raises where a user has no home)
    own = home if home.is_absolute() else Path(tempfile.gettempdir()) / f"asyncflow-{os.getuid()}"
    cache_dir = Path(root) if Path(root).is_absolute() else own
    return cache_dir / "asyncflow" / "models" / hashlib.sha256("|".join(known).encode()).hexdigest()[:32]


@cache
def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SHIPPED.read_text())
    return found


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def _engines() -> str:
    """Return a hash of the engines' sources, so that verdicts for other sources do not count."""
    digest = hashlib.sha256()
    for file in sorted(Path(workers.__file__).parent.joinpath("engines").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SAME_FOR_ALL = {"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "rope_theta": 10000.0}
"""Numbers that differ within a family but do not change how a model is computed."""
_PLAIN_ROPE = {"rope_theta", "rope_type"}


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a small model with the same kinds of layers; one result covers many sizes of a family."""
    own = {key: value for key, value in config.items() if not _COSMETIC.match(key) and value is not None}
    own |= {key: value for key, value in _SAME_FOR_ALL.items() if key in own}
    if own.get("is_encoder_decoder") is False:  # the default
        del own["is_encoder_decoder"]
    if not own.get("use_sliding_window", True):
        own = {key: value for key, value in own.items() if key not in ("sliding_window", "max_window_layers")}
    for key, value in own.items():
        if isinstance(value, dict) and any(name in value for name in _WIDTHS):
            own[key] = small_config(value)
    count = next((own[key] for key in _LAYERS if type(own.get(key)) is int), 0)
    _cut_layers(own, count)
    _narrow(own, config)
    for key in own:
        if key in _LENGTHS and type(own[key]) is int:
            own[key] = POSITIONS
        elif key in _WINDOWS and type(own[key]) is int and own[key] > 0:
            own[key] = min(own[key], _WINDOW)
        elif key.endswith("vocab_size") and type(own[key]) is int:
            own[key] = _VOCABULARY
        elif key.endswith("_token_id"):
            own[key] = _TOKENS.get(key, 3)
    if config.get("auto_map"):
        # Only whether the model brings its own code matters, not its name.
        own["auto_map"] = {"is": "there"}
    own = {key: value for key, value in own.items() if not key.endswith("_token_id") or key in _TOKENS}
    own |= {key: own.get(key, token) for key, token in _TOKENS.items() if key != "pad_token_id"}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(own.get(key), dict):
            own[key] = _small_rope(own[key], own)
    if own.get("rope_parameters", {}).get("rope_type") == "default" and own["rope_parameters"].keys() <= _PLAIN_ROPE:
        del own["rope_parameters"]
    return own


def _cut_layers(own: dict[str, Any], count: int) -> None:
    """Keep the first layer of each kind if lists name the kinds; otherwise as many layers as a pattern needs."""
    lists = [
        key
        for key, value in own.items()
        if isinstance(value, list) and count > 1 and len(value) == count and not _INDICES.search(key)
    ]
    if lists:
        kinds: dict[str, int] = {}
        for layer in range(count):
            kinds.setdefault(json.dumps([own[key][layer] for key in lists]), layer)
        kept = sorted(kinds.values())
        kept += [layer for layer in range(count) if layer not in kept][: max(0, 2 - len(kept))]
        kept = sorted(kept)[:_MOST_LAYERS]
        for key in lists:
            own[key] = [own[key][layer] for layer in kept]
        for key, value in own.items():
            if isinstance(value, dict) and value and all(str(number).isdigit() for number in value):
                own[key] = {str(kept.index(int(n))): value[n] for n in value if int(n) in kept}
        layers = len(kept)
    else:
        periods = [value for key, value in own.items() if _PERIODS.search(key) and type(value) is int]
        periods += [len(value) for key, value in own.items() if isinstance(value, list) and key == "block_types"]
        layers = min(max([2, *periods]), _MOST_LAYERS, count or 2)
    for key in _LAYERS:
        if type(own.get(key)) is int:
            own[key] = layers
    if type(own.get("max_window_layers")) is int:
        own["max_window_layers"] = 1 if own.get("use_sliding_window") else layers
    for key, value in own.items():
        if _INDICES.search(key) and isinstance(value, list) and value:
            own[key] = list(range(layers)) if len(value) == count else [layers - 1]
        if key == "attention_types" and isinstance(value, list):
            own[key] = [[each[0], 1] for each in value]


def _narrow(own: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Shrink the widths, keeping their divisibility and whether heads are grouped."""
    width = next((config[key] for key in _WIDTHS if type(config.get(key)) is int), 0)
    for key in own:
        if key in _WIDTHS and type(own[key]) is int:
            own[key] = HIDDEN
        elif key in _INNER and type(own[key]) is int:
            own[key] = 2 * HIDDEN
    name = next((key for key in _HEAD_COUNTS if type(own.get(key)) is int), None)
    if name is None:
        return
    heads = int(own[name])
    own[name] = HEADS
    for key in _KEY_HEADS:
        if type(own.get(key)) is int:
            # Multi-query stays one key head, multi-head as many as heads; grouped heads become groups of two.
            own[key] = 1 if own[key] == 1 else HEADS if own[key] == heads else HEADS // 2
    size = own.get("head_dim")
    if type(size) is int and "qk_rope_head_dim" not in own:
        own["head_dim"] = HEAD_DIM if heads * size == width else _WIDE_HEAD_DIM
    if type(own.get("expand")) is int and type(size) is int:  # Mamba 2: heads x size = expand x width
        own["head_dim"] = own["expand"] * HIDDEN // HEADS
    small = {"rotary_dim": HEAD_DIM // 2, "mamba_n_heads": HEADS, "mamba_d_head": 2 * HIDDEN // HEADS}
    small |= {"mamba_d_ssm": 2 * HIDDEN, "n_groups": 1, "mamba_n_groups": 1, "lru_width": HIDDEN}
    small |= {"n_mamba_heads": HEADS, "mamba_headdim": 2 * HIDDEN // HEADS, "mamba_ngroups": 1}
    small |= {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
    own |= {key: value for key, value in small.items() if type(own.get(key)) is int}


def _small_rope(rope: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings that fit the small heads; sections per kind of layer, too."""
    small: dict[str, Any] = {
        key: _small_rope(value, own) if isinstance(value, dict) else value for key, value in rope.items()
    }
    small |= {key: value for key, value in _SAME_FOR_ALL.items() if key in small}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = POSITIONS
    share = small.get("partial_rotary_factor", own.get("partial_rotary_factor", 1.0))
    size = int(own.get("head_dim", HEAD_DIM) * (share or 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(small.get(key), list):
            small[key] = [float(small[key][0])] * size
    return small
