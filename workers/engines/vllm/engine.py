"""vLLM as the generation engine: `AsyncLLM` with continuous batching, its engine core in a separate process."""

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncflow.errors import EngineFailed
from weightsync.plan import Box, TensorSpec, TransferPlan, first_overlap
from weightsync.receiver import Following
from weightsync.slot_memory import Region, RegionLayout, SlotMemory
from weightsync.version import Version
from workers.data.model_files import max_positions
from workers.engines.base import EngineSetup, GenerateRequest, Generation, HeldChecksum, WakePart
from workers.engines.lora import adapted_modules, peft_config
from workers.engines.response_tasks import ResponseTasks, TaskEngine
from workers.engines.vllm.vllm_process import (
    ADAPTER,
    ADAPTER_ID,
    NO_ADAPTERS,
    VllmProcess,
    adapter_arguments,
    engine_arguments,
    has_request_seeds,
    max_length,
    plan_log_probs,
)
from workers.rows.packed_rows import TokenSets, TopTokens
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import VllmConfig

#     rollout process                                        vLLM's engine process (ends with the rollout)
#     submit: a task per response -> AsyncLLM ...............  scheduler, model, sampler
#     load_held: pause, resume ............................  load what its ranks received themselves (`RankReceiver`)
#     receive_while_paused: pause, resume .................  several ranks receive a broadcast
#     load_weights: copy to a slot, pause, resume .........  map it, load layer by layer (evaluation)
#     sleep; wake weights; load; wake the cache ...........  its own allocator frees and maps memory (level 2)
#
# With an adapter (`lora`), vLLM reads the base from the model's files, and a version is an adapter that replaces the
# last one under the same id: responses that run are bound to that id, so they go on with the new one.
#
# Running responses continue with new weights. Where vLLM reports which version drew which tokens, its scheduler pauses
# between two tokens, and nothing is lost. Where it does not, a swap ends what runs, and each response goes on as a new
# request whose prompt has the tokens drawn so far: so every request's tokens are of one version. Prompts are cached per
# version; `on_swap: keep` keeps only the cache of running responses. What a release can do is asked by name. vLLM is
# imported inside functions only; `AsyncFlowWorker` runs in its worker processes.

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 1.0  # how long vLLM's process may take to end on its own
_STREAM_TOKENS = 8  # tokens of a response between two signs of progress


