"""What the measuring process does for `launcher.profile.profile_run`.

Models get random weights with which no response ends early.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncflow.device import open_device, wait_for_device
from launcher.doctor.device_check import default_group, rank_devices, started_ranks
from launcher.plan.profile import (
    COLLECTIVES,
    COPY_IN,
    COPY_OUT,
    DECODE,
    FORWARD,
    LATER_TURN,
    OPTIMIZER,
    PREFILL,
    TRAIN,
    MeasuredBlock,
)
from workers.data.model_files import eos_token_ids, read_model_config, weight_files
from workers.engines.base import GenerateRequest
from workers.engines.load_engine import load_frozen_model, load_generate_engine, load_train_engine
from workers.rows.packed_rows import Sequences
from workers.settings.run import RunConfig

_DECODED = 5
"""Number of tokens of a response whose decoding is measured, after the first one."""
_LEAST, _MOST = 3, 25
"""Fewest and most rounds per block, after one that does not count; fewer if they last longer than `_LONG_S`."""
_ENOUGH_S, _LONG_S = 0.5, 5.0
"""A block has enough rounds after `_ENOUGH_S` in all; `_LONG_S` ends one that has fewer than `_LEAST` (s)."""


class Bench:
    """Measures blocks on one device, with one engine at a time.

    Args:
        place: existing directory for models.
        longest: longest prompt of all blocks (tokens).
    """

    def __init__(self, config: RunConfig, device: torch.device, place: Path, *, longest: int) -> None:
        positions = longest + config.rollout.max_response_tokens + _DECODED + 1
        self._positions = positions
        rollout = config.rollout.model_copy(
            update={"max_response_tokens": max(config.rollout.max_response_tokens, _DECODED + 1)}
        )
        data = config.data.model_copy(update={"max_prompt_tokens": longest})
        whole = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
        megatron = config.actor.megatron.model_copy(update=whole)
        actor = config.actor.model_copy(update={"megatron": megatron})
        # Without an adapter: what it changes is counted (`launcher.plan.cost_model`).
        own = {"rollout": rollout, "data": data, "actor": actor, "lora": None}
        self._config = config.model_copy(update=own)
        self._device = device
        # The CPU time of a single thread is measured exactly, whatever else runs on the machine.
        alone = device.type == "cpu" and config.launcher.threads_per_worker == 1
        self._clock = time.process_time if alone else time.monotonic
        self._place = place
        self._made: tuple[str, int, Any] = ("", 0, None)
        self._eos = eos_token_ids(Path(config.model.path))
        self._random = torch.Generator().manual_seed(0)
        self._vocabulary = 0
        self._exchanged: dict[str, float] = {}

    def measure_block(self, block: MeasuredBlock) -> float:
        """Return the median time of a block (s)."""
        if block.name in COLLECTIVES:
            return self._time_collective(block)
        kinds = {TRAIN: self._time_train, OPTIMIZER: self._time_optimizer, FORWARD: self._time_forward,
                 DECODE: self._time_decode, PREFILL: self._time_prefill, LATER_TURN: self._time_prefill,
                 COPY_OUT: self._time_copy, COPY_IN: self._time_copy}  # fmt: skip
        once = kinds[block.name]
        once(block)  # warm-up: allocates and compiles
        took: list[float] = []
        while len(took) < _MOST and (sum(took) < _ENOUGH_S or (len(took) < _LEAST and sum(took) < _LONG_S)):
            took.append(once(block))
        return statistics.median(took)

    def close(self) -> None:
        kind, _, engine = self._made
        if kind == DECODE:
            engine.close()
        self._made = ("", 0, None)

    def _time_train(self, block: MeasuredBlock) -> float:
        engine = self._engine(TRAIN, block.layers)
        batch = self._make_batch(block)
        seconds = self._time_call(lambda: engine.forward_backward(batch, _loss))
        engine.zero_grad()
        return seconds

    def _time_optimizer(self, block: MeasuredBlock) -> float:
        engine = self._engine(TRAIN, block.layers)
        engine.forward_backward(self._make_batch(block), _loss)
        return self._time_call(lambda: engine.step(1e-3))

    def _time_forward(self, block: MeasuredBlock) -> float:
        engine = self._engine(FORWARD, block.layers)
        batch = self._make_batch(block)
        return self._time_call(lambda: engine.log_probs(batch))

    def _time_prefill(self, block: MeasuredBlock) -> float:
        engine = self._engine(DECODE, block.layers)
        seconds = self._time_call(partial(_begin, engine, self._make_prompts(block)))
        engine.abort()
        return seconds

    def _time_decode(self, block: MeasuredBlock) -> float:
        # The mean context over the measured tokens is the block's prompt.
        engine = self._engine(DECODE, block.layers)
        _begin(engine, self._make_prompts(replace(block, prompt=max(1, block.prompt - _DECODED // 2))))

        def rest() -> None:
            while engine.num_running:
                engine.step(_NEVER)

        return self._time_call(rest) / _DECODED

    def _time_copy(self, block: MeasuredBlock) -> float:
        device = self._device
        host = torch.ones(block.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.ones(block.size, dtype=torch.uint8, device=device)
        target, source = (host, there) if block.name == COPY_OUT else (there, host)
        return self._time_call(lambda: target.copy_(source))

    def _time_collective(self, block: MeasuredBlock) -> float:
        """Measure all collectives in all sizes at once, when the first one is asked for."""
        if not self._exchanged:
            self.close()
            names = rank_devices(self._device.type)[: block.ranks]
            with started_ranks("exchanges", names) as (_, finish):
                said = finish()
            for each in said:
                if isinstance(each, str):
                    raise RuntimeError(f"a rank did not answer: {each}")
                for name, took in each.items():
                    if isinstance(took, str):
                        raise RuntimeError(f"{name}: {took}")
                    self._exchanged[name] = max(took, self._exchanged.get(name, 0.0))
        return self._exchanged[f"{block.name} {block.size}"]

    def _engine(self, kind: str, layers: int) -> Any:
        """Return the run's engine for a model of `layers` layers, and keep it for the next block."""
        if self._made[:2] != (kind, layers):
            self.close()
            path = self._model(layers)
            model = self._config.model.model_copy(update={"path": str(path)})
            config = self._config.model_copy(update={"model": model})
            made: Any
            if kind == TRAIN:
                made = load_train_engine(config, device=self._device)
            elif kind == FORWARD:
                made = load_frozen_model(config, device=self._device, weights_dir=None)
            else:
                made = load_generate_engine(config, config.rollout, device=self._device)
                made.load_weights(_weights(path))
            self._made = (kind, layers, made)
        return self._made[2]

    def _model(self, layers: int) -> Path:
        """Return the directory of a model of `layers` layers, which is made once."""
        path = self._place / f"{layers}-layers"
        if path.is_dir():
            return path
        from transformers import AutoConfig, AutoModelForCausalLM

        source = Path(self._config.model.path)
        changed: dict[str, Any] = {"num_hidden_layers": layers}
        known = read_model_config(source)
        if isinstance(known.get("layer_types"), list):
            changed["layer_types"] = known["layer_types"][:layers]
        if "max_position_embeddings" in known:
            changed["max_position_embeddings"] = max(known["max_position_embeddings"], self._positions)
        torch.manual_seed(0)
        settings = AutoConfig.from_pretrained(source, **changed)
        kind: Any = AutoModelForCausalLM
        model: Any = kind.from_config(settings, dtype=getattr(torch, self._config.model.dtype))
        _never_end(model, self._eos)
        model.generation_config.eos_token_id = list(self._eos)
        model.save_pretrained(path)
        return path

    def _make_prompts(self, block: MeasuredBlock) -> list[Tensor]:
        """Return a prompt for each row; the rows of a group share theirs."""
        size = 1 if block.name == LATER_TURN else self._config.schedule.n_samples_per_prompt
        tokens = [token for token in range(min(2**15, self._num_tokens())) if token not in self._eos]
        number = -(-block.rows // size)
        chosen = torch.randint(len(tokens), (number, block.prompt), generator=self._random)
        prompts_GP = torch.tensor(tokens)[chosen]
        return [prompts_GP[row // size] for row in range(block.rows)]

    def _make_batch(self, block: MeasuredBlock) -> Sequences:
        prompts = self._make_prompts(block)
        responses = torch.randint(self._num_tokens(), (block.rows, block.response), generator=self._random)
        return Sequences.from_turns(prompts, list(responses))

    def _num_tokens(self) -> int:
        self._vocabulary = self._vocabulary or int(read_model_config(Path(self._config.model.path))["vocab_size"])
        return self._vocabulary

    def _time_call(self, call: Callable[[], object]) -> float:
        wait_for_device(self._device)
        began = self._clock()
        call()
        wait_for_device(self._device)
        return self._clock() - began


_NEVER = threading.Event()


def _begin(engine: Any, prompts: Sequence[Tensor]) -> None:
    engine.submit(
        [
            GenerateRequest(row, prompt, seed=row, ticket=row, max_tokens=_DECODED + 1)
            for row, prompt in enumerate(prompts)
        ]
    )
    engine.step(_NEVER)


def _loss(log_probs_A: Tensor, entropy_A: Tensor) -> Tensor:
    return (log_probs_A - entropy_A.detach()).sum()


def _weights(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in weight_files(path) for name, value in load_file(file).items()}


@torch.no_grad()
def _never_end(model: Any, eos: tuple[int, ...]) -> None:
    """Set weights with which a model never generates an end token."""
    # Hidden states point along the ones, and the output rows of end tokens the other way. The rest is random: products
    # of zeros would draw less power and run faster.
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.1 / parameter.shape[-1] ** 0.5)
    model.get_input_embeddings().weight.add_(1.0)
    model.get_output_embeddings().weight[list(eos)] = -1.0


def describe(device: torch.device) -> dict[str, Any]:
    """Return the facts that tell devices apart."""
    cores = len(os.sched_getaffinity(0))
    found = {"kind": device.type, "cores": cores, "torch": str(torch.__version__)}
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"name": f"cpu, {_processor()}", **found, "memory_gb": round(memory / 1e9, 1)}
    memory = torch.accelerator.get_memory_info(device)[1]
    name = torch.get_device_module(device).get_device_name(0)
    return {"name": name, **found, "memory_gb": round(memory / 1e9, 1)}


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), os.uname().machine)


class Measuring:
    """What the command asks of the measuring process.

    Args:
        place: existing directory for models.
    """

    def __init__(self, kind: str, config: RunConfig, place: Path) -> None:
        self._kind, self._config, self._place = kind, config, place
        self._device = open_device(kind if kind == "cpu" else f"{kind}:0")
        self._group = contextlib.ExitStack()
        self._bench: Bench | None = None

    def describe(self) -> dict[str, Any]:
        """Return the device's description, and the number of ranks that its collectives would have."""
        return {"device": describe(self._device), "ranks": len(rank_devices(self._kind))}

    def seconds(self, block: Mapping[str, Any], longest: int) -> float:
        """Return the median time of a block (s). `longest` is the same for all blocks: see `Bench`."""
        if self._bench is None:
            torch.set_num_threads(self._config.launcher.threads_per_worker)
            self._group.enter_context(default_group(self._device))
            self._bench = Bench(self._config, self._device, self._place, longest=longest)
        return self._bench.measure_block(MeasuredBlock(**block))

    def close(self) -> None:
        """End the processes of the engine."""
        if self._bench is not None:
            self._bench.close()
        self._group.close()
