"""The `megatron` training engine: tensor, context, pipeline and data parallelism, and Megatron's distributed optimizer.

Every data-parallel replica holds the whole model, split over its tensor-parallel ranks and pipeline stages; optimizer
state and float32 master weights are split over all ranks. With `autocast: bfloat16` parameters are bfloat16.

    forward_backward(batch, loss)   all ranks of a replica get the same rows; gradients of the *sum* accumulate
    forward_backward(None, loss)    a replica without rows has nothing to do
    step(scale)                     sums over replicas, gradients * scale, clip, AdamW on this rank's share, all-gather

State and weights use Hugging Face's names and boxes, so a checkpoint loads into any other division of the model.

Collectives: `step` and `load_state_dict` block until all ranks call them, `log_probs` and `forward_backward` until
those of the replica do.
Legend of shapes: A drawn tokens of the micro-batch.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.device import to_device
from workers.checkpoint.saved_shards import WHOLE, BoxedTensor, BoxPart, ExportShare
from workers.data.model_files import read_model_config
from workers.engines.base import (
    EngineSetup,
    LocalShard,
    LossFunction,
    StepStats,
    Updates,
    check_sequences,
    decay,
    decays,
)
from workers.engines.hf.export import export_saved
from workers.engines.hf.weights import HfWeights
from workers.engines.megatron.megatron_context import TokenShare
from workers.engines.megatron.megatron_model import (
    MegatronParts,
    build_megatron,
    build_network,
    join_groups,
    prepare_megatron,
)
from workers.engines.megatron.names import FlatBox, flat_boxes, hf_weight_names, megatron_shards
from workers.engines.packed_forward import HeadRequest, PackedInputs, cut, head_log_probs, note_entropy_gradient
from workers.engines.shared_model import SharedModel
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.megatron import DenseModel

# One stage's forward and backward over the pieces of a micro-batch; the last stage computes log-probabilities.
#
# All pieces go forward through the stages, then backward in reverse order (GPipe): the loss is a function of all of a
# micro-batch's log-probabilities, so no piece can go back before the last one has arrived.
#
#     stage 0   0 1 2 3 . . . 3 2 1 0          memory: the activations of one micro-batch, as without pieces
#     stage 1   . 0 1 2 3 L 3 2 1 0 .          L: loss
#
# The last stage broadcasts the log-probabilities to its pipeline, so every rank has the same values. Where ranks share
# the tokens of a piece (`TokenShare`), each handles its own; otherwise t is T and a is A.
#
# Legend of shapes: t tokens of a piece on this rank, W width of the residual stream, A drawn tokens, a those that this
# rank's tokens predict.


@dataclass
class _Passed:
    """A piece between its forward and its backward pass."""

    received: Tensor | None  # [t, 1, W] from the previous stage; None on the first
    output: Tensor  # [t, 1, W] for the next stage; on the last stage log-probabilities [a]
    entropy_a: Tensor  # on the last stage, if requested
    share: TokenShare


class MegatronForward:
    """This rank's stage. `forward` and `backward` are collective over the ranks of a replica."""

    def __init__(self, parts: MegatronParts, actor: ActorConfig, *, temperature: float, device: torch.device) -> None:
        from megatron.core import parallel_state

        self._network: Any = parts.network
        self._geometry = parts.geometry
        self._temperature = temperature
        self._dtype = torch.bfloat16 if actor.autocast == "bfloat16" else torch.float32
        self._device = device
        self._shared_prompt = actor.shared_prompt
        self._num_pieces = actor.megatron.pipeline_pieces if parts.layout.stages > 1 else 1
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self._stages = dist.get_process_group_ranks(self._pipeline_group)
        self._stage = self._stages.index(dist.get_rank())
        self._context = parts.context
        self._positions_t = self._predictors_a = self._targets_a = torch.empty(0, dtype=torch.int64)
        self._entropy = False
        self._request: HeadRequest | None = None
        self._passed: list[_Passed] = []
        self._network.rotary_pos_emb.register_forward_hook(self._at_positions)
        if self._is_last:
            self._network.output_layer.forward = self._forward_head

    def forward(self, batch: Sequences, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return float32 [A] log-probabilities and entropies of the drawn tokens, on every rank of the replica.

        Keeps what `backward` needs if gradients are enabled. Without `entropy` the second result is empty. Raises
        BadRequest, see `check_sequences`.
        """
        check_sequences(batch, vocab_size=self._geometry.vocab_size)
        sending, passed = [], []
        for piece in [self._make_share(piece) for piece in cut(batch, self._num_pieces)]:
            passed.append(self._forward_piece(piece, entropy))
            if not self._is_last:
                # Asynchronous, so the next piece computes while this one travels.
                sending.append(self._send_tensor(passed[-1].output.detach(), self._stage + 1))
        for work in sending:
            work.wait()
        self._passed = passed if torch.is_grad_enabled() else []
        return self._share_results(passed, entropy)

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        """See `TrainEngine.log_probs`; on every rank of the replica."""
        if batch is None:
            return torch.empty(0, device=self._device)
        return self.forward(batch, entropy=False)[0]

    def backward(self, gradient_A: Tensor, entropy_gradient_A: Tensor | None = None) -> None:
        """Accumulate the parameters' gradients for the last `forward`, from those of its results."""
        passed, self._passed = self._passed, []
        sizes = [one.share.num_drawn for one in passed]
        gradients = torch.split(gradient_A, sizes)
        of_entropies = None if entropy_gradient_A is None else torch.split(entropy_gradient_A, sizes)
        sending = []
        for number in reversed(range(len(passed))):
            one = passed[number]
            outputs = [one.output]
            if self._is_last:  # only its gradients count
                given = [one.share.select_own(gradients[number])]
                if of_entropies is not None:
                    outputs.append(one.entropy_a)
                    given.append(one.share.select_own(of_entropies[number]))
            else:
                given = [self._receive_tensor(one.output.shape, self._stage + 1)]
            torch.autograd.backward(outputs, given)
            if one.received is not None:
                assert one.received.grad is not None
                sending.append(self._send_tensor(one.received.grad, self._stage - 1))
        for work in sending:
            work.wait()

    @property
    def _is_last(self) -> bool:
        return self._stage == len(self._stages) - 1

    def _make_share(self, piece: Sequences) -> TokenShare:
        inputs = PackedInputs.from_batch(piece, torch.device("cpu"), shared_prompt=self._shared_prompt)
        if self._context is None:
            return TokenShare.from_inputs(inputs, 0, 1, self._device)
        rank, size = dist.get_rank(self._context), dist.get_world_size(self._context)
        return TokenShare.from_inputs(inputs, rank, size, self._device)

    def _forward_piece(self, share: TokenShare, entropy: bool) -> _Passed:
        received = None
        if self._stage:
            received = self._receive_tensor((share.tokens_t.numel(), 1, self._geometry.hidden_size), self._stage - 1)
            received.requires_grad_(torch.is_grad_enabled())
            self._network.set_input_tensor(received)
        self._positions_t, self._predictors_a = share.positions_t, share.predictors_a
        self._targets_a, self._entropy = share.targets_a, entropy
        output: Tensor = self._network(
            share.tokens_t.unsqueeze(0),
            share.positions_t.unsqueeze(0),
            None,
            packed_seq_params=_packed(share, self._context),
        )
        if not self._is_last:
            return _Passed(received, output, output.detach().flatten()[:0], share)
        log_probs_a, entropy_a = output[0].unbind(-1)
        if self._request is not None:
            note_entropy_gradient(entropy_a, self._request)
        return _Passed(received, log_probs_a, entropy_a, share)

    def _forward_head(self, hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Replace the output layer: [t, 1, W] -> [a, 1, 2], log-probabilities and entropies of drawn tokens."""
        # With tied weights Megatron passes the input embedding as `weight`.
        weight = self._network.output_layer.weight if weight is None else weight
        first, num_tokens = self._geometry.tp_rank * len(weight), self._geometry.vocab_size
        request = HeadRequest(
            self._targets_a,
            self._temperature,
            self._entropy,
            first=first,
            num_rows=max(0, min(len(weight), num_tokens - first)),  # the last rows are padding
            group=self._tensor_group,
        )
        self._request = request
        found = head_log_probs(hidden[self._predictors_a, 0], weight, None, request)
        return torch.stack(found, dim=-1).unsqueeze(1), None

    def _at_positions(self, _: object, __: object, angles: Tensor) -> Tensor:
        """Return the rotary angles of this rank's tokens, [positions, 1, 1, D] -> [t, 1, 1, D]."""
        # A response's positions continue its prompt's. Given exactly one angle per token, Megatron maps them one to one
        # (`_apply_rotary_pos_emb_thd`).
        return angles[self._positions_t]

    def _share_results(self, passed: Sequence[_Passed], entropy: bool) -> tuple[Tensor, Tensor]:
        if self._is_last:
            columns = [torch.cat([one.share.spread_values(one.output.detach()) for one in passed])]
            columns += (
                [torch.cat([one.share.spread_values(one.entropy_a.detach()) for one in passed])] if entropy else []
            )
            known = torch.stack(columns)
            if self._context is not None:
                # Each rank's values are 0 where they are another rank's.
                dist.all_reduce(known, group=self._context)
        else:
            known = torch.empty(1 + entropy, sum(one.share.num_drawn for one in passed), device=self._device)
        if len(self._stages) > 1:
            dist.broadcast(known, src=self._stages[-1], group=self._pipeline_group)
        return known[0], known[1] if entropy else known[0, :0]

    def _send_tensor(self, tensor: Tensor, stage: int) -> Any:
        return dist.isend(tensor.contiguous(), dst=self._stages[stage], group=self._pipeline_group)

    def _receive_tensor(self, shape: Sequence[int], stage: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        dist.recv(tensor, src=self._stages[stage], group=self._pipeline_group)
        return tensor


def _packed(share: TokenShare, context: dist.ProcessGroup | None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    # Megatron sees a single sequence: `_at_positions` handles the positions, and our attention the documents.
    (ends,) = to_device([torch.tensor([0, share.tokens_t.numel()], dtype=torch.int32)], share.tokens_t.device)
    longest = share.layout.longest
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    params.packed_layout, params.context = share.layout, context
    return params


class MegatronEngine:
    """Trains a dense Llama, Qwen2 or Qwen3 model; implements `CopyingEngine`.

    Building it is collective over the actor's ranks, which the default process group must span; each rank reads only
    its own rows of the Hugging Face directory.

    Args:
        seed: of this process's random numbers (without dropout none are drawn).
        timeout_s: of collectives.
    Raises:
        ConfigError: the model is of another family, or the directory does not hold what its config.json says.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        actor: ActorConfig,
        temperature: float,
        device: torch.device,
        seed: int,
        timeout_s: float,
    ) -> None:
        prepare_megatron(device)
        layout = actor.megatron.layout(dist.get_world_size())
        self._model_dir = model_dir
        self._device = device
        context = join_groups(layout, timeout_s=timeout_s, seed=seed)
        self._actor, self._temperature = actor, temperature
        self._model = DenseModel.from_config(read_model_config(model_dir))
        self._parts = build_megatron(self._model, actor, layout, context)
        self._state = MegatronState(self._parts)
        self._forward = MegatronForward(self._parts, actor, temperature=temperature, device=device)
        self._updates = Updates(actor)
        weights = HfWeights(model_dir)
        _check_stored(self._parts, weights)
        self._state.read_weights(weights)
        self.zero_grad()

    @staticmethod
    def of_run(setup: EngineSetup) -> "MegatronEngine":
        run = setup.run
        return MegatronEngine(
            setup.model_dir,
            actor=setup.actor,
            temperature=run.rollout.temperature,
            device=setup.device,
            seed=run.seed,
            timeout_s=run.launcher.operation_timeout_s,
        )

    @property
    def optimizer_updates(self) -> int:
        return self._updates.number

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return self._forward.log_probs(batch)

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        """Accumulate gradients of `loss`, which every rank of the replica evaluates on the same values."""
        if batch is None:
            return
        log_probs_A, entropy_A = self._forward.forward(batch, entropy=True)
        # Cut the graph here: `forward` returns broadcast values, and `backward` runs the pipeline itself.
        log_probs_A, entropy_A = log_probs_A.clone().requires_grad_(), entropy_A.clone().requires_grad_()
        total = loss(log_probs_A, entropy_A)
        gradient_A, entropy_gradient_A = torch.autograd.grad(total, (log_probs_A, entropy_A), allow_unused=True)
        gradient_A = torch.zeros_like(log_probs_A) if gradient_A is None else gradient_A
        self._forward.backward(gradient_A, entropy_gradient_A)

    @torch.no_grad()
    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over replicas) by `scale`, clip, update, and clear them."""
        from megatron.core.distributed import finalize_model_grads

        wrapped, optimizer = self._parts.wrapped, self._parts.optimizer
        # Megatron's `optimizer.step` in parts, so that scale, clip and decay come in between.
        finalize_model_grads([wrapped])
        optimizer.prepare_grads()
        factor, stats = self._updates.next(float(optimizer.get_grad_norm()), scale)
        # A gradient that is not finite changes no weight; the step is logged and reported with its `grad_norm`.
        if factor is not None:
            wrapped.scale_gradients(factor)  # in place: the optimizer's gradients are views of these buffers
            for group in optimizer.param_groups:
                group["lr"] = stats.lr
            decay(self._state.decaying, self._actor, stats.lr)
            optimizer.step_with_ready_grads()
        self.zero_grad()
        return stats

    def zero_grad(self) -> None:
        self._parts.wrapped.zero_grad_buffer()
        self._parts.optimizer.zero_grad()

    def shards(self) -> Iterator[LocalShard]:
        """Return this rank's pieces of all parameters, in a fixed order; views, so copy them before the next `step`."""
        return _shards(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, and step and update counts for torch.distributed.checkpoint."""
        return {**self._state.state_dict(), **self._updates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` whose tensors were loaded in place."""
        self._state.load_state_dict(state)
        self._updates.load_state_dict(state)
        self.zero_grad()

    def export_hf(self, target: Path, saved: Path) -> None:
        self.export_share(target, saved, WHOLE)

    def export_share(self, target: Path, saved: Path, share: ExportShare) -> bool:
        """Write a share of a saved state as a Hugging Face directory, in the element type of the initial model's
        files."""
        return export_saved(saved, target, self._model_dir, _hf_names(self._parts), share)

    def open_copy(self, *, initial: bool = False) -> "MegatronCopy":
        actor = self._actor.model_copy(update={"gradient_checkpointing": False})
        parts = build_network(self._model, actor, self._parts.layout, self._parts.context)
        copy = MegatronCopy(parts, actor, temperature=self._temperature, device=self._device, policy=self)
        if initial:
            copy.read_weights(self._model_dir)
        return copy


class MegatronCopy(SharedModel):
    """Other weights of the policy, divided like it, with the same layers and kernels; implements `PolicyCopy`."""

    def __init__(
        self,
        parts: MegatronParts,
        actor: ActorConfig,
        *,
        temperature: float,
        device: torch.device,
        policy: MegatronEngine | None = None,
    ) -> None:
        super().__init__(policy)
        self._parts = parts
        self._forward = MegatronForward(parts, actor, temperature=temperature, device=device)
        with torch.no_grad():
            for parameter in parts.network.parameters():
                parameter.zero_()  # so that the vocabulary's padding is defined

    def shards(self) -> Iterator[LocalShard]:
        return _shards(self._parts)

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return self._forward.log_probs(batch)

    def _check_stored(self, weights: HfWeights) -> None:
        _check_stored(self._parts, weights)


class MegatronFrozenModel(MegatronCopy):
    """A model that is not trained, spread over all ranks of the default group; implements `FrozenEngine`.

    Building it is collective, and reads the weights in `weights_dir`. Raises ConfigError if the model is of another
    family, or the directory does not hold what its config.json says.
    """

    def __init__(
        self,
        model_dir: Path,
        actor: ActorConfig,
        *,
        temperature: float,
        device: torch.device,
        weights_dir: Path,
        timeout_s: float,
    ) -> None:
        prepare_megatron(device)
        layout = actor.megatron.layout(dist.get_world_size())
        context = join_groups(layout, timeout_s=timeout_s, seed=0)
        parts = build_network(DenseModel.from_config(read_model_config(model_dir)), actor, layout, context)
        super().__init__(parts, actor, temperature=temperature, device=device)
        self.read_weights(weights_dir)

    @staticmethod
    def of_run(setup: EngineSetup) -> "MegatronFrozenModel":
        run = setup.run
        return MegatronFrozenModel(
            setup.model_dir,
            run.ref.computation(run.model.dtype),
            temperature=run.rollout.temperature,
            device=setup.device,
            weights_dir=setup.weights_dir or setup.model_dir,
            timeout_s=run.launcher.operation_timeout_s,
        )


def _shards(parts: MegatronParts) -> Iterator[LocalShard]:
    for name, parameter in parts.network.named_parameters():
        yield from megatron_shards(name, parameter, parts.geometry)


def _check_stored(parts: MegatronParts, weights: HfWeights) -> None:
    """Refuse files with tensors that the model would not use; see `HfWeights.check_used`."""
    weights.check_used(_hf_names(parts), model="Megatron's model", ignored=re.compile(r"rotary_emb\.inv_freq"))


def _hf_names(parts: MegatronParts) -> dict[str, tuple[str, ...]]:
    config = parts.network.config
    return hf_weight_names(parts.geometry, qkv_bias=config.add_qkv_bias, qk_norm=config.qk_layernorm)


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Run:
    """This rank's contiguous run of one flattened parameter."""

    main: Tensor  # float32 values, flat
    boxes: tuple[FlatBox, ...]  # the Hugging Face boxes it covers
    replica: bool  # other ranks save them
    decays: bool  # whether AdamW's weight decay applies


class MegatronState:
    """One rank's master weights and optimizer state under Hugging Face's names: views into its optimizer.

    With the distributed optimizer this rank owns a run of every flattened parameter in float32, and AdamW's two moments
    of it. Each is presented as boxes of Hugging Face tensors (`FlatBox`), so in-place loading and saving need no
    gathering. Tensor-parallel ranks that hold the same norm, and the last stage's copy of a tied embedding, are loaded
    but not saved.
    """

    # Source: megatron-core 0.16.1, `core/optimizer/distrib_optimizer.py`.

    def __init__(self, parts: MegatronParts) -> None:
        self._parts = parts
        self._optimizer = parts.optimizer
        self._runs = tuple(self._find_runs())
        # Views of the master weights that decay.
        self.decaying = [run.main.detach() for run in self._runs if run.decays]
        with torch.no_grad():
            for run in self._runs:
                # Not all elements have a box: the vocabulary's padding must be defined, too.
                run.main.zero_()
        self._begin_moments()

    def read_weights(self, weights: HfWeights) -> None:
        """Read this rank's boxes from safetensors; collective over replicas.
        Raises ConfigError if a weight is missing or has another shape."""
        weights.fill(
            LocalShard(flat.name, flat.shape, flat.box, flat.view_of_run(run.main.detach()))
            for run in self._runs
            for flat in run.boxes
        )
        self._publish_masters()

    def state_dict(self) -> dict[str, Any]:
        """Return `model`, `optimizer` (moments by weight), and AdamW's update count."""
        states = self._optimizer.optimizer.state
        moments = {kind: self._box_tensors(partial(_moment, states, kind)) for kind in MOMENTS}
        model = self._box_tensors(lambda main: main.detach())
        return {"model": model, "optimizer": {**moments, "step": torch.tensor(self._adam_step())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the count, and publish the weights, which were loaded in place; collective over replicas."""
        self._set_adam_step(int(state["optimizer"]["step"]))
        self._publish_masters()

    def _find_runs(self) -> Iterator[_Run]:
        """Yield this rank's run of every parameter that it has a part of, in model order."""
        geometry, optimizer = self._parts.geometry, self._optimizer
        for name, parameter in self._parts.network.named_parameters():
            if parameter not in optimizer.model_param_group_index_map:
                continue  # this rank has no part of it
            group, order = optimizer.model_param_group_index_map[parameter]
            run = optimizer._get_model_param_range_map(parameter)["param"]
            boxes = tuple(flat_boxes(name, parameter, geometry, start=run.start, stop=run.end))
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            tied_copy = geometry.tied and name == "output_layer.weight"
            main = optimizer.optimizer.param_groups[group]["params"][order]
            yield _Run(main, boxes, tied_copy or (geometry.tp_rank > 0 and not is_cut), decays(parameter))

    def _box_tensors(self, values_of: Callable[[Tensor], Tensor]) -> dict[str, BoxedTensor]:
        parts: dict[str, list[BoxPart]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for run in self._runs:
            for flat in run.boxes:
                parts[flat.name].append(BoxPart(flat.box, flat.view_of_run(values_of(run.main)), run.replica))
                shapes[flat.name] = flat.shape
        return {name: BoxedTensor(shapes[name], held) for name, held in parts.items()}

    @torch.no_grad()
    def _publish_masters(self) -> None:
        """Copy the master weights into the model, and gather those of all replicas."""
        self._optimizer._copy_main_params_to_model_params()
        self._parts.wrapped.start_param_sync(force_sync=True)

    def _begin_moments(self) -> None:
        """Create AdamW's state as its first update would, so that a saved state can be loaded in place."""
        self._optimizer.init_state_fn(self._optimizer.optimizer, self._optimizer.config)
        self._set_adam_step(0)

    def _adam_step(self) -> int:
        # torch's AdamW counts per parameter; Apex, Transformer Engine and MindSpeed count per group.
        inner = self._optimizer.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            return int(inner.param_groups[0].get("step", 0))
        return max((int(state["step"]) for state in inner.state.values()), default=0)

    def _set_adam_step(self, step: int) -> None:
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            if not isinstance(inner, torch.optim.AdamW):
                group["step"] = step
                continue
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(step))


def _moment(states: Any, kind: str, main: Tensor) -> Tensor:
    moment: Tensor = states[main][kind]
    return moment
