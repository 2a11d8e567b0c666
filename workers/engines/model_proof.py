"""Proves that the engines compute a given kind of model correctly, on a small one with random weights, part by part.

    names      the model's weight files hold every weight that it needs, under names that are understood
    packed     three samples in one packed sequence, two of which share a prompt: log-probabilities and gradients equal
               those of transformers' own attention for each sample alone, and no token depends on a later one
    sharded    the same, sharded by FSDP2
    generate   tokens that the `hf` engine draws, before and after a swap of weights by the trainer's names, have the
               log-probabilities that the trainer computes
    export     the trainer's names are those in files, which third-party servers expect
    checkpointing, critic, score   the settings and models of these names

`launcher.checks.proof_cache` runs this in a child process before a start. A model's own weights are never read.
"""

import json
import os
import re
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncflow.errors import ConfigError, one_line
from workers.calls.user_function import Callee
from workers.data.model_files import SCORE_HEAD, name_pattern
from workers.engines.base import GenerateRequest
from workers.engines.fsdp.dtensor_shards import local_shards
from workers.engines.fsdp.sharding import FsdpEngine, FsdpValueEngine, divide, reshard
from workers.engines.hf.engine import STEP_ATTENTION, HfEngine
from workers.engines.hf.frozen import RewardModel
from workers.engines.hf.model import (
    empty_causal_lm,
    empty_reward_model,
    materialize,
    names_left_out,
    read_weights,
    stored_names,
)
from workers.engines.hf.weights import HfWeights
from workers.engines.packed_attention import PACKED_ATTENTION
from workers.engines.packed_forward import PackedInputs, response_log_probs
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

GENERATES = ("names", "packed", "sharded", "checkpointing", "generate", "export", "critic")
SCORES = ("score",)  # parts to prove for a reward model
# For log-probabilities. Float32 rounds them at about 1e-6; samples that leak into each other differ by 0.01 and more.
_RTOL, _ATOL = 1e-4, 1e-4
_FIRST_TOKEN, _END_TOKEN = 4, 48  # lower ids may have a meaning: padding, begin, end
_LONGEST = 200  # characters shown of an error that a model's code raises
_MOST_PARAMETERS = 50_000_000
_CPU = torch.device("cpu")
# Raised by a full disk or too little memory, whatever the model.
_OF_THE_MACHINE = (OSError, MemoryError, SafetensorError)


class _Wrong(Exception):
    """What is wrong with a model, in words that follow its name."""


def proving() -> Callee:
    """Return the callee that proves models in a child: list of (config, names, parts) -> their `prove_model`
    results."""
    silence = os.open(os.devnull, os.O_WRONLY)  # models' code prints and warns freely
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    return Callee(lambda models: [prove_model(config, parts, names=names) for config, names, parts in models])


def prove_model(
    config: Mapping[str, Any], parts: Sequence[str], *, names: Sequence[str] | None = None
) -> dict[str, str | None]:
    """Return for each part what is wrong with such a model, in words that follow its name; None: nothing is.

    Args:
        config: config.json of a small model.
        parts: from `GENERATES`, or `SCORES`.
        names: of the tensors in the real model's files, numbers replaced by `*`; None: those of the small model.
    """
    problem = _unknown(config, scores="score" in parts)
    if problem is not None:
        return dict.fromkeys(parts, problem)
    with tempfile.TemporaryDirectory(prefix="asyncflow-proof-") as place, _quiet(), _one_rank():
        proof = _Proof(Path(place), config, names, scores="score" in parts)
        return {part: proof.check_part(part) for part in parts}


def saved_names(config: Mapping[str, Any]) -> list[str]:
    """Return the weight names in the files of such a model, as transformers saves it."""
    with tempfile.TemporaryDirectory(prefix="asyncflow-proof-") as place, _quiet():
        _Proof(Path(place), config, None, scores=False)
        return sorted(HfWeights(Path(place)).names)


def _unknown(config: Mapping[str, Any], *, scores: bool) -> str | None:
    """Return why transformers has no class for a config; None: it has one."""
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        if config.get("auto_map"):
            return (
                "has code of its own (auto_map in config.json), which AsyncFlow does not run; name a model that "
                "transformers has a class for"
            )
        return f"has a model_type {kind!r} that transformers {transformers.__version__} does not know; upgrade it"
    automatic: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if CONFIG_MAPPING[kind] not in automatic._model_mapping:
        task = "sequence classification" if scores else "a causal language model"
        return f"is of a kind ({kind}) for which transformers has no class of {task}"
    return None


