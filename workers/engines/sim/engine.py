"""Engines that sleep instead of computing: `rollout.engine: sim`, `actor.engine: sim`, `ref.engine: sim`.

A small machine stands in for a cluster: roles sleep as long as real ones would compute, while queue, weight transfer,
launcher, rows, versions and losses are real. Weights are a few tensors that every update changes, sharded over the
actor's ranks as FSDP2 does. A response's length is a pure function of (seed, row), so schedules can be compared sample
by sample.

Legend of shapes: R response tokens, A drawn tokens of a packed micro-batch.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.errors import BadRequest
from weightsync.plan import Box, Need
from workers.engines.base import (
    EngineSetup,
    GenerateRequest,
    Generation,
    LocalShard,
    LossFunction,
    SleepOrder,
    StepStats,
    WakePart,
)
from workers.engines.hf.export import SavedTensors
from workers.engines.sim.decode_times import Decoding, SimLengths
from workers.rows.packed_rows import Sequences
from workers.settings.sim import SimConfig

_TOKEN = 2
_ROWS = 64  # rows of each tensor of the model


def sim_shapes(config: SimConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes of the model's parameters by name."""
    return {f"sim.layers.{k}.weight": (_ROWS, -(-config.parameters // (8 * _ROWS))) for k in range(8)}


@dataclass
class _Running:
    """A running response. `first` is the decoding clock when its first token began."""

    request: GenerateRequest
    num_tokens: int
    first: float


class SimGenerateEngine:
    """Repeats one token, and ends with the request's first stop token unless cut; implements `SleepingGenerator`."""

    adopts_weights = True
    interruptible = True

    def __init__(
        self,
        config: SimConfig,
        lengths: SimLengths,
        *,
        num_slots: int,
        max_response_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = config
        self._lengths = lengths
        self._num_slots = num_slots
        self._longest = max_response_tokens
        self._decoding = Decoding(config.decode_s, now=clock())
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._swaps: list[tuple[float, int]] = []
        self._weights: Mapping[str, Tensor] = {}
        self._version = 0
        self._order = SleepOrder()

    @staticmethod
    def of_run(setup: EngineSetup) -> "SimGenerateEngine":
        run, sampling = setup.run, setup.sampling
        per_step = run.schedule.rollout_batch_size * run.schedule.n_samples_per_prompt
        return SimGenerateEngine(
            run.sim,
            SimLengths(run.sim, samples_per_step=per_step, seed=run.seed),
            num_slots=sampling.batch_size,
            max_response_tokens=sampling.max_response_tokens,
        )

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        moment = self._decoding.clock_at(self._clock())
        oldest = min((one.first for one in self._running.values()), default=moment)
        # Keep the swaps that running responses have lived through, and the last one before them.
        kept = [swap for swap in self._swaps if swap[0] > oldest]
        before = [swap for swap in self._swaps if swap[0] <= oldest][-1:]
        self._swaps = [*before, *kept, (moment, version)]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def free_slots(self) -> int:
        return self._num_slots - len(self._running)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start responses. Raises BadRequest for a stop string, since no text is drawn."""
        assert len(requests) <= self.free_slots
        if any(request.stop is not None for request in requests):
            raise BadRequest("the sim engine draws no text, so no stop string can end a response; leave `stop` out")
        now = self._clock()
        self._decoding.stall_responses(
            self._config.prefill_s_per_token * sum(each.prompt_P.numel() for each in requests), now
        )
        for request in requests:
            num_tokens = min(request.limit(self._longest), self._lengths.response_length(request.index))
            number = next(self._numbers)
            began = self._decoding.begin(number, self._config.decode_s(1) * num_tokens, now)
            self._running[number] = _Running(request, num_tokens, began)

    def step(self, wake: threading.Event) -> list[Generation]:
        """Sleep until a response ends or `wake` is set; return those that ended."""
        assert self._order.is_awake, "step() while the engine sleeps"
        if (end := self._decoding.next_end) is not None:
            wake.wait(max(0.0, end - self._clock()))
        return [self._make_generation(self._running.pop(number)) for number in self._decoding.take_ended(self._clock())]

    def cancel(self, ticket: int) -> None:
        for number in [number for number, one in self._running.items() if one.request.ticket == ticket]:
            del self._running[number]
            self._decoding.cancel_response(number, self._clock())

    def abort(self) -> None:
        self._running.clear()
        self._decoding = Decoding(self._config.decode_s, now=self._clock())
        if not self._order.is_awake:
            self._decoding.pause(self._clock())
        self._swaps.clear()

    def sleep(self) -> None:
        if self._order.note_sleep():
            self._decoding.pause(self._clock())
            self._weights = {}
            time.sleep(self._config.switch_s / 2)

    def wake(self, *parts: WakePart) -> None:
        """Allocate; with the last part, compute the prompts and tokens of what runs again, in simulated time."""
        for part in parts:
            if self._order.note_wake(part) and self._order.is_awake:
                time.sleep(self._config.switch_s / 2)
                now = self._clock()
                self._decoding.resume(now)
                drawn = self._decoding.clock_at(now) * len(self._running) - sum(
                    one.first for one in self._running.values()
                )
                num_tokens = drawn / max(1e-9, self._config.decode_s(1)) + sum(
                    one.request.prompt_P.numel() for one in self._running.values()
                )
                self._decoding.stall_responses(self._config.prefill_s_per_token * num_tokens, now)

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        self._order.note_loaded()
        self._weights = weights if adopt else {name: tensor.clone() for name, tensor in weights.items()}

    def weight_needs(self) -> Mapping[str, Need]:
        return _needs(self._config)

    def close(self) -> None:
        """Nothing to release."""

    def _make_generation(self, one: _Running) -> Generation:
        size, stop_ids = one.num_tokens, one.request.stop_ids
        truncated = size < self._lengths.response_length(one.request.index)
        response_R = torch.full((size,), next(token for token in itertools.count(_TOKEN) if token not in stop_ids))
        if stop_ids and not truncated:
            response_R[-1] = stop_ids[0]
        versions_R = torch.full((size,), self._swaps[0][1] if self._swaps else self._version, dtype=torch.int32)
        for moment, version in self._swaps:
            drawn = (moment - one.first) / max(1e-9, self._config.decode_s(1))
            versions_R[min(size, max(0, int(drawn))) :] = version
        return Generation(
            index=one.request.index,
            response_R=response_R,
            log_probs_R=torch.full((size,), -1.0),
            versions_R=versions_R,
            truncated=truncated,
            ticket=one.request.ticket,
        )


class SimFrozenModel:
    """Returns the log-probabilities of the generation engine; implements `FrozenEngine` and `Sleeper`."""

    adopts_weights = True

    def __init__(self, config: SimConfig, *, s_per_token: float) -> None:
        self._config = config
        self._s_per_token = s_per_token
        self._weights: Mapping[str, Tensor] = {}

    @staticmethod
    def of_run(setup: EngineSetup) -> "SimFrozenModel":
        return SimFrozenModel(setup.run.sim, s_per_token=setup.run.sim.ref_s_per_token)

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        self._weights = weights if adopt else {name: tensor.clone() for name, tensor in weights.items()}

    def weight_needs(self) -> Mapping[str, Need]:
        return _needs(self._config)

    def read_weights(self, weights_dir: Path) -> None:
        self._weights = load_file(weights_dir / "model.safetensors")

    def save_weights(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self._weights.items()}, target / "model.safetensors")

    def log_probs(self, batch: Sequences) -> Tensor:
        """Return float32 [A] after the simulated time."""
        return _log_probs(self._s_per_token, batch)

    def sleep(self) -> None:
        """Nothing to free, and no time of its own: it sleeps with the trainer."""

    def wake(self) -> None:
        """Nothing to bring back."""


class SimTrainEngine:
    """Changes its parameters with every update; implements `TrainEngine` and `SleepingTrainer`. `lr` is only reported.

    Building it is collective over the actor's default group.
    """

    def __init__(self, config: SimConfig, *, lr: float) -> None:
        self._config = config
        self._lr = lr
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._step = torch.zeros((), dtype=torch.int64)
        self._shards = []
        for name, shape in sim_shapes(config).items():
            start, stop = (shape[0] * k // num_ranks for k in (rank, rank + 1))
            values = torch.zeros(stop - start, shape[1])
            self._shards.append(LocalShard(name, shape, Box.rows(shape, start, stop), values))
        self._asleep = False

    @staticmethod
    def of_run(setup: EngineSetup) -> "SimTrainEngine":
        return SimTrainEngine(setup.run.sim, lr=setup.run.actor.lr)

    @property
    def optimizer_updates(self) -> int:
        return int(self._step)

    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A] after the simulated time; None: this rank has no rows."""
        return torch.empty(0) if batch is None else _log_probs(self._config.policy_forward_s_per_token, batch)

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        """Compute the real loss, and sleep for the rest of the simulated time."""
        if batch is None:
            return
        began, num_tokens = time.monotonic(), batch.num_drawn
        log_probs = torch.full((num_tokens,), -1.0, requires_grad=True)
        loss(log_probs, torch.zeros(num_tokens)).backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, self._config.train_s_per_token * num_tokens - (time.monotonic() - began)))

    def step(self, scale: float) -> StepStats:
        """Wait for all ranks, then change all weights."""
        dist.barrier()
        time.sleep(self._config.optimizer_s)
        self._step += 1
        self._set_weights()
        return StepStats(grad_norm=scale, lr=self._lr)

    def zero_grad(self) -> None:
        """Nothing accumulates."""

    def sleep(self) -> None:
        self._switch(asleep=True)

    def wake(self) -> None:
        self._switch(asleep=False)

    @property
    def resident_bytes(self) -> int:
        return 0 if self._asleep else sum(shard.values.nbytes for shard in self._shards)

    def _switch(self, *, asleep: bool) -> None:
        if self._asleep != asleep:
            self._asleep = asleep
            time.sleep(self._config.switch_s / 2)
            dist.barrier()

    def shards(self) -> Iterable[LocalShard]:
        return self._shards

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, which determines the weights."""
        return {"sim": {"step": self._step}, "optimizer_updates": self._step.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["sim"]["step"]
        self._set_weights()

    def export_hf(self, target: Path, saved: Path) -> None:
        """Write the weights of a saved state as safetensors."""
        target.mkdir(parents=True, exist_ok=True)
        step = float(SavedTensors(saved).read("sim.step"))
        values = {
            name: torch.full(shape, step + k / 16) for k, (name, shape) in enumerate(sim_shapes(self._config).items())
        }
        save_file(values, target / "model.safetensors")

    def _set_weights(self) -> None:
        for number, shard in enumerate(self._shards):
            shard.values.fill_(float(self._step) + number / 16)


def _log_probs(s_per_token: float, batch: Sequences) -> Tensor:
    num_tokens = batch.num_drawn
    time.sleep(s_per_token * num_tokens)
    return torch.full((num_tokens,), -1.0)


def _needs(config: SimConfig) -> dict[str, Need]:
    return {name: Need(shape) for name, shape in sim_shapes(config).items()}
