"""The default generation engine: a transformers model, our own decode loop, and continuous batching.

    submit ... step: queued responses enter, every running one gets a token -> finished ones leave; submit ...

A step is one forward pass over one packed sequence without padding: the distinct prompts that enter, plus the newest
token of every running response. Keys and values live in lanes (`Lane`). A sampled token depends only on the request's
seed and its position in the response: the random numbers are drawn up front, and each token inverts the cumulative
distribution at its number. The rollout role calls this engine; it knows nothing of queues.

Legend of shapes: S slots (responses at a time), M most response tokens, B responses that get a token in a step, T
tokens of a step, V vocabulary, U rows of logits.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncflow.device import free_cached_memory
from asyncflow.errors import ConfigError
from weightsync.checksums import tensor_checksum
from workers.data.model_files import eos_token_ids, max_positions
from workers.engines.base import EngineSetup, GenerateRequest, Generation, HeldChecksum, WakePart
from workers.engines.hf.lanes import KeyShape, Lane, alike
from workers.engines.hf.model import (
    DTYPES,
    CheckedEngine,
    empty_causal_lm,
    loadable_parameters,
    materialize,
    replace_weights,
)
from workers.engines.packed_attention import alike_attention
from workers.engines.packed_forward import use_float32_logits
from workers.rows.packed_rows import TokenSets, TopTokens
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

# Attention of one generation step, registered in transformers' attention interface.
#
# A step is one packed sequence [1, T] without padding: first the documents that enter (each causal in itself, sorted by
# length so that documents of equal length form a view), then one token of every running response, which sees its lane.
#
#     T   prompt A  prompt B  prompt C   responses of lane 0   responses of lane 1
#
# Prompts and responses therefore share each matrix product, which reads the weights once; a step without new documents
# holds responses only. The query heads of one key head are the rows of one small product, so grouped-query attention
# does not repeat keys.
#
# Legend of shapes: T tokens of the step, H query heads, J key heads, D head dimension, N rows, P tokens of a document.

# Name in transformers' attention interface. No mask function is registered under it, so transformers builds no mask.
STEP_ATTENTION = "asyncflow_step"


@dataclass(frozen=True)
class LaneEntry:
    """The lane rows that receive a document's keys and values."""

    lane: Lane
    rows: slice


@dataclass(frozen=True)
class LengthBucket:
    """Documents of one length, and where the keys and values of each go."""

    length: int
    entries: tuple[LaneEntry, ...]

    @property
    def num_tokens(self) -> int:
        return self.length * len(self.entries)


