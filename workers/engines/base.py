"""The engine protocols and the types they exchange. A role's loop knows only these, never which engine runs.

Legend of shapes: N samples, P prompt tokens, R response tokens, T tokens of a packed micro-batch (its samples back to
back, no padding), A drawn tokens of a packed micro-batch: those that the policy drew and that are trained.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from asyncflow.errors import BadRequest, ConfigError
from weightsync.plan import Box, Need
from workers.data.model_files import max_positions
from workers.engines.stop_strings import Stopped, StopStrings
from workers.rows.packed_rows import Sequences, TokenSets, TopTokens
from workers.settings.engines import ActorConfig, TrainingConfig
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from weightsync.sender import Shard
    from workers.checkpoint.saved_shards import ExportShare


@dataclass(frozen=True)
class GenerateRequest:
    """One response to generate."""

    index: int  # global row index
    prompt_P: Tensor  # int64 [P]
    seed: int  # of this response; the same seed gives the same draws whatever else is in the batch
    ticket: int = 0  # distinguishes requests of one caller: a lost row may be requested again
    max_tokens: int | None = None  # longest response; None: `rollout.max_response_tokens`, which is also the maximum
    # Tokens that end the response besides the model's own; the drawn one is part of the response.
    stop_ids: tuple[int, ...] = ()
    # Strings that end it. An engine may ignore them, at the cost of wasted draws: the caller cuts the response.
    stop: StopStrings | None = None

    def limit(self, max_response_tokens: int) -> int:
        """Return the longest response (tokens) in a run with this `rollout.max_response_tokens`."""
        return max_response_tokens if self.max_tokens is None else min(self.max_tokens, max_response_tokens)

    @property
    def signed_seed(self) -> int:
        """The seed as a signed 64-bit integer, for engines that need one."""
        return self.seed % 2**63


@dataclass(frozen=True)
class Generation:
    """One finished response."""

    index: int  # the request's, like `ticket`
    response_R: Tensor  # int64 [R], including the end-of-sequence or stop token if one was produced
    # float32 [R], natural log under the tempered distribution: before top-p and top-k or, with `kept`, after them
    log_probs_R: Tensor
    versions_R: Tensor  # int32 [R], step of the weights that drew each token
    truncated: bool  # cut at the request's limit
    ticket: int = 0
    kept: TokenSets | None = None  # what each token was drawn from, with `rollout.keep_sampling_mask`
    top: TopTokens | None = None  # the likeliest tokens where each was drawn, with `EngineSetup.num_top_log_probs`

    def until(self, stop: StopStrings | None) -> "tuple[Generation, Stopped | None]":
        """Return the response cut after the token that completes a stop string, and that stop; or whole, and None."""
        stopped = None if stop is None else stop.stopped(self.response_R.tolist())
        if stopped is None:
            return self, None
        number = stopped.num_tokens
        kept = replace(
            self,
            response_R=self.response_R[:number],
            log_probs_R=self.log_probs_R[:number],
            versions_R=self.versions_R[:number],
            truncated=False,
            kept=None if self.kept is None else self.kept.part(0, number),
            top=None if self.top is None else self.top.part(0, number),
        )
        return kept, stopped

    @staticmethod
    def of(
        request: GenerateRequest,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        truncated: bool,
    ) -> "Generation":
        """Return the response to a request from one log-probability and version per token."""
        return Generation(
            index=request.index,
            response_R=torch.tensor(tokens, dtype=torch.int64),
            log_probs_R=torch.tensor(log_probs, dtype=torch.float32),
            versions_R=torch.tensor(versions, dtype=torch.int32),
            truncated=truncated,
            ticket=request.ticket,
        )


class GenerateEngine(Protocol):
    """Generates many responses at a time with the most recently loaded weights. Used by one thread.

    submit(requests) -> step() ... step() -> finished responses, each as soon as it ends
                load_weights() between steps: while nothing runs, or at any time if the engine is `interruptible`
    close()
    """

    # Step of the loaded weights, stamped on tokens drawn from now on; set by the caller of `load_weights`.
    version: int

    @property
    def interruptible(self) -> bool:
        """Whether weights may be loaded while responses run, which then continue with the new ones."""

    @property
    def adopts_weights(self) -> bool:
        """Whether `load_weights` can use the given tensors in place instead of copying them."""

    @property
    def num_running(self) -> int:
        """Responses that were submitted and have not finished."""

    @property
    def free_slots(self) -> int:
        """How many responses may be submitted now."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start at most `free_slots` responses. Raises BadRequest if a prompt is empty, leaves no room for its
        response, or has tokens unknown to the model; nothing was started. See `check_request`."""

    def step(self, wake: threading.Event) -> list[Generation]:
        """Run until responses finish, a token was drawn, or `wake` is set; return those that finished."""

    def cancel(self, ticket: int) -> None:
        """Drop the running request with this ticket, if any, and free its slot. Other requests are not disturbed."""

    def abort(self) -> None:
        """Drop all running requests."""

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (HF names) and drop cached keys and values, except those of running responses.

        No token is drawn between this call and the next `submit` or `step`, so the caller can set `version`.

        Args:
            weights: of the model's shapes; other element types are cast. Their memory is overwritten after this
                returns, so a device must have read it by then (no `non_blocking` copy without synchronizing).
            adopt: the caller leaves the tensors unchanged until the next call ends, so an engine may use them directly.
        """

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what `load_weights` needs, by HF name; tied weights once."""

    def close(self) -> None:
        """Free processes and device memory; idempotent. No other method may be called afterwards."""


@runtime_checkable
class ResamplingEngine(GenerateEngine, Protocol):
    """A generating engine that can draw in several ways, one after the other: for sets of held-out prompts."""

    def use_sampling(self, sampling: SamplingConfig) -> None:
        """Draw by the temperature, top-p and top-k of `sampling` from the next `submit` on; called while nothing runs.

        An engine that was made to draw in another way may report log-probabilities of another temperature.
        """


# Engines of sides that share devices and take turns (`roles: rollout+actor`). A side that sleeps has no device memory.
#
#     generator   sleep() ................ wake(WEIGHTS) -> load_weights() -> wake(KV_CACHE) -> step()
#     trainer             wake() ... step, publish ....................... sleep()


class WakePart(StrEnum):
    """A part of a generator's device memory, which can be allocated again alone."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@runtime_checkable
