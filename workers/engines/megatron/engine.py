"""The `megatron` training engine: tensor, context, pipeline and data parallelism, and Megatron's distributed optimizer.

Every data-parallel replica holds the whole model, split over its tensor-parallel ranks and pipeline stages; optimizer
state and float32 master weights are split over all ranks. With `autocast: bfloat16` parameters are bfloat16. With an
adapter (`lora`) all of this is the adapter's, and the model is frozen.

    forward_backward(batch, loss)   all ranks of a replica get the same rows; gradients of the *sum* accumulate
    forward_backward(None, loss)    a replica without rows has nothing to do
    step(scale)                     sums over replicas, gradients * scale, clip, AdamW on this rank's share, all-gather

State and weights use Hugging Face's names and boxes, so a checkpoint loads into any other division of the model.

Collectives: `step` and `load_state_dict` block until all ranks call them, `log_probs` and `forward_backward` until
those of the replica do.
Legend of shapes: A drawn tokens of the micro-batch.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weightsync.sender import Shard
from workers.checkpoint.saved_shards import WHOLE, BoxedTensor, BoxPart, ExportShare
from workers.data.model_files import read_model_config
from workers.engines.base import (
    DivisibleLoss,
    EngineSetup,
    LocalShard,
    LossFunction,
    StepStats,
    Updates,
    check_sequences,
    decay,
    decays,
)
from workers.engines.hf.export import export_adapted, export_saved
from workers.engines.hf.weights import HfWeights
from workers.engines.lora import PREFIX, adapter_targets, fill_adapter
from workers.engines.megatron.adapter import MegatronAdapter
from workers.engines.megatron.megatron_context import TokenShare
from workers.engines.megatron.megatron_model import (
    MegatronParts,
    build_megatron,
    build_network,
    join_groups,
    prepare_megatron,
)
from workers.engines.megatron.names import FlatBox, MegatronGeometry, flat_boxes, hf_weight_names, megatron_shards
from workers.engines.megatron.schedule import PipelineSchedule, Slot, StageTask
from workers.engines.offload import OffloadedState
from workers.engines.packed_forward import HeadRequest, PackedInputs, cut, head_log_probs, note_gradients
from workers.engines.shared_model import BaseOfPolicy, SharedModel
from workers.rows.packed_rows import Sequences
from workers.settings.engines import ActorConfig
from workers.settings.lora import LoraConfig
from workers.settings.megatron import DenseModel, check_adapted

# This rank's stage of the pipeline: forward and backward passes of pieces of micro-batches, as `PipelineSchedule` says.
#
#     forward_backward(batch, loss) ... forward_backward(batch, loss) ... finish()
#     pieces enter, others leave        the pipeline stays filled         the last ones leave; figures of all losses
#
# A loss that is a sum over samples (`DivisibleLoss`) is evaluated for each piece, so that a piece goes back as soon as
# it has arrived; any other one for the whole micro-batch, when its last piece has. The last stage evaluates losses for
# their gradients; in `finish` it broadcasts the log-probabilities of all micro-batches to its pipeline, and every rank
# evaluates each loss once, whole, for its figures.
#
# Where ranks share the tokens of a piece (`TokenShare`), each handles its own; otherwise t is T and a is A. Between the
# layers tensor-parallel ranks have t / TP of them (sequence parallelism).
#
# Legend of shapes: t tokens of a piece on this rank, W width of the residual stream, A drawn tokens, a those that this
# rank's tokens predict.


@dataclass
class _MicroBatch:
    """A micro-batch on its way through the stages."""

    pieces: range  # numbers in the schedule
    num_drawn: list[int]  # of each piece
    loss: LossFunction | None = None  # None: forward passes only
    parts: Sequence[LossFunction] = ()  # the loss of each piece, if it can be divided
    evaluated: bool = False  # whether the whole loss was called
    results: list[Tensor] = field(default_factory=list)  # of each piece on the last stage: float32 [1 or 2, A]


@dataclass
class _Passed:
    """What the backward pass of a piece needs."""

    received: Tensor | None  # [t / TP, 1, W] from the previous part of the model; None in the first
    output: Tensor  # [t / TP, 1, W] for the next one; in the last log-probabilities [a]
    entropy_a: Tensor | None = None  # in the last, if requested


class _Passes:
    """Pieces on their way through this rank's stage; collective over the ranks of a replica."""

    def __init__(self, stage: "MegatronStage", *, backward: bool) -> None:
        self._stage = stage
        self._backward = backward
        self._schedule = PipelineSchedule(stage.num_stages, stage.num_chunks, backward=backward)
        self._shares: list[TokenShare] = []  # of each piece
        self._micro_batch_of: list[_MicroBatch] = []
        self.micro_batches: list[_MicroBatch] = []
        self._passed: dict[tuple[int, int], _Passed] = {}  # (piece, part of the model), between the two passes
        self._given: dict[int, list[Tensor]] = {}  # piece -> gradients of its results, on the last stage
        self._arriving: dict[StageTask, tuple[Tensor, Any]] = {}  # what a task of this stage needs, and its transfer
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def add_micro_batch(self, batch: Sequences, loss: LossFunction | None) -> None:
        pieces = list(cut(batch, self._stage.num_pieces))
        first = self._schedule.num_pieces
        added = _MicroBatch(range(first, first + len(pieces)), [piece.num_drawn for piece in pieces], loss)
        if len(pieces) > 1 and isinstance(loss, DivisibleLoss):
            sizes = [(len(piece.lengths_N), piece.num_drawn) for piece in pieces]
            added.parts = loss.cut_loss(sizes) or ()
        self._shares += [self._stage.make_share(piece) for piece in pieces]
        self._micro_batch_of += [added] * len(pieces)
        self.micro_batches.append(added)
        self._schedule.add_pieces(len(pieces), together=loss is not None and not added.parts)

    def advance(self, *, drain: bool) -> None:
        """Compute until all pieces have entered, or with `drain` until all have left."""
        self._stage.note_backward(self._backward)
        for slot in self._schedule.slots(drain=drain):
            task = slot[self._stage.stage]
            if task is not None:
                (self._backward_pass if task.backward else self._forward_pass)(task)
            self._exchange(slot)
        if drain:
            self.settle()

    def settle(self) -> None:
        """Wait for the transfers that both of their ends began."""
        for _, work in (*self._arriving.values(), *self._sent):
            work.wait()
        self._arriving.clear()
        self._sent.clear()

    def _forward_pass(self, task: StageTask) -> None:
        received = None if not task.part else self._take(task)
        if received is not None:
            received.requires_grad_(self._backward)
        share, entropy = self._shares[task.piece], self._backward
        output, entropy_a = self._stage.compute(task.part, share, received, entropy=entropy)
        if entropy_a is not None:
            self._take_results(task.piece, output, entropy_a if entropy else None)
        else:
            self._outgoing = output.detach()
        if self._backward:
            self._passed[task.piece, task.part] = _Passed(received, output, entropy_a)

    def _backward_pass(self, task: StageTask) -> None:
        passed = self._passed.pop((task.piece, task.part))
        if passed.entropy_a is None:
            torch.autograd.backward([passed.output], [self._take(task)])
        else:
            given = self._given.pop(task.piece)  # without the entropies' if the loss does not use them
            torch.autograd.backward([passed.output, passed.entropy_a][: len(given)], given)
        if passed.received is not None:
            assert passed.received.grad is not None
            self._outgoing = passed.received.grad

    def _take_results(self, piece: int, log_probs_a: Tensor, entropy_a: Tensor | None) -> None:
        """Keep a piece's results on the last stage, and find their gradients once the loss can be evaluated."""
        columns = [log_probs_a] if entropy_a is None else [log_probs_a, entropy_a]
        whole = torch.stack([self._shares[piece].spread_values(each.detach()) for each in columns])
        if self._stage.context is not None:
            dist.all_reduce(whole, group=self._stage.context)  # each rank's values are 0 where they are another rank's
        micro_batch = self._micro_batch_of[piece]
        micro_batch.results.append(whole)
        if micro_batch.loss is None:
            return
        if micro_batch.parts:
            self._find_gradients([piece], whole, micro_batch.parts[piece - micro_batch.pieces.start])
        elif piece == micro_batch.pieces[-1]:
            self._find_gradients(micro_batch.pieces, torch.cat(micro_batch.results, dim=1), micro_batch.loss)
            micro_batch.evaluated = True

    @torch.enable_grad()
    def _find_gradients(self, pieces: Sequence[int], values: Tensor, loss: LossFunction) -> None:
        """Note the gradients of pieces' own results, from those of the values [2, A] that the loss reads."""
        # Cut the graph here: the values come from several ranks, and the schedule runs the backward passes itself.
        log_probs_A, entropy_A = (row.clone().requires_grad_() for row in values)
        total = loss(log_probs_A, entropy_A)
        found = torch.autograd.grad(total, (log_probs_A, entropy_A), allow_unused=True)
        gradient_A = torch.zeros_like(log_probs_A) if found[0] is None else found[0]
        gradients = [gradient_A] if found[1] is None else [gradient_A, found[1]]
        sizes = [self._shares[piece].num_drawn for piece in pieces]
        for piece, *parts in zip(pieces, *(torch.split(each, sizes) for each in gradients), strict=True):
            self._given[piece] = [self._shares[piece].select_own(part) for part in parts]

    def _take(self, task: StageTask) -> Tensor:
        """Return what a task needs from another stage, once it has arrived."""
        tensor, work = self._arriving.pop(task)
        work.wait()
        return tensor

    def _exchange(self, slot: Slot) -> None:
        """Send and receive what the stages computed in a slot. Its transfers are begun as one, so that stages that send
        to each other do not wait for each other."""
        stage, sends, receives = self._stage, [], []
        for sender, task in enumerate(slot):
            next_task = None if task is None else self._schedule.find_next(task)
            if task is None or next_task is None:
                continue
            receiver = next_task.part % stage.num_stages
            if sender == stage.stage:
                sends.append(stage.transfer(dist.isend, self._outgoing.contiguous(), receiver))
            elif receiver == stage.stage:
                receives.append((next_task, stage.transfer(dist.irecv, stage.empty(self._shares[task.piece]), sender)))
        operations = [*sends, *(each for _, each in receives)]
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        works *= len(operations) // len(works)  # some backends return one for all
        self._sent += [(each.tensor, work) for each, work in zip(sends, works, strict=False)]
        for (task, each), work in zip(receives, works[len(sends) :], strict=True):
            self._arriving[task] = each.tensor, work
        while len(self._sent) > 2 * stage.num_stages:  # their memory is bounded, whatever the number of pieces
            self._sent.popleft()[1].wait()