@dataclass(frozen=True)
class StepPlan:
    """The documents and responses of a step; passed to the model as the keyword argument `step_plan`."""

    buckets: tuple[LengthBucket, ...]  # in sequence order
    # Per lane, how many of its first rows get a token, and the mask added to their scores.
    running: tuple[tuple[Lane, int, Tensor | None], ...]


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step_plan: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attend, and store the keys and values; query [1, H, T, D] -> [1, T, H, D], and no attention weights.

    The signature is that of transformers' attention functions; see `packed_attention`. Raises ConfigError if the model
    caps its scores (`softcap`) or has attention sinks (`s_aux`), which SDPA does not support.
    """
    assert attention_mask is None, "a step got a mask"
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            "model.path: the hf engine does not support capped scores or attention sinks; set another rollout.engine"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q_HTD, k_JTD, v_JTD = query[0], key[0], value[0]
    outputs, begin = [], 0
    for bucket in step_plan.buckets:
        end = begin + bucket.num_tokens
        q_NHPD, k_NJPD, v_NJPD = (
            torch.unflatten(each[:, begin:end], 1, (-1, bucket.length)).transpose(0, 1)
            for each in (q_HTD, k_JTD, v_JTD)
        )
        outputs.append(alike_attention(q_NHPD, k_NJPD, v_NJPD, scaling, sliding_window))
        for entry in bucket.entries:
            behind = begin + bucket.length
            entry.lane.write_tokens(layer, entry.rows, k_JTD[:, begin:behind], v_JTD[:, begin:behind])
            begin = behind
    for lane, num_rows, mask in step_plan.running:
        end = begin + num_rows
        keys, values = lane.append(
            layer, k_JTD[:, begin:end].transpose(0, 1), v_JTD[:, begin:end].transpose(0, 1), sliding_window
        )
        # G query heads per key head: SDPA sees them as query positions of one head, so keys are read once.
        q_NJGD = q_HTD[:, begin:end].reshape(keys.shape[1], -1, num_rows, q_HTD.shape[2]).permute(2, 0, 1, 3)
        seen = None if mask is None else mask[..., -keys.shape[2] :]
        out_NJGD = scaled_dot_product_attention(q_NJGD, keys, values, attn_mask=seen, scale=scaling)
        outputs.append(out_NJGD.flatten(1, 2))
        begin = end
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


AttentionInterface.register(STEP_ATTENTION, step_attention)


# Which tokens the next step of the `hf` engine computes: responses that enter, responses that run, and their places.
#
# A response enters with all its tokens, so one whose keys and values were dropped (new weights) re-enters like a new
# one, and its next draw is the same either way. Responses to one prompt that enter together form one document; the keys
# of the newest prompts are kept for responses of the same group that get a slot later.
#
# Legend of shapes: U rows of logits, V vocabulary, L layers, J key heads, P tokens of a prompt, D head dimension.

# Most document tokens that enter in one step, unless a single document is longer. Bounds memory, and how long running
# responses wait.
MAX_ENTERING_TOKENS = 4096
# Responses start in group order, so only the newest prompts can still have responses to come.
_KEPT_PROMPTS = 2


@dataclass
class RunningResponse:
    """A response that is entering or running."""

    request: GenerateRequest
    slot: int  # its row in the engine's tensors
    tokens: list[int]  # prompt and response
    kept: list[Tensor] = field(default_factory=list)  # int32, what each token was drawn from, if that is kept
    # The likeliest tokens where each token was drawn, int64 [K], and their log-probabilities, if these are wanted
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, without the prompt."""
        return len(self.tokens) - self.request.prompt_P.numel()

    @property
    def completes_stop(self) -> bool:
        """Whether the newest token completes a stop string."""
        if (stop := self.request.stop) is None:
            return False
        return stop.are_in(self.tokens[-self.num_tokens :], since=self.num_tokens - 1)


@dataclass
class StepInputs:
    """The model inputs of a step."""

    plan: StepPlan
    tokens: list[int] = field(default_factory=list)  # the packed sequence
    positions: list[int] = field(default_factory=list)  # of each token within its own response
    predictors: list[int] = field(default_factory=list)  # positions in the sequence that need logits
    responses: list[RunningResponse] = field(default_factory=list)  # those that get a token
    # One per response, counting this step's logits first and then those of kept prompts.
    logit_rows: list[int] = field(default_factory=list)
    # For each document that is a prompt: its tokens, its slot, and its row of logits.
    prompts: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    kept_logits: list[Tensor] = field(default_factory=list)  # of the kept prompts that this step reuses
    _num_logits: int = 0

    def add_responses(self, responses: list[RunningResponse]) -> None:
        """Let these responses draw from the next row of logits."""
        self.responses += responses
        self.logit_rows += [self._num_logits] * len(responses)
        self._num_logits += 1


@dataclass(frozen=True)
class _KeptPrompt:
    """Keys and values [L, 2, J, P, D], and the logits after the last token [V]."""

    keys: Tensor
    logits_V: Tensor