class SleepingGenerator(GenerateEngine, Protocol):
    """A generating engine that can free its device memory between two steps.

    While any part is asleep, `submit`, `cancel` and `abort` work as usual; `step` may not be called.
    """

    def sleep(self) -> None:
        """Free device memory: weights and KV cache. It may be half awake, or asleep already.

        Running responses keep their tokens and versions, and continue after `wake`. Their keys and values are computed
        again with the weights that are loaded by then, whatever `rollout.on_swap` says.
        """

    def wake(self, *parts: WakePart) -> None:
        """Allocate memory again. The weights are lost: `load_weights` must be called between WEIGHTS and KV_CACHE."""


@runtime_checkable
class Sleeper(Protocol):
    """A model that a trainer hosts, such as its reference, and that sleeps when the trainer does."""

    def sleep(self) -> None:
        """Move all state to page-locked host memory and free the device's; does nothing if it sleeps. Collective over
        the ranks that hold the model. Until `wake`, no other method may be called."""

    def wake(self) -> None:
        """Bring the state back, bit for bit; does nothing if it is awake. Collective."""


class SleepOrder:
    """Which parts of a generator sleep. Asserts that they wake in order; a helper for implementations of
    `SleepingGenerator`."""

    def __init__(self) -> None:
        self._asleep: set[WakePart] = set()
        self._loaded = True

    @property
    def is_awake(self) -> bool:
        return not self._asleep

    def note_sleep(self) -> bool:
        """Return whether anything was awake."""
        awake = len(self._asleep) < len(WakePart)
        self._asleep.update(WakePart)
        self._loaded = False
        return awake

    def note_wake(self, part: WakePart) -> bool:
        """Return whether the part slept."""
        if part is WakePart.KV_CACHE:
            assert self._loaded, "the KV cache wakes after load_weights(): the weights were lost"
        slept = part in self._asleep
        self._asleep.discard(part)
        return slept

    def note_loaded(self) -> None:
        assert WakePart.WEIGHTS not in self._asleep, "load_weights() comes after wake(WakePart.WEIGHTS)"
        self._loaded = True