class MegatronStage:
    """This rank's part of the model; all methods that compute are collective over the ranks of a replica."""

    def __init__(self, parts: MegatronParts, actor: ActorConfig, *, temperature: float, device: torch.device) -> None:
        from megatron.core import parallel_state

        self._networks: list[Any] = [chunk.network for chunk in parts.chunks]
        self._geometry = parts.geometry
        self._temperature = temperature
        self._dtype = torch.bfloat16 if actor.autocast == "bfloat16" else torch.float32
        self._device = device
        self._shared_prompt = actor.shared_prompt
        self.num_stages, self.num_chunks = parts.layout.stages, parts.layout.chunks
        self.num_pieces = actor.megatron.pipeline_pieces if self.num_stages > 1 else 1
        self._tensor = parts.layout.tensor
        self._tensor_group = parallel_state.get_tensor_model_parallel_group() if self._tensor > 1 else None
        self._pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self._ranks = dist.get_process_group_ranks(self._pipeline_group)
        self.stage = self._ranks.index(dist.get_rank())
        self.context = parts.context
        self._positions_t = self._predictors_a = self._targets_a = torch.empty(0, dtype=torch.int64)
        self._entropy = False
        self._request: HeadRequest | None = None
        self._adapter = parts.adapter
        self._training = _Passes(self, backward=True)
        for network in self._networks:
            network.rotary_pos_emb.register_forward_hook(self._at_positions)
        if self._is_last:
            self._networks[-1].output_layer.forward = self._forward_head
        if self.num_stages > 1:
            # A backend's communicator is made by all of a group's ranks, and transfers are those of some.
            dist.all_reduce(torch.zeros(1, device=device), group=self._pipeline_group)

    @torch.no_grad()
    def log_probs(self, batch: Sequences | None) -> Tensor:
        """See `TrainEngine.log_probs`; on every rank of the replica."""
        if batch is None:
            return torch.empty(0, device=self._device)
        check_sequences(batch, vocab_size=self._geometry.vocab_size)
        passes = _Passes(self, backward=False)
        passes.add_micro_batch(batch, None)
        passes.advance(drain=True)
        return self._share_results(passes.micro_batches)[0][0]

    def forward_backward(self, batch: Sequences, loss: LossFunction) -> None:
        """Let a micro-batch enter the pipeline; on a single stage its passes are done. Raises BadRequest, see
        `check_sequences`."""
        check_sequences(batch, vocab_size=self._geometry.vocab_size)
        self._training.add_micro_batch(batch, loss)
        if self.num_stages == 1:
            self.finish()
        else:
            self._training.advance(drain=False)

    def finish(self) -> None:
        """Complete all backward passes, and evaluate losses for their figures on ranks that have not done so."""
        passes, self._training = self._training, _Passes(self, backward=True)
        passes.advance(drain=True)
        if not passes.micro_batches:
            return
        with torch.no_grad():
            for micro_batch, values in zip(
                passes.micro_batches, self._share_results(passes.micro_batches), strict=True
            ):
                if not micro_batch.evaluated and micro_batch.loss is not None:
                    micro_batch.loss(values[0], values[1])

    def abandon(self) -> None:
        """Forget all pieces that are under way."""
        self._training.settle()
        self._training = _Passes(self, backward=True)

    def note_backward(self, follows: bool) -> None:
        """Note whether the next passes train: an adapter drops inputs in those alone."""
        if self._adapter is not None:
            self._adapter.trains = follows

    @property
    def _is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def make_share(self, piece: Sequences) -> TokenShare:
        inputs = PackedInputs.from_batch(piece, torch.device("cpu"), shared_prompt=self._shared_prompt)
        rank, size = (
            (0, 1) if self.context is None else (dist.get_rank(self.context), dist.get_world_size(self.context))
        )
        return TokenShare.from_inputs(inputs, rank, size, self._device, divisor=self._tensor)

    def compute(
        self, part: int, share: TokenShare, received: Tensor | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the forward pass of a part of the model: [t / TP, 1, W] and None, or in the model's last part
        log-probabilities [a] and entropies [a]."""
        network = self._networks[part // self.num_stages]
        if received is not None:
            network.set_input_tensor(received)
        self._positions_t, self._predictors_a = share.positions_t, share.predictors_a
        self._targets_a, self._entropy = share.targets_a, entropy
        output: Tensor = network(
            share.tokens_t.unsqueeze(0),
            share.positions_t.unsqueeze(0),
            None,
            packed_seq_params=_packed(share, self.context),
        )
        if part < self.num_stages * self.num_chunks - 1:
            return output, None
        log_probs_a, entropy_a = output[0].unbind(-1)
        if self._request is not None:
            note_gradients(self._request, entropy_a)
        return log_probs_a, entropy_a

    def transfer(self, kind: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[stage], group=self._pipeline_group)

    def empty(self, share: TokenShare) -> Tensor:
        """Return memory for what travels between two parts of the model, or its gradient."""
        shape = (share.tokens_t.numel() // self._tensor, 1, self._geometry.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _forward_head(self, hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Replace the output layer: [t / TP, 1, W] -> [a, 1, 2], log-probabilities and entropies of drawn tokens."""
        # With tied weights Megatron passes the input embedding as `weight`.
        weight = self._networks[-1].output_layer.weight if weight is None else weight
        if self._tensor > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # `head_log_probs` gives every rank the whole gradient, of which each takes its tokens'.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
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

    def _share_results(self, micro_batches: Sequence[_MicroBatch]) -> Sequence[Tensor]:
        """Return the values of each micro-batch, float32 [1 or 2, A], on every rank; without loss only one row."""
        num_rows = 1 if micro_batches[0].loss is None else 2
        sizes = [sum(each.num_drawn) for each in micro_batches]
        if self._is_last:
            known = torch.cat([values for each in micro_batches for values in each.results], dim=1)
        else:
            known = torch.empty(num_rows, sum(sizes), device=self._device)
        if self.num_stages > 1:
            dist.broadcast(known, src=self._ranks[-1], group=self._pipeline_group)
        return torch.split(known, sizes, dim=1)


def _packed(share: TokenShare, context: dist.ProcessGroup | None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    # Megatron sees a single sequence: `_at_positions` handles the positions, and our attention the documents. Only its
    # rotary embedding reads the ends, three times per call and in the host (`_apply_rotary_pos_emb_thd`): on the device
    # each would be a wait.
    ends = torch.tensor([0, share.tokens_t.numel()], dtype=torch.int32)
    longest = share.layout.longest
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    params.packed_layout, params.context = share.layout, context
    return params


class MegatronEngine(OffloadedState):
    """Trains a dense Llama, Qwen2 or Qwen3 model; implements `CopyingEngine` and `SleepingTrainer`.

    Building it is collective over the actor's ranks, which the default process group must span; each rank reads only
    its own rows of the Hugging Face directory.

    Args:
        seed: of this process's random numbers (without dropout none are drawn), and of a new adapter.
        timeout_s: of collectives.
        lora: train an adapter; None: all weights.
        merged: with `lora`, whether `shards` are whole weights with the adapter added, or the adapter alone.
    Raises:
        ConfigError: the model is of another family, or the directory does not hold what its config.json says; or an
            adapter does not fit it, or its division.
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
        lora: LoraConfig | None = None,
        merged: bool = False,
    ) -> None:
        prepare_megatron(device)
        layout = actor.megatron.layout(dist.get_world_size())
        self._model_dir = model_dir
        self._device = device
        context = join_groups(layout, timeout_s=timeout_s, seed=seed)
        self._actor, self._temperature = actor, temperature
        self._model = DenseModel.from_config(read_model_config(model_dir))
        weights = HfWeights(model_dir)
        self._adapter = None if lora is None else self._make_adapter(lora, weights)
        self._merged, self._seed = merged, seed
        self._parts = build_megatron(self._model, actor, layout, context, device, self._adapter)
        self._state = MegatronState(self._parts)
        self._stage = MegatronStage(self._parts, actor, temperature=temperature, device=device)
        self._updates, self._has_gradients = Updates(actor), False
        self._copies: list[MegatronCopy] = []
        _check_stored(self._parts, weights)
        if self._adapter is None:
            self._state.fill_masters(weights.fill)
        else:
            self._read_base(weights)
            self._begin_adapter(self._adapter)
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
            lora=run.lora,
            merged=not run.sends_adapter,
        )

    @property
    def optimizer_updates(self) -> int:
        return self._updates.number

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return self._stage.log_probs(batch)

    def forward_backward(self, batch: Sequences | None, loss: LossFunction) -> None:
        """Accumulate gradients of `loss`; `finish_micro_batches`, or `step`, completes those of several stages."""
        if batch is None:
            return
        if not self._has_gradients and self._adapter is not None and self._adapter.lora.dropout:
            self._seed_dropout()
        self._has_gradients = True
        self._stage.forward_backward(batch, loss)

    def finish_micro_batches(self) -> None:
        self._stage.finish()

    @torch.no_grad()
    def step(self, scale: float) -> StepStats:
        """Multiply the gradients (summed over replicas) by `scale`, clip, update, and clear them."""
        from megatron.core.distributed import finalize_model_grads

        with torch.enable_grad():
            self._stage.finish()
        wrapped, optimizer = [chunk.wrapped for chunk in self._parts.chunks], self._parts.optimizer
        # Megatron's `optimizer.step` in parts, so that scale, clip and decay come in between.
        finalize_model_grads(wrapped)
        optimizer.prepare_grads()
        factor, stats = self._updates.next(_global_norm(optimizer), scale)
        # A gradient that is not finite changes no weight; the step is logged and reported with its `grad_norm`.
        if factor is not None:
            for each in wrapped:
                each.scale_gradients(factor)  # in place: the optimizer's gradients are views of these buffers
            for group in optimizer.param_groups:
                group["lr"] = stats.lr
            decay(self._state.decaying, self._actor, stats.lr)
            optimizer.step_with_ready_grads()
        self.zero_grad()
        return stats

    def zero_grad(self) -> None:
        self._stage.abandon()
        self._zero_gradients()
        self._parts.optimizer.zero_grad()

    def shards(self) -> Iterator[Shard]:
        """See `TrainEngine.shards`."""
        adapter = self._adapter
        if adapter is None:
            yield from _shards(self._parts)
            return
        for chunk in self._parts.chunks:
            if self._merged:
                yield from adapter.merged_shards(chunk.network, chunk.geometry)
            else:
                yield from adapter.shards(chunk.network, chunk.geometry)

    def state_dict(self) -> dict[str, Any]:
        """Return model (with an adapter, that alone), optimizer, and step and update counts for
        torch.distributed.checkpoint."""
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
        files; with an adapter, the merged model, and the adapter beside it."""
        names = _hf_names(self._parts)
        if self._adapter is not None:
            return export_adapted(saved, target, self._model_dir, names, self._adapter.lora, share)
        return export_saved(saved, target, self._model_dir, names, share)

    def open_copy(self, *, initial: bool = False) -> "MegatronCopy | BaseOfPolicy":
        if self._adapter is not None:
            assert initial, "older adapters are not kept"
            return BaseOfPolicy(self, self._adapter.switch)
        actor = self._actor.model_copy(update={"gradient_checkpointing": False})
        parts = build_network(self._model, actor, self._parts.layout, self._parts.context, self._device)
        copy = MegatronCopy(parts, actor, temperature=self._temperature, device=self._device, policy=self)
        if initial:
            copy.read_weights(self._model_dir)
        self._copies.append(copy)
        return copy

    def _make_adapter(self, lora: LoraConfig, weights: HfWeights) -> MegatronAdapter:
        targets = adapter_targets({name: weights.shape(name) for name in weights.names}, lora)
        check_adapted(targets, self._model, self._actor.megatron)
        return MegatronAdapter(lora, targets)

    @torch.no_grad()
    def _read_base(self, weights: HfWeights) -> None:
        for chunk in self._parts.chunks:
            for name, parameter in chunk.network.named_parameters():
                if not parameter.requires_grad:
                    parameter.zero_()  # so that the vocabulary's padding is defined
                    weights.fill(megatron_shards(name, parameter, chunk.geometry))

    def _begin_adapter(self, adapter: MegatronAdapter) -> None:
        def fill(shards: Iterable[LocalShard]) -> None:
            named = (replace(shard, name=PREFIX + shard.name) for shard in shards)
            fill_adapter(named, adapter.lora, adapter.targets, seed=self._seed)

        self._state.fill_masters(fill)

    def _seed_dropout(self) -> None:
        """Begin new random numbers for an update, since no checkpoint has the state of Megatron's own generators, which
        its layers draw from under tensor parallelism. Ranks have other tokens or inputs, so each has its own."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        own = np.random.SeedSequence([self._seed, dist.get_rank(), self._updates.number]).generate_state(1)
        model_parallel_cuda_manual_seed(int(own[0]))

    def _zero_gradients(self) -> None:
        for chunk in self._parts.chunks:
            chunk.wrapped.zero_grad_buffer()
        self._has_gradients = False

    def _prepare_sleep(self) -> None:
        self._stage.finish()  # what the stages keep for pieces under way would stay on the device
        _free_shared_buffers()

    def _state_tensors(self) -> Iterator[Tensor]:
        inner = self._parts.optimizer.optimizer
        for chunk in self._parts.chunks:
            yield from chunk.network.parameters()
            if self._has_gradients:
                yield from _gradient_buffers(chunk.wrapped)
        for group in inner.param_groups:  # the master weights that this rank owns
            yield from group["params"]
        for moments in inner.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))
        for copy in self._copies:  # they sleep and wake with the policy
            yield from copy._state_tensors()

    def _scratch_tensors(self) -> Iterator[Tensor]:
        """Return the buffers of gradients, the largest part with many replicas, while they are zero."""
        for chunk in self._parts.chunks if not self._has_gradients else ():
            yield from _gradient_buffers(chunk.wrapped)

    def _scratch_lost(self) -> None:
        if not self._has_gradients:
            self._zero_gradients()


class MegatronCopy(SharedModel, OffloadedState):
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
        self._device = device
        self._parts = parts
        self._stage = MegatronStage(parts, actor, temperature=temperature, device=device)
        with torch.no_grad():
            for chunk in parts.chunks:
                for parameter in chunk.network.parameters():
                    parameter.zero_()  # so that the vocabulary's padding is defined

    def shards(self) -> Iterator[LocalShard]:
        return _shards(self._parts)

    def log_probs(self, batch: Sequences | None) -> Tensor:
        return self._stage.log_probs(batch)

    def _prepare_sleep(self) -> None:
        _free_shared_buffers()

    def _state_tensors(self) -> Iterable[Tensor]:
        return (parameter for chunk in self._parts.chunks for parameter in chunk.network.parameters())

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
        parts = build_network(DenseModel.from_config(read_model_config(model_dir)), actor, layout, context, device)
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


def _global_norm(optimizer: Any) -> float:
    """Return the norm of all ranks' gradients; waits once, where Megatron without Apex waits for each parameter."""
    gradients = optimizer.get_main_grads_for_grad_norm()
    squares = [norm.square() for norm in torch._foreach_norm(gradients)] if gradients else []
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=torch.cuda.current_device())
    dist.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return float(total.sqrt())


def _gradient_buffers(wrapped: Any) -> Iterator[Tensor]:
    """Return the contiguous memory behind all `main_grad`s of a `DistributedDataParallel`."""
    yield from (buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers))