class RunningBatch:
    """The responses that are entering or running."""

    def __init__(self, shape: KeyShape, *, max_new_tokens: int) -> None:
        self._shape = shape
        self._max_new_tokens = max_new_tokens
        self._entering: list[RunningResponse] = []
        self._running: dict[int, RunningResponse] = {}
        self._lanes: list[Lane] = []
        self._kept: OrderedDict[tuple[int, ...], _KeptPrompt] = OrderedDict()

    def enter_response(self, response: RunningResponse) -> None:
        """Queue a response; one of the next steps computes all its tokens."""
        self._entering.append(response)

    def next_inputs(self) -> StepInputs:
        # Taken before anything joins: only rows that are already running get a token from this step's lane pass.
        segments = [(lane, lane.num_rows) for lane in self._lanes]
        for lane in self._lanes:
            lane.open_column()
        taken = self._take_entering()
        kept = {tokens: taken.pop(tokens) for tokens in list(taken) if tokens in self._kept}
        # By length, so that documents of equal length are neighbours and form one bucket.
        documents = sorted(taken.items(), key=lambda document: len(document[0]))
        to_place = [*documents, *kept.items()]
        entries = [self._assign_lane_rows(to_place[number:]) for number in range(len(to_place))]
        for tokens, entry in zip(kept, entries[len(documents) :], strict=True):
            entry.lane.paste_rows(entry.rows, self._kept[tokens].keys)
        # Masks come last: a lane may have moved when responses joined it.
        running = tuple((lane, num_rows, lane.attention_mask(num_rows)) for lane, num_rows in segments)
        inputs = StepInputs(StepPlan(_buckets(documents, entries[: len(documents)]), running))
        self._add_documents(inputs, documents)
        self._add_running(inputs, segments)
        for tokens, responses in kept.items():
            inputs.add_responses(responses)
            inputs.kept_logits.append(self._kept[tokens].logits_V)
        return inputs

    def note_logits(self, inputs: StepInputs, logits_UV: Tensor | None) -> Tensor:
        """Keep the newest prompts; return this step's logits (None: it has none), then those of kept prompts."""
        if logits_UV is not None:
            for tokens, slot, row in inputs.prompts[-_KEPT_PROMPTS:]:
                lane = next(lane for lane in self._lanes if slot in lane.slots)
                self._kept[tokens] = _KeptPrompt(lane.copy_of(slot), logits_UV[row].clone())
            while len(self._kept) > _KEPT_PROMPTS:
                self._kept.popitem(last=False)
        parts = [] if logits_UV is None else [logits_UV]
        parts += [logits_V.unsqueeze(0) for logits_V in inputs.kept_logits]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def remove_responses(self, responses: list[RunningResponse]) -> None:
        slots = {response.slot for response in responses}
        for lane in self._lanes if slots else ():
            lane.remove_rows([slot for slot in lane.slots if slot in slots])
        self._lanes = [lane for lane in self._lanes if lane.num_rows]
        for slot in slots:
            del self._running[slot]

    def cancel_ticket(self, ticket: int) -> list[RunningResponse]:
        """Remove and return the response with this ticket, running or still entering; empty if there is none."""
        entering = [response for response in self._entering if response.request.ticket == ticket]
        running = [response for response in self._running.values() if response.request.ticket == ticket]
        self._entering = [response for response in self._entering if response.request.ticket != ticket]
        self.remove_responses(running)
        return entering + running

    def enter_again(self) -> None:
        """Recompute the keys and values of all running responses."""
        # In front: responses that were already running go before new ones.
        self._entering[:0] = self._running.values()
        self._running.clear()
        self._lanes.clear()

    def forget_prompts(self) -> None:
        """Drop the kept prompts: other weights computed their keys."""
        self._kept.clear()

    def clear(self) -> None:
        self._entering.clear()
        self._running.clear()
        self._lanes.clear()

    def _take_entering(self) -> dict[tuple[int, ...], list[RunningResponse]]:
        """Take the responses that enter now, grouped by their tokens, in order."""
        taken: dict[tuple[int, ...], list[RunningResponse]] = {}
        num_tokens, number = 0, 0
        for response in self._entering:
            tokens = tuple(response.tokens)
            if tokens not in taken:
                num_tokens += len(tokens)
                # The first document always enters, however long it is.
                if taken and num_tokens > MAX_ENTERING_TOKENS:
                    break
            taken.setdefault(tokens, []).append(response)
            self._running[response.slot] = response
            number += 1
        del self._entering[:number]
        return taken

    def _assign_lane_rows(self, to_place: list[tuple[tuple[int, ...], list[RunningResponse]]]) -> LaneEntry:
        """Assign lane rows to the first document's responses."""
        length, responses = len(to_place[0][0]), to_place[0][1]
        lane = next((lane for lane in self._lanes if lane.response_fits(length)), None)
        if lane is None:
            # A new lane: reserve room for the next documents too, if they are of a length that will join it.
            longest, num_rows = length, 0
            for tokens, joining in to_place:
                if alike(len(tokens), longest):
                    longest, num_rows = max(longest, len(tokens)), num_rows + len(joining)
            lane = Lane(self._shape, num_rows=num_rows, length=longest, max_new_tokens=self._max_new_tokens)
            self._lanes.append(lane)
        first = lane.join([response.slot for response in responses], length)
        return LaneEntry(lane, slice(first, first + len(responses)))

    def _add_documents(
        self, inputs: StepInputs, documents: list[tuple[tuple[int, ...], list[RunningResponse]]]
    ) -> None:
        for tokens, responses in documents:
            inputs.tokens += tokens
            inputs.positions += range(len(tokens))
            inputs.predictors.append(len(inputs.tokens) - 1)
            if not responses[0].num_tokens:
                inputs.prompts.append((tokens, responses[0].slot, len(inputs.predictors) - 1))
            inputs.add_responses(responses)

    def _add_running(self, inputs: StepInputs, segments: list[tuple[Lane, int]]) -> None:
        for lane, num_rows in segments:
            for slot in lane.slots[:num_rows]:
                response = self._running[slot]
                inputs.tokens.append(response.tokens[-1])
                inputs.positions.append(len(response.tokens) - 1)
                inputs.predictors.append(len(inputs.tokens) - 1)
                inputs.add_responses([response])