class _Proof:
    """A small model in files, and what transformers computes with it."""

    def __init__(self, place: Path, config: Mapping[str, Any], names: Sequence[str] | None, *, scores: bool) -> None:
        self._dir = place
        self._config = {"architectures": ["Small"]} | dict(config)
        self._names = names
        self._samples = _samples()
        self._failed = ""
        self._trainer: FsdpEngine | None = None
        self._write_config(place)
        try:
            self._build_model(AutoModelForSequenceClassification if scores else AutoModelForCausalLM)
            if not scores and not self._failed:
                self._expected = _one_by_one(self._plain, self._samples)
        except _OF_THE_MACHINE:
            raise
        except Exception as error:  # noqa: BLE001 (models' code)
            self._failed = f"{_raised(error, place)} where transformers alone computes a small one"

    def check_part(self, part: str) -> str | None:
        """Return what is wrong, or None."""
        if self._failed:
            return self._failed
        try:
            getattr(self, f"_prove_{part}")()
        except _Wrong as wrong:
            return str(wrong)
        except _OF_THE_MACHINE:
            raise
        except Exception as error:  # noqa: BLE001 (models' code; in the run it would raise the same)
            return _raised(error, self._dir)
        return None

    def _build_model(self, automatic: Any) -> None:
        more = {"num_labels": 1} if automatic is AutoModelForSequenceClassification else {}
        config = AutoConfig.from_pretrained(self._dir, trust_remote_code=False, **more)
        with suppress(Exception), torch.device("meta"):  # some cannot be built on meta; they are judged below
            size = sum(parameter.numel() for parameter in automatic.from_config(config).parameters())
            if size > _MOST_PARAMETERS:
                self._failed = f"cannot be proven: a small one still has {size} parameters"
                return
        torch.manual_seed(1)
        # "eager" is transformers' own attention, the reference for everything else.
        self._plain: Any = automatic.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        _randomize(self._plain)
        self._plain.save_pretrained(self._dir)
        self._write_config(self._dir)

    def _write_config(self, place: Path) -> None:
        (place / "config.json").write_text(json.dumps(self._config))

    def _prove_names(self) -> None:
        model = empty_causal_lm(self._dir, dtype=torch.float32, attention=PACKED_ATTENTION)
        there = HfWeights(self._dir).names if self._names is None else self._names
        patterns = {name_pattern(name) for name in there}
        aliases = stored_names(model)
        for name, others in aliases.items():
            if patterns.isdisjoint(map(name_pattern, (name, *others))):
                raise _Wrong(f"lacks the weight {name} that its config.json asks for; were its files renamed?")
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        buffers = [each for own, _ in model.named_buffers() for each in (own, own.removeprefix(prefix))]
        further = [each for group in aliases.values() for each in group]
        known = {name_pattern(each) for each in (*aliases, *further, *buffers)}
        ignored = names_left_out(model)
        for name in sorted(patterns - known):  # as `hf.model.check_stored` does at the start of a run
            if not (ignored and ignored.search(name.replace("*", "0"))):
                raise _Wrong(
                    f"holds {name}, for which {type(model).__name__} has no weight, so it would be dropped; use the "
                    f"config.json that belongs to the weights, or remove what is not the model's"
                )

    def _prove_packed(self) -> None:
        model = self._packed_model()
        weights_A = torch.linspace(-1, 1, len(self._expected))
        for shared in (False, True):
            self._compare_log_probs(model, shared)
        self._same_before_the_last(model)
        (self._log_probs(model, self._samples, shared=True) * weights_A).sum().backward()  # type: ignore[no-untyped-call]
        theirs = dict(self._plain.named_parameters())
        expected = torch.autograd.grad(
            (_one_by_one(self._plain, self._samples) * weights_A).sum(), list(theirs.values()), allow_unused=True
        )
        total = float(torch.stack([each.norm() for each in expected if each is not None]).norm())
        for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
            if not _alike(parameter.grad, wanted, total):
                raise _Wrong(f"computes another gradient of {name} than transformers' own attention")

    def _prove_sharded(self) -> None:
        model = empty_causal_lm(self._dir, dtype=torch.float32, attention=PACKED_ATTENTION)
        aliases, weights = stored_names(model), HfWeights(self._dir)
        divide(model, init_device_mesh("cpu", (1,)), ActorConfig())
        materialize(model, _CPU)
        weights.fill(local_shards(model.named_parameters()), aliases)
        actual_A = self._log_probs(model, self._samples, shared=True)
        actual_A.sum().backward()  # type: ignore[no-untyped-call]
        reshard(model)
        if not _close(actual_A, self._expected):
            raise _Wrong("gives other log-probabilities when FSDP2 divides it over ranks; train it with one actor rank")

    def _prove_checkpointing(self) -> None:
        engine = self._engine(gradient_checkpointing=True)
        found: list[Tensor] = []

        def loss(log_probs_A: Tensor, _: Tensor) -> Tensor:
            found.append(log_probs_A.detach())
            return log_probs_A.sum()

        engine.forward_backward(self._samples, loss)
        if not _close(found[0], self._expected):
            raise _Wrong(
                "gives other log-probabilities where layers are recomputed; set actor.gradient_checkpointing to false"
            )

    def _prove_generate(self) -> None:
        trainer = self._engine()
        sampling = SamplingConfig(engine="hf", batch_size=5, max_response_tokens=8)
        engine = HfEngine(self._dir, ModelConfig(path=str(self._dir)), sampling=sampling, device=_CPU)
        new = {shard.name: shard.values.detach().clone() for shard in trainer.shards()}
        # Two versions that differ, so that a key or value of the wrong one shows in the log-probabilities.
        old = {name: values * 0.8 for name, values in new.items()}
        prompts = [self._samples.tokens_T[start : start + size].long() for start, size in ((0, 4), (9, 9), (9, 9))]
        requests = [
            GenerateRequest(index=index, prompt_P=prompt, seed=index, max_tokens=limit)
            for index, (prompt, limit) in enumerate(zip([*prompts, *prompts[:2]], (8, 6, 8, 5, 7), strict=True))
        ]
        wake = threading.Event()
        engine.load_weights(old)
        engine.version = 1
        engine.submit(requests[:3])
        done = [*engine.step(wake), *engine.step(wake)]
        engine.load_weights(new)
        engine.version = 2
        done += engine.step(wake)
        engine.submit(requests[3:])
        while engine.num_running:
            done += engine.step(wake)
        # Only tokens of the trainer's weights: it cannot score those drawn from the old ones.
        for one in done:
            prompt = requests[one.index].prompt_P
            expected_R = trainer.log_probs(Sequences.from_turns([prompt], [one.response_R]))
            drawn_R = one.versions_R == 2
            if not _close(one.log_probs_R[drawn_R], expected_R[drawn_R]):
                raise _Wrong(
                    "gives other log-probabilities in rollout.engine hf than in training; set rollout.engine to vllm "
                    "or openai"
                )

    def _prove_export(self) -> None:
        inside = {name for name, _ in self._packed_model().named_parameters()}
        outside = set(HfWeights(self._dir).names)
        if strange := sorted(inside - outside):
            raise _Wrong(
                f"has weights of other names in memory ({strange[0]}) than in files, by which rollout.engine vllm and "
                f"openai take them; set rollout.engine to hf"
            )

    def _prove_critic(self) -> None:
        path = self._dir / "critic"
        path.mkdir()
        self._write_config(path)
        weights = load_file(self._dir / "model.safetensors")
        width = self._plain.get_output_embeddings().in_features
        weights[f"{SCORE_HEAD}.weight"] = torch.linspace(-1, 1, width).unsqueeze(0)
        save_file(weights, path / "model.safetensors")
        critic = FsdpValueEngine(path, ActorConfig(), device=_CPU, seed=0)
        alone_A = torch.cat([critic.values(one) for one in _each(self._samples)])
        if not _close(critic.values(self._samples), alone_A) or not bool(alone_A.std() > 0):
            raise _Wrong("gives other values to packed samples than to each alone; name another critic.path")

    def _prove_score(self) -> None:
        reward = RewardModel(self._dir, dtype=torch.float32, device=_CPU)
        with torch.no_grad():
            expected_N = torch.cat(
                [self._plain(input_ids=one.tokens_T.long().unsqueeze(0)).logits[:, 0] for one in _each(self._samples)]
            )
        if not _close(reward.score_samples(self._samples), expected_N):
            model: Any = empty_reward_model(self._dir, dtype=torch.float32, attention=PACKED_ATTENTION)
            raise _Wrong(f"gives packed samples other scores than transformers' {type(model).__name__} each alone")

    def _compare_log_probs(self, model: Any, shared: bool) -> None:
        if not _close(self._log_probs(model, self._samples, shared=shared), self._expected):
            raise _Wrong(self._blame_module(model))

    def _same_before_the_last(self, model: Any) -> None:
        """Refuse a model whose tokens see later ones, even with transformers' own attention."""
        changed = _each(self._samples)[-1]
        tokens_T = changed.tokens_T.clone()
        tokens_T[-2:] = _FIRST_TOKEN
        before = slice(0, changed.num_drawn - 2)
        with torch.no_grad():
            first, second = (
                response_log_probs(model, PackedInputs.from_batch(batch, _CPU), 1.0)[0][before]
                for batch in (changed, Sequences(tokens_T, changed.lengths_N, changed.response_mask_T))
            )
        if not _close(first, second):
            raise _Wrong("lets tokens see later ones, so it is not a causal language model")

    def _blame_module(self, model: Any) -> str:
        """Return which module computes a packed sequence incorrectly, and how."""
        samples = Sequences.from_turns(
            [self._samples.tokens_T[:4], self._samples.tokens_T[9:18]], [_draw(5, 1), _draw(6, 2)]
        )
        packed = _seen(model, _fed(samples))
        alone = [_seen(self._plain, {"input_ids": one.tokens_T[:-1].long().unsqueeze(0)}) for one in _each(samples)]

        def wrong(name: str, which: int) -> bool:
            """Compare a module's input (0) or output (1); a value without one row per token counts as wrong."""
            parts = [each[name][which] for each in alone if name in each]
            found, whole = packed[name][which], [part for part in parts if part is not None]
            if found is None or len(whole) < len(alone) or sum(map(len, whole)) != len(found):
                return True
            return not _close(found, torch.cat(whole))

        modules = dict(model.named_modules())
        for name in packed:
            if packed[name][1] is None or not wrong(name, 1):
                continue
            # Climb to the nearest enclosing module that got correct inputs and is not one of torch's own.
            while "." in name and (
                name not in packed or wrong(name, 0) or type(modules[name]).__module__.startswith("torch.")
            ):
                name = name.rpartition(".")[0]
            what = (
                "mixes the samples of"
                if self._mixes_samples(model, samples, packed, name)
                else "gives other numbers in"
            )
            return f"has layers whose {_named(modules, name, self._plain.config)} {what} a packed batch"
        return "gives other log-probabilities for packed samples than for each alone"

    @staticmethod
    def _mixes_samples(model: Any, samples: Sequences, packed: "_Seen", name: str) -> bool:
        """Return whether a module's output for the second sample depends on the first."""
        start = int(samples.lengths_N[0]) - 1  # the last token of a sample is not fed
        tokens_T = samples.tokens_T.clone()
        tokens_T[start - 1] = _FIRST_TOKEN + (tokens_T[start - 1] + 1) % (_END_TOKEN - _FIRST_TOKEN)
        changed = _seen(model, _fed(Sequences(tokens_T, samples.lengths_N, samples.response_mask_T)))
        first, second = (seen.get(name, (None, None))[1] for seen in (packed, changed))
        return first is not None and second is not None and not _close(second[start:], first[start:])

    def _packed_model(self) -> Any:
        model = empty_causal_lm(self._dir, dtype=torch.float32, attention=PACKED_ATTENTION)
        materialize(model, _CPU)
        read_weights(model, HfWeights(self._dir))
        return model

    def _engine(self, **settings: Any) -> FsdpEngine:
        return FsdpEngine(self._dir, actor=ActorConfig(**settings), temperature=1.0, device=_CPU, seed=0)

    @staticmethod
    def _log_probs(model: Any, samples: Sequences, *, shared: bool) -> Tensor:
        return response_log_probs(model, PackedInputs.from_batch(samples, _CPU, shared_prompt=shared), 1.0)[0]