@runtime_checkable
class ScoringEngine(Protocol):
    """A `GenerateEngine` that gives log-probabilities of given tokens, so that its weights can be proven by numbers."""

    def prompt_log_probs(self, tokens_T: Tensor) -> Tensor | None:
        """Return float32 [C, T - 1]: what each of its C copies of the loaded weights gives each token after the first,
        under the tempered distribution; None: the engine cannot say under its settings.

        Called between `load_weights` and the next `step`; running responses are not disturbed. `tokens_T` is int64 [T]
        in host memory, shorter than a prompt with its response may be.
        """


@runtime_checkable
class ChecksummedEngine(Protocol):
    """A `GenerateEngine` that can read back the weights that it computes with, so that they are proven bit by bit."""

    def weight_checksums(self) -> Mapping[str, "HeldChecksum"]:
        """Return the checksums of the weights that it holds now, by the names of `weight_needs`; only those that it can
        read back. Called between `load_weights` and the next `step`."""


@dataclass(frozen=True)
class HeldChecksum:
    """The checksum of a whole tensor as an engine holds it."""

    dtype: str  # element type that it is held in, e.g. `bfloat16`
    checksum: int  # `weightsync.checksums.tensor_checksum`, modulo 2**64


def check_request(
    request: GenerateRequest, *, vocab_size: int, max_length: int | None, max_response_tokens: int
) -> None:
    """Raise BadRequest for a request that the model cannot answer, see `GenerateEngine.submit`.

    `max_length` is the longest prompt plus response (tokens): the model's positions, or fewer; None: no limit.
    """
    prompt_P, limit = request.prompt_P, request.limit(max_response_tokens)
    if not prompt_P.numel():
        raise BadRequest(f"the prompt of row {request.index} has no tokens")
    if limit < 1:
        raise BadRequest(f"max_tokens of row {request.index} is {limit}; a response has at least 1 token")
    if max_length is not None and prompt_P.numel() + limit > max_length:
        raise BadRequest(
            f"the prompt of row {request.index} has {prompt_P.numel()} tokens and its response up to {limit}; the "
            f"engine has positions for {max_length} together; lower data.max_prompt_tokens or the response's max_tokens"
        )
    lowest, highest = int(prompt_P.min()), int(prompt_P.max())
    if lowest < 0 or highest >= vocab_size:
        unknown = lowest if lowest < 0 else highest
        raise BadRequest(f"the prompt of row {request.index} has token {unknown}; the model has {vocab_size} tokens")


def generate(engine: GenerateEngine, requests: Sequence[GenerateRequest]) -> Iterator[Generation]:
    """Yield the responses to all requests, each as soon as it finishes, in any order."""
    waiting, never = deque(requests), threading.Event()
    while waiting or engine.num_running:
        number = min(engine.free_slots, len(waiting))
        if number:
            engine.submit([waiting.popleft() for _ in range(number)])
        yield from engine.step(never)


def check_sequences(batch: Sequences, *, vocab_size: int) -> None:
    """Refuse a batch (in host memory) that no model can compute; on accelerators it would kill the process. Raises
    BadRequest if there are no samples, lengths do not match, a sample begins with a drawn token (nothing predicts
    it), or a token is unknown."""
    if not len(batch.lengths_N):
        raise BadRequest("a micro-batch has no samples; a rank without rows passes None")
    if int(batch.lengths_N.sum()) != len(batch.tokens_T):
        raise BadRequest(f"a micro-batch has {len(batch.tokens_T)} tokens, its samples {int(batch.lengths_N.sum())}")
    if len(batch.response_mask_T) != len(batch.tokens_T):
        raise BadRequest(
            f"a micro-batch has {len(batch.tokens_T)} tokens, its response mask {len(batch.response_mask_T)}"
        )
    shortest = int(batch.lengths_N.argmin())
    if int(batch.lengths_N[shortest]) < 1:
        raise BadRequest(f"sample {shortest} of a micro-batch has {int(batch.lengths_N[shortest])} tokens")
    sample = int(batch.prompt_lengths.argmin())
    if not int(batch.prompt_lengths[sample]):
        raise BadRequest(f"sample {sample} of a micro-batch begins with a drawn token; it needs one before it")
    ids = [batch.tokens_T]
    assert batch.others is None or batch.kept is None, "a batch has no sets of two kinds"
    sets = batch.kept if batch.others is None else batch.others
    if sets is not None:
        num_ids = len(sets.ids_P)
        if len(sets.counts_A) != batch.num_drawn or int(sets.counts_A.sum()) != num_ids:
            raise BadRequest(
                f"a micro-batch has {batch.num_drawn} drawn tokens, but sets of {num_ids} other tokens for "
                f"{len(sets.counts_A)}"
            )
        if batch.kept is not None and not bool(batch.kept.contains(batch.tokens_T[batch.response_mask_T.bool()]).all()):
            raise BadRequest("a micro-batch has a token that is not among those that it was drawn from")
        ids += [sets.ids_P] if num_ids else []
    lowest, highest = min(int(each.min()) for each in ids), max(int(each.max()) for each in ids)
    if lowest < 0 or highest >= vocab_size:
        unknown = lowest if lowest < 0 else highest
        raise BadRequest(f"a micro-batch has token {unknown}; the model has {vocab_size} tokens")