def _buckets(
    documents: list[tuple[tuple[int, ...], list[RunningResponse]]], entries: list[LaneEntry]
) -> tuple[LengthBucket, ...]:
    by_length: dict[int, list[LaneEntry]] = {}
    for (tokens, _), entry in zip(documents, entries, strict=True):
        by_length.setdefault(len(tokens), []).append(entry)
    return tuple(LengthBucket(length, tuple(together)) for length, together in by_length.items())


class HfEngine(CheckedEngine):
    """Generates responses with transformers; implements `SleepingGenerator`.

    Built without weights (only the JSON files in `model_dir` are read), so `load_weights` must come before `submit`.
    With `lora` it reads the base from the directory, and `load_weights` gets adapters.
    Raises ConfigError if the directory describes no causal language model, or no end-of-sequence token.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        *,
        sampling: SamplingConfig,
        device: torch.device,
        lora: LoraConfig | None = None,
        num_top_log_probs: int = 0,
    ) -> None:
        self._device = device
        self._num_top = num_top_log_probs
        model = empty_causal_lm(model_dir, dtype=DTYPES[config.dtype], attention=STEP_ATTENTION)
        materialize(model, device)
        use_float32_logits(model)
        self._model = cast(Any, model.requires_grad_(False))
        self._parameters = loadable_parameters(model, model_dir, lora)  # what a version replaces
        super().__init__(model, sampling, max_positions(model_dir), lora)
        self._eos = torch.tensor(eos_token_ids(model_dir), device=device)
        size = sampling.batch_size, sampling.max_response_tokens
        self._uniforms_SM = torch.zeros(size, device=device)
        self._responses_SM = torch.zeros(size, dtype=torch.int64, device=device)
        self._log_probs_SM = torch.zeros(size, device=device)
        self._versions_SM = torch.zeros(size, dtype=torch.int32, device=device)
        self._key_shape = _key_shape(self._model, device)
        self._batch = RunningBatch(self._key_shape, max_new_tokens=sampling.max_response_tokens)
        self._free = list(reversed(range(sampling.batch_size)))
        self.version = 0

    @staticmethod
    def of_run(setup: EngineSetup) -> "HfEngine":
        return HfEngine(
            setup.model_dir,
            setup.run.model,
            sampling=setup.sampling,
            device=setup.device,
            lora=setup.adapter,
            num_top_log_probs=setup.num_top_log_probs,
        )

    @property
    def adopts_weights(self) -> bool:
        """True on the CPU, where weights in host memory can be used in place."""
        return self._device.type == "cpu"

    @property
    def interruptible(self) -> bool:
        """Whether running responses continue with new weights, as `rollout.on_swap` says."""
        return self._sampling.on_swap != "finish"

    def use_sampling(self, sampling: SamplingConfig) -> None:
        drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        self._sampling = self._sampling.model_copy(update=drawn)

    @property
    def num_running(self) -> int:
        return self._sampling.batch_size - len(self._free)

    def _start(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue responses; the next step computes their prompts."""
        for request in requests:
            response = RunningResponse(request, self._free.pop(), request.prompt_P.tolist())
            # From the seed alone: a reissued row draws the same numbers, whatever else is in its batch.
            self._uniforms_SM[response.slot] = torch.from_numpy(_uniforms(request.seed, self._uniforms_SM.shape[1]))
            self._batch.enter_response(response)

    @torch.inference_mode()
    def step(self, wake: threading.Event) -> list[Generation]:
        """Draw the next token of every running response; return those that it finished."""
        assert self._order.is_awake, "step() while the engine sleeps"
        if not self.num_running:
            return []
        inputs = self._batch.next_inputs()
        logits_UV = self._batch.note_logits(inputs, self._forward_step(inputs) if inputs.tokens else None)
        return [
            self._finish_response(response, truncated=cut) for response, cut in self._draw_tokens(inputs, logits_UV)
        ]

    @torch.inference_mode()
    def cancel(self, ticket: int) -> None:
        self._free += [response.slot for response in self._batch.cancel_ticket(ticket)]

    def abort(self) -> None:
        self._batch.clear()
        self._free = list(reversed(range(self._sampling.batch_size)))

    def sleep(self) -> None:
        if self._order.note_sleep():
            self._batch.forget_prompts()
            self._batch.enter_again()
            self._allocate_parameters(dict.fromkeys(self._parameters, (0,)))
            self._move_base(torch.device("cpu"))
            free_cached_memory(self._device)

    def wake(self, *parts: WakePart) -> None:
        for part in parts:
            # Lanes are allocated as responses enter, so the cache itself has nothing to do.
            if self._order.note_wake(part) and part is WakePart.WEIGHTS:
                self._allocate_parameters({name: need.shape for name, need in self._needs.items()})
                self._move_base(self._device)

    def _allocate_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give every parameter other memory, uninitialized; weights that were adopted are let go."""
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(shapes[name], dtype=parameter.dtype, device=self._device)

    def _move_base(self, device: torch.device) -> None:
        """Move what an adapter is added to, which no version brings; without an adapter that is nothing."""
        replaced = {id(parameter) for parameter in self._parameters.values()}
        for parameter in self._model.parameters():
            if id(parameter) not in replaced:
                parameter.data = parameter.data.to(device)

    def _replace_weights(self, weights: Mapping[str, Tensor], *, adopt: bool) -> None:
        replace_weights(self._parameters, weights, adopt=adopt and self.adopts_weights)
        self._batch.forget_prompts()
        if self._sampling.on_swap == "recompute":
            # The version stamped on a token is then exactly that of the weights behind its log-probability.
            self._batch.enter_again()

    @torch.inference_mode()
    def prompt_log_probs(self, tokens_T: Tensor) -> Tensor | None:
        """See `ScoringEngine`; computed as for any prompt that enters, in a batch of its own."""
        batch = RunningBatch(self._key_shape, max_new_tokens=1)
        batch.enter_response(RunningResponse(GenerateRequest(0, tokens_T, seed=0), 0, tokens_T.tolist()))
        inputs = batch.next_inputs()
        inputs.predictors = list(range(len(tokens_T) - 1))
        log_probs_TV = tempered_log_probs(self._forward_step(inputs), self._sampling)
        found_T = log_probs_TV.gather(-1, tokens_T[1:, None].to(self._device)).squeeze(-1)
        with torch.inference_mode(False):
            return torch.empty((1, len(found_T)), dtype=torch.float32).copy_(found_T)

    def weight_checksums(self) -> Mapping[str, HeldChecksum]:
        """See `ChecksummedEngine`."""
        sums = torch.stack([tensor_checksum(parameter) for parameter in self._parameters.values()]).tolist()
        return {
            name: HeldChecksum(str(parameter.dtype).removeprefix("torch."), known)
            for (name, parameter), known in zip(self._parameters.items(), sums, strict=True)
        }

    def close(self) -> None:
        self.abort()
        self._parameters.clear()
        self._model.to_empty(device="meta")

    def _forward_step(self, inputs: StepInputs) -> Tensor:
        output = self._model(
            input_ids=torch.tensor([inputs.tokens], device=self._device),
            position_ids=torch.tensor([inputs.positions], device=self._device),
            logits_to_keep=torch.tensor(inputs.predictors, device=self._device),
            step_plan=inputs.plan,
            use_cache=False,
        )
        logits_UV: Tensor = output.logits[0]
        return logits_UV

    def _draw_tokens(self, inputs: StepInputs, logits_UV: Tensor) -> list[tuple[RunningResponse, bool]]:
        """Draw a token for every response; return those that end with it, and whether each was cut at its limit."""
        slots_B = torch.tensor([response.slot for response in inputs.responses], device=self._device)
        columns_B = torch.tensor([response.num_tokens for response in inputs.responses], device=self._device)
        # Skip the gather in the common case: one row of logits per response, in order.
        if inputs.logit_rows != list(range(len(logits_UV))):
            logits_UV = logits_UV[torch.tensor(inputs.logit_rows, device=self._device)]
        uniform_B = self._uniforms_SM[slots_B, columns_B]
        if self._sampling.keeps_mask:
            token_B, log_prob_B, kept = draw_from_kept(logits_UV, uniform_B, self._sampling)
            for response, ids in zip(inputs.responses, kept, strict=True):
                response.kept.append(ids)
        else:
            token_B, log_prob_B = draw_tokens(logits_UV, uniform_B, self._sampling)
        if self._num_top:
            log_probs_BV = tempered_log_probs(logits_UV, self._sampling)
            best = log_probs_BV.topk(min(self._num_top, log_probs_BV.shape[1]))
            for response, ids, log_probs in zip(inputs.responses, best.indices, best.values, strict=True):
                response.top.append((ids, log_probs))
        self._responses_SM[slots_B, columns_B] = token_B
        self._log_probs_SM[slots_B, columns_B] = log_prob_B
        self._versions_SM[slots_B, columns_B] = self.version
        tokens: list[int] = token_B.tolist()
        at_end: list[bool] = torch.isin(token_B, self._eos).tolist()
        ended = []
        for response, token, is_eos in zip(inputs.responses, tokens, at_end, strict=True):
            response.tokens.append(token)
            stops = is_eos or token in response.request.stop_ids or response.completes_stop
            if stops or response.num_tokens == response.request.limit(self._sampling.max_response_tokens):
                ended.append((response, not stops))
        self._batch.remove_responses([response for response, _ in ended])
        return ended

    def _finish_response(self, response: RunningResponse, *, truncated: bool) -> Generation:
        """Copy a response to the CPU and free its slot."""
        self._free.append(response.slot)
        tensors = self._responses_SM, self._log_probs_SM, self._versions_SM
        # Callers get normal tensors, not inference-mode ones.
        with torch.inference_mode(False):
            response_R, log_probs_R, versions_R = (
                torch.empty(response.num_tokens, dtype=tensor.dtype).copy_(tensor[response.slot, : response.num_tokens])
                for tensor in tensors
            )
        return Generation(
            index=response.request.index,
            response_R=response_R,
            log_probs_R=log_probs_R,
            versions_R=versions_R,
            truncated=truncated,
            ticket=response.request.ticket,
            kept=_kept_sets(response.kept) if self._sampling.keeps_mask else None,
            top=_top_tokens(response.top) if self._num_top else None,
        )


def _kept_sets(kept: Sequence[Tensor]) -> TokenSets:
    """Return a response's sets in normal tensors, not inference-mode ones; callers are in inference mode."""
    with torch.inference_mode(False):
        counts_R = torch.tensor([len(ids) for ids in kept], dtype=torch.int32)
        ids_P = torch.empty(int(counts_R.sum()), dtype=torch.int32).copy_(torch.cat(list(kept)))
    return TokenSets(ids_P, counts_R)