def _samples() -> Sequences:
    """One lone sample and two that share a prompt, of 9, 12 and 17 tokens: longer than the small models' windows."""
    shared = _draw(9, 4)
    return Sequences.from_turns([_draw(4, 3), shared, shared], [_draw(5, 5), _draw(3, 6), _draw(8, 7)])


def _draw(size: int, seed: int) -> Tensor:
    return torch.randint(_FIRST_TOKEN, _END_TOKEN, (size,), generator=torch.Generator().manual_seed(seed))


def _each(batch: Sequences) -> list[Sequences]:
    sizes = batch.lengths_N.tolist()
    pairs = zip(torch.split(batch.tokens_T, sizes), torch.split(batch.response_mask_T, sizes), strict=True)
    return [Sequences(tokens, torch.tensor([len(tokens)], dtype=torch.int32), mask) for tokens, mask in pairs]


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Make the weights larger than those of an untrained model, whose layers barely change their input."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(noise * 0.1)


def _one_by_one(model: Any, batch: Sequences) -> Tensor:
    """Return [A]: drawn tokens' log-probabilities from transformers' own forward of each sample."""
    parts = []
    for one in _each(batch):
        tokens = one.tokens_T.long()
        log_probs = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        parts.append(log_probs.gather(-1, tokens[1:, None]).squeeze(-1)[one.response_mask_T[1:].bool()])
    return torch.cat(parts)