@dataclass(frozen=True)
class StepStats:
    """Figures of one optimizer update."""

    grad_norm: float  # global L2 norm of the scaled gradient before clipping
    lr: float
    clipped: bool = False  # the norm exceeded `grad_clip`


@dataclass(frozen=True)
class LocalShard:
    """The part of one tensor that this rank holds."""

    name: str  # HF name
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    values: Tensor  # view on this rank's device; any shape and strides, with the box's row-major order


class FrozenEngine(Protocol):
    """A model that is not trained. Ranks that share it must all make the same calls with the same batch."""

    @property
    def adopts_weights(self) -> bool:
        """See `GenerateEngine`."""

    def log_probs(self, batch: Sequences) -> Tensor:
        """Return float32 [A]: log-probabilities of the drawn tokens under the tempered distribution."""

    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Replace all weights (HF names); `adopt`: see `GenerateEngine`."""

    def read_weights(self, weights_dir: Path) -> None:
        """Replace all weights with those of safetensors files."""

    def weight_needs(self) -> Mapping[str, Need]:
        """Return what `load_weights` needs, by HF name; tied weights once."""

    def save_weights(self, target: Path) -> None:
        """Create a directory and write the weights there as safetensors, in their own element type."""


@runtime_checkable
class TopTokensEngine(FrozenEngine, Protocol):
    """A `FrozenEngine` that also gives a distribution's most likely tokens."""

    def top_log_probs(self, batch: Sequences, k: int, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the K most likely of the first `num_tokens` tokens where each drawn token was drawn, int32 [A, K],
        most likely first, and their log-probabilities under the whole tempered distribution, float32 [A, K]; K is
        smaller than `k` if there are fewer tokens."""


class TrainedEngine(Protocol):
    """Common to all training engines; all methods but `zero_grad` are collective over the ranks that hold the model."""

    @property
    def optimizer_updates(self) -> int:
        """How many times `step` was called for these weights; part of `state_dict`."""

    def forward_backward(self, batch: Sequences | None, loss: Callable[..., Tensor]) -> None:
        """Accumulate gradients of `loss`. None: this rank has no rows and only joins the collectives.
        Raises BadRequest, see `check_sequences`; before any collective."""

    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over ranks) by `scale`, clip, update, and clear them."""

    def zero_grad(self) -> None:
        """Drop accumulated gradients, when the current step is abandoned."""

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and schedule state for torch.distributed.checkpoint (load in place, then call
        `load_state_dict`). Its tensors are views that only `step` and `load_state_dict` change."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@runtime_checkable
class SleepingTrainer(TrainedEngine, Sleeper, Protocol):
    """A training engine that can free its device memory between two calls, also in the middle of a step; with its
    copies of the policy, if it has any."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of state on this rank's device now. Runs do not ask; the conformance suite does."""


# (log_probs_A, entropy_A) -> scalar sum of the loss, not normalized; both arguments may carry gradients. For a batch
# with `Sequences.others` a third argument has their log-probabilities, [P], with gradient.
LossFunction = Callable[..., Tensor]


@runtime_checkable
class DivisibleLoss(Protocol):
    """A `LossFunction` that may be a sum over samples, so that an engine can evaluate it for some of them at a time."""

    def cut_loss(self, sizes: Sequence[tuple[int, int]]) -> Sequence[LossFunction] | None:
        """Return the losses of neighbouring samples, whose sum is the whole; None: it is not a sum over samples.

        `sizes` are samples and drawn tokens of each part, in order.
        """


@runtime_checkable
class PipelinedEngine(Protocol):
    """A `TrainedEngine` whose `forward_backward` returns before the loss was called."""

    def finish_micro_batches(self) -> None:
        """Complete the gradients of all micro-batches so far; every rank has called each loss then. Collective."""


class TrainEngine(TrainedEngine, Protocol):
    """Trains the policy with a `LossFunction`; `shards` and `export_hf` are not collective."""

    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]: log-probabilities of the drawn tokens, without gradient.

        None: this rank has no rows, only joins the collectives, and gets [0]. Raises BadRequest before any collective,
        see `check_sequences`.
        """

    def shards(self) -> "Iterable[Shard]":
        """Return this rank's pieces of all parameters, in a fixed order; views, so copy them before the next `step`.
        With `lora`, those that `weightsync.lora` names (`workers.engines.lora`)."""

    def export_hf(self, target: Path, saved: Path) -> None:
        """Write a saved state as a Hugging Face directory (safetensors, config, tokenizer), creating `target`.

        Runs on one rank, in any thread, while training continues; a stop does not wait for it. `saved` is where
        torch.distributed.checkpoint wrote a `state_dict`.
        """


class PolicyCopy(Protocol):
    """Other weights of the policy, in the trainer's layout; collective over the actor's ranks."""

    def take(self) -> None:
        """Copy the policy's current weights."""

    def log_probs(self, batch: Sequences | None) -> Tensor:
        """Like `TrainEngine.log_probs`, under the copy's weights; for equal weights and batches bitwise equal to it."""