def _top_tokens(top: Sequence[tuple[Tensor, Tensor]]) -> TopTokens:
    """Return a response's likeliest tokens in normal tensors on the CPU; callers are in inference mode."""
    ids_RK, log_probs_RK = (torch.stack(part) for part in zip(*top, strict=True))
    with torch.inference_mode(False):
        shape = ids_RK.shape
        return TopTokens(
            torch.empty(shape, dtype=torch.int32).copy_(ids_RK),
            torch.empty(shape, dtype=torch.float32).copy_(log_probs_RK),
        )


def draw_from_kept(
    logits_BV: Tensor, uniform_B: Tensor, config: SamplingConfig
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Like `draw_tokens` with top-k or top-p, but log-probabilities are of the distribution that remains; third are the
    tokens that it has, int32 on the CPU, for each row."""
    log_probs_BV = tempered_log_probs(logits_BV, config)
    weights_BK, order_BV = _filtered(log_probs_BV.exp(), config)
    column_B1 = _invert(weights_BK, uniform_B).unsqueeze(-1)
    kept_BK, ids_BK = weights_BK > 0, order_BV[:, : weights_BK.shape[1]]
    token_B1 = ids_BK.gather(-1, column_B1)
    total_B1 = log_probs_BV.gather(-1, ids_BK).masked_fill(~kept_BK, -torch.inf).logsumexp(-1, keepdim=True)
    log_prob_B = (log_probs_BV.gather(-1, token_B1) - total_B1).squeeze(-1)
    kept = torch.split(ids_BK[kept_BK].int().cpu(), kept_BK.sum(-1).tolist())
    return token_B1.squeeze(-1), log_prob_B, kept


def draw_tokens(logits_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Invert each row's cumulative distribution at its random number; at temperature 0, take the likeliest token.

    Top-k applies first, then top-p to what is left. Returns tokens, int64 [B], and their log-probabilities, float32
    [B], under the tempered distribution before filtering (at temperature 0 under the untempered one). A row's result
    depends on that row alone; `uniform_B` is float32 in [0, 1).
    """
    log_probs_BV = tempered_log_probs(logits_BV, config)
    probs_BV = log_probs_BV.exp()
    if config.temperature == 0:
        token_B = log_probs_BV.argmax(-1)
    elif 0 < config.top_k < probs_BV.shape[-1] or config.top_p < 1:
        token_B = _draw_filtered(probs_BV, uniform_B, config)
    else:
        token_B = _invert(probs_BV, uniform_B)
    return token_B, log_probs_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


def tempered_log_probs(logits_BV: Tensor, config: SamplingConfig) -> Tensor:
    """Return float32 [B, V] under the tempered distribution; at temperature 0 under the untempered one."""
    logits_BV = logits_BV.float()
    if config.temperature not in (0, 1):
        logits_BV = logits_BV / config.temperature
    return logits_BV.log_softmax(-1)


def _key_shape(model: Any, device: torch.device) -> KeyShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return KeyShape(
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=device,
    )


_UNIFORM_BITS = 24  # numpy draws float32 in [0, 1) as multiples of 2**-24
# Keeps the product of a total, which rounding may push above 1, and a uniform within 63 bits.
_WEIGHT_BITS = 37


def _uniforms(seed: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return float32 [size] in [0, 1)."""
    # Philox takes the seed as its key, so opening a stream costs no seeding.
    return np.random.Generator(np.random.Philox(key=seed)).random(size, dtype=np.float32)


def _draw_filtered(probs_BV: Tensor, uniform_B: Tensor, config: SamplingConfig) -> Tensor:
    sorted_BV, order_BV = _filtered(probs_BV, config)
    return order_BV.gather(-1, _invert(sorted_BV, uniform_B).unsqueeze(-1)).squeeze(-1)


def _filtered(probs_BV: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Return the probabilities that top-k and top-p leave, descending and 0 for others, [B, K]; and all tokens in that
    order, int64 [B, V]."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if config.top_k > 0:
        sorted_BV = sorted_BV[:, : config.top_k]
    if config.top_p < 1:
        units_BV = _fixed_point(sorted_BV)
        before_BV = units_BV.cumsum(-1) - units_BV
        sorted_BV = sorted_BV * (before_BV < config.top_p * units_BV.sum(-1, keepdim=True))
    return sorted_BV, order_BV


def _invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total; never one of weight zero."""
    # In integers: a parallel prefix sum of floats need not be monotonic (it may rise at a weight of zero), and CUDA
    # refuses it where kernels must be deterministic.
    cumulative_BV = _fixed_point(weights_BV).cumsum(-1)
    uniform_B1 = (uniform_B * 2**_UNIFORM_BITS).to(torch.int64).unsqueeze(-1)
    bound_B1 = (cumulative_BV[:, -1:] * uniform_B1) >> _UNIFORM_BITS
    drawn_B1 = torch.searchsorted(cumulative_BV, bound_B1, right=True)
    # A row that is not finite gets the last index; its log-probabilities are not finite either.
    return drawn_B1.clamp_(max=weights_BV.shape[-1] - 1).squeeze(-1)


def _fixed_point(weights_BV: Tensor) -> Tensor:
    """Return weights that sum to at most 1 as int64 multiples of 2**-37; smaller or non-finite ones become 0."""
    fixed_BV: Tensor = (weights_BV.nan_to_num(0.0, 0.0, 0.0) * 2**_WEIGHT_BITS).to(torch.int64)
    return fixed_BV