def _close(actual: Tensor, expected: Tensor) -> bool:
    actual, expected = actual.detach().float(), expected.detach().float()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=_RTOL, atol=_ATOL * scale)


def _alike(actual: Tensor | None, expected: Tensor | None, total: float) -> bool:
    """Compare one weight's gradients by norm; the norm of all, `total`, bounds the rounding of those that are 0."""
    if actual is None or expected is None:
        return all(each is None or not bool(each.any()) for each in (actual, expected))
    return float((actual - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-5 * total


def _fed(samples: Sequences) -> dict[str, Any]:
    inputs = PackedInputs.from_batch(samples, _CPU)
    return {
        "input_ids": inputs.tokens_T.unsqueeze(0),
        "position_ids": inputs.positions_T.unsqueeze(0),
        "packed_layout": inputs.layout,
    }


# Name of a module -> its input and output for each token; None: nothing of that shape.
_Seen = dict[str, tuple[Tensor | None, Tensor | None]]


@torch.no_grad()
def _seen(model: Any, inputs: Mapping[str, Any]) -> _Seen:
    """Run a model; return what its modules saw, in the order in which they finished."""
    found: _Seen = {}
    size = inputs["input_ids"].shape[1]

    def rows(values: Iterable[Any]) -> Tensor | None:
        fitting = (
            each for each in values if isinstance(each, Tensor) and each.ndim > 1 and each.shape[:2] == (1, size)
        )
        first = next(fitting, None)
        return None if first is None else first[0].clone()

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            found.setdefault(name, (rows([*given, *named.values()]), rows(outputs)))

        return hook

    hooks = [
        module.register_forward_hook(keep(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _named(modules: Mapping[str, nn.Module], name: str, config: Any) -> str:
    """Name a module by its class, and its layer by the config's word for its type."""
    number = re.search(r"\.(\d+)\.", f".{name}.")
    kinds = getattr(config.get_text_config(), "layer_types", None)
    kind = f"{kinds[int(number[1])]}, " if number and kinds and int(number[1]) < len(kinds) else ""
    return f"{type(modules[name]).__name__} ({kind}{name})"


def _raised(error: Exception, place: Path) -> str:
    """Describe what a model's code raised, and in which of its classes."""
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            where = type(module).__name__
    text = one_line(error).replace(str(place), "it")[:_LONGEST]
    if isinstance(error, ConfigError):
        text = str(error).partition(": ")[2].replace(str(place), "it")
        return f"cannot be computed: {text}{f' ({where})' if where else ''}"
    if any(name in text for name in (PACKED_ATTENTION, STEP_ATTENTION, "packed_layout", "step_plan")):
        return f"has an attention of its own ({where}), which AsyncFlow's for packed samples cannot replace"
    return f"cannot be computed: {f'{where} raises' if where else 'it raises'} {text}"


@contextmanager
def _one_rank() -> Iterator[None]:
    """Open a process group of this process alone, unless there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