class VllmEngine(TaskEngine):
    """Generates responses with vLLM; implements `SleepingGenerator`.

    Starts vLLM's process with random weights, so `load_weights` or `load_held` must come before `submit`, or, with
    `reads_model`, with those of the model's files. Set `joins_groups` if its ranks are going to `follow_weights`, and
    `sleeps` if the engine is going to: only then vLLM allocates its memory so that it can be freed, and on the CPU,
    where vLLM cannot, it only stops.

    Raises:
        ConfigError: vLLM is missing, or refuses the settings.
        EngineFailed: its process did not start.
    """

    def __init__(
        self,
        model_dir: Path,
        model: ModelConfig,
        config: VllmConfig,
        *,
        sampling: SamplingConfig,
        max_prompt_tokens: int,
        device: torch.device,
        joins_groups: bool = False,
        lora: LoraConfig | None = None,
        reads_model: bool = False,
        sleeps: bool = False,
        num_top_log_probs: int = 0,
    ) -> None:
        max_len = max_length(config, sampling, max_prompt_tokens, max_positions(model_dir))
        super().__init__(model_dir, model, sampling, max_len, lora)
        self._config = config
        self._lora = lora
        self._seeds_requests = has_request_seeds(config, device)
        self._plan = plan_log_probs(sampling)
        self._num_top = min(num_top_log_probs, self._vocab_size)
        self._temperature = self._plan.temperature
        dtype = config.dtype or model.dtype
        tensors = {name: TensorSpec(need.shape, dtype) for name, need in self._needs.items()}
        self._layout = RegionLayout(TransferPlan(1, tensors, ()))
        # Reserved by the first `load_weights`, which most runs never call.
        self._slot: SlotMemory | None = None
        # Number of a load -> its version. vLLM labels tokens while weights are still loading, when the engine does not
        # know their version yet; it is filled in when a response is handed out.
        self._versions: dict[int, int] = {}
        self._load_number = self._begun_load = 0
        self._num_aborts = 0  # how often vLLM ended all requests for a swap or a sleep
        self.version = 0
        self._no_swap = asyncio.Event()  # cleared while weights are swapped
        self._no_swap.set()
        adapters = NO_ADAPTERS if lora is None else adapter_arguments(lora, adapted_modules(self._needs))
        arguments = engine_arguments(
            model_dir, model, config, self._plan,
            max_len=max_len, num_slots=sampling.batch_size, device=device,
            adapters=adapters, reads_model=reads_model, sleeps=sleeps,
            num_top_log_probs=self._num_top, keeps_mask=sampling.keeps_mask,
        )  # fmt: skip
        self._loaded = reads_model
        process = VllmProcess(arguments, config, device, joins_groups=joins_groups)
        self._llm = process.llm
        self._tasks = ResponseTasks("vllm")
        self._tasks.run_coroutine(
            self._prepare_transfer(), what="vLLM to take settings", timeout_s=config.swap_timeout_s
        )
        process.connected()
        if sampling.on_swap == "keep" and not self._tells_versions:
            logger.warning("rollout.on_swap: this vLLM cannot keep keys and values over a swap; they are recomputed")

    @staticmethod
    def of_run(setup: EngineSetup) -> "VllmEngine":
        return VllmEngine(
            setup.model_dir,
            setup.run.model,
            setup.run.vllm,
            sampling=setup.sampling,
            max_prompt_tokens=setup.max_prompt_tokens,
            device=setup.device,
            joins_groups=setup.run.weightsync.path == "broadcast" and setup.follows_policy,
            lora=setup.adapter,
            reads_model=not setup.follows_policy,
            sleeps=setup.takes_turns,
            num_top_log_probs=setup.num_top_log_probs,
        )

    @property
    def version(self) -> int:
        return self._versions[self._load_number]

    @version.setter
    def version(self, version: int) -> None:
        self._versions[self._load_number] = version

    @property
    def interruptible(self) -> bool:
        """Whether responses continue with new weights, as `rollout.on_swap` says."""
        return self._sampling.on_swap != "finish"

    def use_sampling(self, sampling: SamplingConfig) -> None:
        drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        self._sampling = self._sampling.model_copy(update=drawn)
        self._temperature = sampling.temperature * self._plan.logits_scale  # (the model's logits may be scaled)

    @cached_property
    def _adapter(self) -> Any:
        """What binds a request to the adapter that the ranks hold, whichever version it is; None: to whole weights."""
        if self._lora is None:
            return None
        from vllm.lora.request import LoRARequest

        # Not with `load_inplace`: vLLM would read the adapter again in every step. The path leads nowhere, so that an
        # adapter that a rank does not hold is an error.
        return LoRARequest(ADAPTER, ADAPTER_ID, "/held-by-the-ranks")

    @cached_property
    def _tells_versions(self) -> bool:
        """Whether vLLM reports which weights drew which tokens."""
        from vllm.outputs import CompletionOutput

        return "weight_versions" in {field.name for field in fields(CompletionOutput)}

    def step(self, wake: threading.Event) -> list[Generation]:
        finished = super().step(wake)
        for each in finished:
            each.versions_R.apply_(self._versions.__getitem__)  # its task knew only the numbers of loads
        return finished

    @property
    def num_ranks(self) -> int:
        return self._config.tensor_parallel_size

    def follow_weights(self, following: Following) -> None:
        self._call_ranks("follow_weights", msgspec.to_builtins(following))

    def hold(self, version: Version) -> bool:
        # All ranks hold one version, so that none moves on before the swap; if one already has, nothing is loaded.
        return all(self._call_ranks("hold_weights", list(version)))

    def load_held(self) -> None:
        self._order.note_loaded()
        self._load_update({})
        self._loaded = True

    def receive_while_paused(self, version: Version, *, timeout_s: float) -> None:
        # Nothing is loaded, so that responses go on as they were, with vLLM of any version: their tokens before and
        # after the pause are of one version, and their keys and values stay.
        async def receive() -> None:
            self._no_swap.clear()
            try:
                try:
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                    await self._llm.collective_rpc("receive_while_paused", args=(list(version),))
                finally:
                    await self._llm.resume_generation()
            except Exception as error:
                raise EngineFailed(f"vLLM could not pause for weights ({error}); the log above says why") from error
            finally:
                self._no_swap.set()

        self._tasks.run_coroutine(receive(), what="vLLM's ranks to receive weights", timeout_s=timeout_s)

    def sleep(self) -> None:
        half_awake = not self._order.is_awake
        if self._order.note_sleep():
            self._run(self._fall_asleep(half_awake=half_awake), what="vLLM to sleep")

    def wake(self, *parts: WakePart) -> None:
        for part in parts:
            if self._order.note_wake(part):
                self._run(self._wake_part(part), what=f"vLLM to wake its {part}")

    def _run(self, coroutine: Coroutine[Any, Any, None], *, what: str) -> None:
        self._tasks.run_coroutine(coroutine, what=what, timeout_s=self._config.swap_timeout_s)

    def prompt_log_probs(self, tokens_T: Tensor) -> Tensor | None:
        """See `ScoringEngine`; None at a temperature that the sampler applies, since vLLM's prompts do not pass it."""
        if self._plan.temperature not in (0.0, 1.0):
            return None
        timeout_s = self._config.swap_timeout_s
        found = self._tasks.run_coroutine(
            self._score_prompt(tokens_T.tolist()), what="vLLM to score a prompt", timeout_s=timeout_s
        )
        return torch.tensor([found], dtype=torch.float32)

    def weight_checksums(self) -> Mapping[str, HeldChecksum]:
        """See `ChecksummedEngine`: of the tensors that all ranks together can read back, see `held_boxes`."""
        parts = [part for rank in self._call_ranks("weight_checksums") for part in rank]
        return whole_checksums(parts, {name: need.shape for name, need in self._needs.items()})

    def close(self) -> None:
        if self._llm is not None:
            self._tasks.abort()
            end = partial(self._llm.shutdown, timeout=_SHUTDOWN_S)
            self._tasks.call_in_loop(end, what="vLLM to end", timeout_s=self._config.swap_timeout_s)
            self._tasks.close()
            self._llm = None

    def _replace_weights(self, weights: Mapping[str, Tensor], *, adopt: bool) -> None:
        """Copy weights to shared memory for vLLM's ranks; running responses wait meanwhile, then continue.

        Raises:
            WeightSyncError: shared memory is exhausted.
            EngineFailed: vLLM could not load them; it must be restarted.
        """
        if self._slot is None:
            self._slot = SlotMemory(self._layout.num_bytes)
        copy = Region(self._slot.memory, self._layout)
        for number, name in enumerate(self._layout.plan.names):
            copy.view_tensor(number).copy_(weights[name])
        self._load_update({"offer": msgspec.to_builtins(self._slot.offer)})

    def _load_update(self, update: dict[str, object]) -> None:
        number = self._load_number + 1
        self._run(self._swap_weights(update, number), what="vLLM to load weights")
        if not self._tasks.num_running:
            self._versions = {}
        self._load_number = number
        self.version = 0

    def _call_ranks(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `AsyncFlowWorker` in all ranks, between two tokens."""

        async def call() -> list[Any]:
            try:
                return list(await self._llm.collective_rpc(method, args=arguments))
            except Exception as error:
                raise EngineFailed(f"vLLM's ranks: {method} failed ({error}); the log above says why") from error

        return self._tasks.run_coroutine(call(), what=f"vLLM's ranks: {method}", timeout_s=self._config.swap_timeout_s)

    async def _prepare_transfer(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        tensors = msgspec.to_builtins(self._layout.plan.tensors)
        lora, modules = self._lora, adapted_modules(self._needs)
        adapter = {} if lora is None else peft_config(lora, modules, base="")
        request = WeightTransferInitRequest(
            init_info={"logits_scale": self._plan.logits_scale, "tensors": tensors, "adapter": adapter}
        )
        await self._llm.init_weight_transfer_engine(request)
        # The first request would ask for it before it is sent, and a swap could overtake it.
        await self._llm.get_supported_tasks()

    def _response_to(self, request: GenerateRequest) -> Coroutine[Any, Any, Generation]:
        return self._generate(request)

    async def _score_prompt(self, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of a prompt's tokens after the first, with the weights that are loaded."""
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = {"type": "token", "prompt_token_ids": tokens, "cache_salt": str(self._load_number)}
        # vLLM computes a prompt whose log-probabilities are asked for anew, whatever its cache has.
        # 0.23 ignores the seeds of all requests in a batch if one has none.
        seed = 0 if self._seeds_requests else None
        # Where masks are kept, vLLM takes no request without top-k; prompts do not pass it.
        top_k = {"top_k": 1}
        if not self._sampling.keeps_mask:
            top_k = {}
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, seed=seed, **top_k)
        try:
            name = f"probe-{self._load_number}"
            asked = self._llm.generate(prompt, parameters, name, lora_request=self._adapter, priority=-1)
            async with aclosing(asked) as outputs:
                known = [output.prompt_logprobs async for output in outputs if output.prompt_logprobs is not None]
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM's engine ended ({type(error).__name__}); the log above says why") from error
        return [one[token].logprob for one, token in zip(known[-1][1:], tokens[1:], strict=True)]

    async def _generate(self, request: GenerateRequest) -> Generation:
        """Return one response, with numbers of loads for versions. If the task is cancelled, or a stop string
        completes, vLLM drops the rest."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        tokens: list[int] = []
        log_probs: list[float] = []
        loads: list[int] = []
        kept: list[list[int]] = []
        top: list[TopTokens] = []
        try:
            while True:
                await self._no_swap.wait()
                load_number, num_aborts = self._begun_load, self._num_aborts
                completion = await self._draw(request, tokens, load_number)
                drawn = list(completion.token_ids)  # copy before vLLM drops the rest: its lists may still grow
                tokens += drawn
                log_probs += completion.logprobs.logprobs[:: self._num_top + 1] if drawn else ()
                if self._num_top:
                    top.append(_top_of(completion.logprobs, len(drawn), self._num_top))
                if self._sampling.keeps_mask:
                    kept += _mask_of(completion, len(drawn))
                spans = _spans(getattr(completion, "weight_versions", None), len(drawn), load_number)
                loads += [load for load, size in spans for _ in range(size)]
                if completion.finish_reason != "abort" or self._num_aborts == num_aborts:
                    break
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM's engine ended ({type(error).__name__}); the log above says why") from error
        made = Generation.of(
            request, tokens=tokens, log_probs=log_probs, versions=loads, truncated=completion.finish_reason == "length"
        )
        if self._num_top:
            made = replace(made, top=TopTokens.joined(top))
        return replace(made, kept=TokenSets.of(kept)) if self._sampling.keeps_mask else made

    async def _draw(self, request: GenerateRequest, before: list[int], load_number: int) -> Any:
        """Return vLLM's last `CompletionOutput` for a response of which the tokens `before` are drawn already."""
        # The salt prevents cache hits on prompts that other weights computed.
        token_ids = request.prompt_P.tolist() + before
        prompt = {"type": "token", "prompt_token_ids": token_ids, "cache_salt": str(load_number)}
        parameters = self._parameters(request, before)
        name = f"{load_number}-{request.index}-{request.ticket}"
        async with aclosing(self._llm.generate(prompt, parameters, name, lora_request=self._adapter)) as outputs:
            num_seen = 0
            async for output in outputs:
                completion = output.outputs[0]
                self._tasks.note_progress()
                if self._is_over(request, before, completion, load_number, since=num_seen):
                    if not self._sampling.keeps_mask:
                        break
                    await self._llm.abort(name)  # masks come with the last output only, which this makes vLLM give
                num_seen = len(completion.token_ids)
        return completion

    def _is_over(
        self, request: GenerateRequest, before: list[int], completion: Any, load_number: int, *, since: int
    ) -> bool:
        """Whether a stop string ended a response that vLLM would continue, and its tokens' weights are known."""
        stop = request.stop
        if stop is None or completion.finish_reason is not None:
            return False
        tokens = before + list(completion.token_ids)
        if not stop.are_in(tokens, since=len(before) + since):
            return False
        found = getattr(completion, "weight_versions", None)
        if found is None:
            # vLLM need not report versions before the end; if weights were swapped meanwhile, wait for the end.
            return not self._tells_versions or self._begun_load == load_number
        return sum(size for _, size in _spans(found, 0, load_number)) == len(completion.token_ids)

    def _parameters(self, request: GenerateRequest, before: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self._sampling
        seed = request.signed_seed if self._seeds_requests else None
        if seed is not None and before:
            seed = hash((seed, len(before))) % 2**63  # or the first draws would come again
        interval = {"stream_interval": _STREAM_TOKENS}
        if not self._has_stream_interval:
            interval = {}  # vLLM 0.23 reports every token
        return SamplingParams(
            seed=seed,
            temperature=self._temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.limit(sampling.max_response_tokens) - len(before),
            ignore_eos=True,  # the tokenizer's end token; `stop_token_ids` decides
            stop_token_ids=self._end_tokens(request),
            logprobs=self._num_top,  # beside the drawn token's
            flat_logprobs=True,
            detokenize=False,  # stop strings are found by `_is_over`
            output_kind=RequestOutputKind.CUMULATIVE,
            skip_clone=True,
            **interval,
        )

    @cached_property
    def _has_stream_interval(self) -> bool:
        from vllm import SamplingParams

        return "stream_interval" in inspect.signature(SamplingParams).parameters

    async def _swap_weights(self, update: dict[str, object], number: int) -> None:
        # From here on tokens may come from the new weights, which `_is_over` must know.
        self._begun_load = number
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        version = {"weight_version": str(number)}
        if not self._tells_versions:
            version = {}
        asleep = not self._order.is_awake
        try:
            if not asleep:
                self._no_swap.clear()
                mode = self._note_pause()
                await self._llm.pause_generation(mode=mode, clear_cache=self._sampling.on_swap != "keep")
            if self._lora is None:
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
                await self._llm.finish_weight_update(**version)
                await self._llm.collective_rpc("weights_loaded")
            else:
                await self._llm.collective_rpc("load_adapter", args=(update,))
                if self._tells_versions:  # vLLM counts weights only: the adapter's version is told to it
                    await self._llm.update_weight_version(str(number))
            if asleep:  # nothing may be scheduled before the cache is back
                return
            await self._llm.resume_generation()
        except Exception as error:
            raise EngineFailed(f"vLLM could not load the weights ({error}); the log above says why") from error
        self._no_swap.set()

    def _note_pause(self) -> str:
        """Return what vLLM is to do with running requests while it swaps or sleeps."""
        # "abort" ends what runs, with the tokens drawn so far. Responses go on after the swap: meanwhile vLLM would
        # take their requests for work left, and never be paused. No request is on its way to vLLM here: they are sent
        # in the first step of their tasks, which began before this one.
        if self._tells_versions:
            return "keep"
        self._num_aborts += 1
        return "abort"

    async def _fall_asleep(self, *, half_awake: bool) -> None:
        # Level 2 drops weights and cache, and vLLM's prefix cache with them. New requests wait on this side: a vLLM
        # before 0.29 schedules as soon as the weights wake, when it has requests and no memory for their keys.
        self._no_swap.clear()
        try:
            if half_awake and not self._tells_versions:
                # It takes no second sleep while its cache sleeps. Nothing runs in it, see `_note_pause`.
                await self._llm.wake_up(tags=[WakePart.KV_CACHE.value])
            # vLLM's own default, "abort", would end all responses. A version brings no base: level 1 keeps it in host
            # memory.
            await self._llm.sleep(level=2 if self._lora is None else 1, mode=self._note_pause())
        except Exception as error:
            raise EngineFailed(f"vLLM could not sleep ({error}); the log above says why") from error

    async def _wake_part(self, part: WakePart) -> None:
        try:
            await self._llm.wake_up(tags=[part.value])  # with the last one, vLLM resumes its scheduler
        except Exception as error:
            raise EngineFailed(f"vLLM could not wake its {part} ({error}); the log above says why") from error
        if self._order.is_awake:
            self._no_swap.set()


def whole_checksums(parts: Sequence[Sequence[Any]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HeldChecksum]:
    """Add up the ranks' boxes of tensors; equal boxes of several ranks are replicas, and must be equal.

    Args:
        parts: name, offset and size of the box, element type, and its share of the checksum.
        shapes: of the whole tensors. Those that the boxes do not fill are left out.
    """
    shares: dict[tuple[str, str], dict[Box, int]] = {}
    wrong: set[tuple[str, str]] = set()
    for name, offset, size, dtype, share in parts:
        boxes = shares.setdefault((name, dtype), {})
        if boxes.setdefault(Box(tuple(offset), tuple(size)), share) != share:
            wrong.add((name, dtype))
    found = {}
    for (name, dtype), boxes in shares.items():
        whole = sum(box.numel for box in boxes) == math.prod(shapes[name]) and first_overlap(list(boxes)) is None
        if whole:
            # Replicas that differ cannot all be what was published: no checksum is -1.
            found[name] = HeldChecksum(dtype, -1 if (name, dtype) in wrong else sum(boxes.values()) % 2**64)
    return found


def _top_of(flat: Any, num_tokens: int, num_top: int) -> TopTokens:
    """Return the likeliest tokens from vLLM's `FlatLogprobs`, which may be None if no token was drawn."""
    # At each place: the drawn token, then the likeliest ones, of which it may be one.
    width = num_top + 1
    ids, log_probs = (flat.token_ids, flat.logprobs) if num_tokens else ([], [])
    if not len(ids) == len(log_probs) == num_tokens * width:
        raise EngineFailed(
            f"vLLM gave {len(log_probs)} log-probabilities for {num_tokens} tokens, not {width} for each"
        )
    ids_RK = torch.tensor(ids, dtype=torch.int32).view(num_tokens, width)[:, 1:]
    return TopTokens(ids_RK, torch.tensor(log_probs, dtype=torch.float32).view(num_tokens, width)[:, 1:])


def _mask_of(completion: Any, num_tokens: int) -> list[list[int]]:
    """Return what each token was drawn from."""
    mask = completion.sampling_mask
    sets: list[list[int]] = [] if mask is None else mask.token_ids
    if len(sets) != num_tokens:
        raise EngineFailed(
            f"vLLM gave {len(sets)} sampling masks for {num_tokens} tokens; set rollout.keep_sampling_mask to false"
        )
    return sets


def _spans(found: Sequence[Any] | None, num_tokens: int, load_number: int) -> list[tuple[int, int]]:
    """Return (number of the load, tokens) for each of vLLM's `WeightVersionSpan`s."""
    if found is None:  # a vLLM that does not say: its requests end with a swap
        return [(load_number, num_tokens)]
    return [(int(span.version), span.end - span.start) for span in found]