def _free_shared_buffers() -> None:
    """Free the memory in which sequence-parallel layers gather their inputs; they allocate it again."""
    from megatron.core import parallel_state

    parallel_state.get_global_memory_buffer().buffer.clear()


def _shards(parts: MegatronParts) -> Iterator[LocalShard]:
    for chunk in parts.chunks:
        for name, parameter in chunk.network.named_parameters():
            yield from megatron_shards(name, parameter, chunk.geometry)


def _check_stored(parts: MegatronParts, weights: HfWeights) -> None:
    """Refuse files with tensors that the model would not use; see `HfWeights.check_used`."""
    weights.check_used(_hf_names(parts), model="Megatron's model", ignored=re.compile(r"rotary_emb\.inv_freq"))


def _hf_names(parts: MegatronParts) -> dict[str, tuple[str, ...]]:
    config = parts.chunks[0].network.config
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

    def fill_masters(self, fill: Callable[[Iterable[LocalShard]], None]) -> None:
        """Let `fill` write the values of this rank's boxes; collective over replicas."""
        fill(
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
        for chunk in self._parts.chunks:
            for name, parameter in chunk.network.named_parameters():
                if parameter in self._optimizer.model_param_group_index_map:  # else this rank has no part of it
                    yield self._find_run(chunk.geometry, name, parameter)

    def _find_run(self, geometry: MegatronGeometry, name: str, parameter: Tensor) -> _Run:
        optimizer = self._optimizer
        group, order = optimizer.model_param_group_index_map[parameter]
        run = optimizer._get_model_param_range_map(parameter)["param"]
        boxes = tuple(flat_boxes(name, parameter, geometry, start=run.start, stop=run.end))
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        tied_copy = geometry.tied and name == "output_layer.weight"
        main = optimizer.optimizer.param_groups[group]["params"][order]
        return _Run(main, boxes, tied_copy or (geometry.tp_rank > 0 and not is_cut), decays(parameter))

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
        for chunk in self._parts.chunks:
            chunk.wrapped.start_param_sync(force_sync=True)

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