@runtime_checkable
class RankedExportEngine(TrainEngine, Protocol):
    """A training engine whose ranks write an export together, each its own bytes, and stop when they are told to."""

    def export_share(self, target: Path, saved: Path, share: "ExportShare") -> bool:
        """Write a share of `export_hf`; not collective. Returns whether it is complete and durable; False:
        `share.stop` said so."""


@runtime_checkable
class CopyingEngine(TrainEngine, Protocol):
    """A training engine that can keep copies of its policy."""

    def open_copy(self, *, initial: bool = False) -> PolicyCopy:
        """Return a copy without weights or, with `initial`, with those of the initial model; collective."""


ValueLossFunction = Callable[[Tensor], Tensor]  # values_A -> scalar sum of the loss, not normalized


class ValueEngine(TrainedEngine, Protocol):
    """Trains a critic with a `ValueLossFunction`."""

    def values(self, batch: Sequences | None) -> Tensor:
        """Return float32 [A]: the expected return before each drawn token, without gradient; None: no rows."""


# How an engine is constructed: `Class(setup)` for classes outside the package; built-in ones have `of_run(setup)`.
#
#     class MyEngine:                              # rollout.engine: my_module:MyEngine
#         class Config(Settings): ...              # rollout.engine_options; omit it if there are none
#         def __init__(self, setup: EngineSetup) -> None: ...
#
# The class must also implement one of the protocols above: `GenerateEngine`, `TrainEngine`, `FrozenEngine`.
# A generating engine that takes adapters (`EngineSetup.adapter`) says so by a class attribute `takes_adapters = True`.
# Its `Config` may have a method `check(run)`, which is called before anything starts and raises `ConfigError` if other
# settings of the run do not fit.


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is constructed from."""

    run: RunConfig
    device: torch.device
    options: Any  # for a class outside the package: an instance of its `Config`
    sampling: SamplingConfig  # the rollout's, or an evaluation's, which differs
    weights_dir: Path | None = None  # of a reference: holds its weights as safetensors; None: the model's own
    follows_policy: bool = True  # whether it gets versions of the policy; False: a model that stays the same
    other_model: str | None = None  # of a reference that is another model; None: the policy's

    @property
    def model_dir(self) -> Path:
        return Path(self.other_model or self.run.model.path)

    @property
    def adapter(self) -> LoraConfig | None:
        """What versions of the weights are: adapters of this kind, on the model's own files; None: whole weights."""
        return self.run.lora if self.run.sends_adapter and self.follows_policy else None

    @property
    def num_top_log_probs(self) -> int:
        """How many of the likeliest tokens each response reports where it draws one (`Generation.top`)."""
        return self.run.algorithm.num_top_log_probs if self.sampling is self.run.rollout else 0

    @property
    def takes_turns(self) -> bool:
        """Whether the engine has its device only at times."""
        is_evaluation = self.sampling is not self.run.rollout
        return self.run.is_colocated and (not is_evaluation or "evaluate" in self.run.colocated)

    @property
    def actor(self) -> ActorConfig:
        """How the policy is trained, with the learning-rate schedule resolved for this run."""
        return self.run.actor.for_run(self.run.steps, begins_after=self.run.critic_only_steps)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt of a call (tokens); in later turns the prompt includes all earlier ones.
        Raises ConfigError if the model does not say how many positions it has."""
        if not self.run.rollout.is_own:
            return self.run.data.max_prompt_tokens
        context = longest_call(self.run, self.sampling)
        if context is None:
            raise ConfigError(
                "rollout.max_context_tokens: 0, but config.json does not say how many positions the model has; set it"
            )
        return context - self.sampling.max_response_tokens


def longest_call(run: RunConfig, sampling: SamplingConfig) -> int | None:
    """Return the longest prompt plus reply (tokens) of one turn of a user's rollout; None: no limit is known."""
    limits = max_positions(Path(run.model.path)), run.vllm.max_model_len if sampling.engine == "vllm" else None
    return run.rollout.max_context_tokens or min((limit for limit in limits if limit is not None), default=None)


# The optimizer updates of a training engine: count, learning rate and clipping.
#
#     engine.step(scale)    norm of the gradients -> Updates.next -> factor for them, learning rate -> optimizer
#
# Called by the training engines; touches no gradients itself.

logger = logging.getLogger(__name__)

_EPS = 1e-6  # added to the norm, as in `torch.nn.utils.clip_grad_norm_`


class Updates:
    """Counts updates, and the steps that they complete, across resumes."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._loaded = (0, 0)  # steps and updates of the loaded state
        self.number = 0  # updates that these weights have received

    @property
    def num_steps(self) -> int:
        """Complete steps, by which warm-up counts. A resume may change how many updates make a step."""
        steps, updates = self._loaded
        return steps + (self.number - updates) // self._config.num_updates

    def next(self, norm: float, scale: float) -> tuple[float | None, StepStats]:
        """Count the next update; return the total factor on the gradients, and the update's figures.

        `norm` is the global L2 norm of the accumulated gradients, `scale` the caller's factor. A factor of None: the
        gradients are not finite, and no weight may change.
        """
        clip, length = self._config.grad_clip, abs(scale) * norm
        clipped = clip is not None and length > clip
        stats = StepStats(length, learning_rate(self._config, self.num_steps + 1), clipped=clipped)
        self.number += 1
        if not math.isfinite(stats.grad_norm):
            logger.warning("update %d skipped: its gradient norm is %s", self.number, stats.grad_norm)
            return None, stats
        return scale if clip is None else scale * min(1.0, clip / (length + _EPS)), stats

    def state_dict(self) -> dict[str, Tensor]:
        return {"num_steps": torch.tensor(self.num_steps), "optimizer_updates": torch.tensor(self.number)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.number = int(state["optimizer_updates"])
        self._loaded = int(state["num_steps"]), self.number


def decay(weights: Sequence[Tensor], config: TrainingConfig, lr: float) -> None:
    """Shrink weights as AdamW does before its update (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2)."""
    # Done here rather than by the optimizer, whose parameter groups would otherwise become part of checkpoints.
    if config.weight_decay and weights:
        torch._foreach_mul_(list(weights), 1 - lr * config.weight_decay)


def decays(parameter: Tensor) -> bool:
    """Return whether a parameter decays: norms and biases, which are one-dimensional, do not."""
    return parameter.dim() > 1


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate for all updates of step `step`, which counts from 1."""
    #     lr     ______                         warm-up      linear from lr / N to lr over the first N steps
    #           /      \.                       constant     lr
    #          /         '.  cosine             linear       a straight line down to lr_min_ratio x lr
    #         /  linear    '-.____ least        cosine       half a cosine down to it
    #         0  N             decay_steps
    #
    # Source of the cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983), eq. 5, without restarts.
    if step < config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert config.lr_decay_steps, "settings of an engine come from TrainingConfig.for_run"
    first = max(1, config.lr_warmup_steps)
    done = min(1.0, max(0.0, (step - first) / max(1, config.lr_decay_steps - first)))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)
