"""One stage's forward and backward over the pieces of a micro-batch, and log-probabilities over a cut vocabulary.

All pieces go forward through the stages, then backward in reverse order (GPipe): the loss is a function of all of a
micro-batch's log-probabilities, so no piece can go back before the last one came.

    stage 0   0 1 2 3 . . . 3 2 1 0          memory: the activations of one micro-batch, as without pieces
    stage 1   . 0 1 2 3 L 3 2 1 0 .          L: loss

The last stage then tells the others of its pipeline the log-probabilities, so every rank knows the same.

Legend of shapes: T tokens of a piece, W width of the residual stream, A answer tokens, V this rank's vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import ActorConfig
from workers.engines.base import Sequences
from workers.engines.megatron_model import MegatronParts
from workers.engines.packed_forward import PackedInputs


@dataclass
class _Passed:
    """What a stage keeps of a piece until its backward pass.

    Attributes:
        received: [T, 1, W] of the stage before; None on the first.
        output: [T, 1, W] for the next stage; on the last log-probabilities [A].
        entropy_A: of the last stage, without gradient.
    """

    received: Tensor | None
    output: Tensor
    entropy_A: Tensor


class MegatronForward:
    """This rank's stage. `forward` and `backward` are collective over the ranks of a replica."""

    def __init__(self, parts: MegatronParts, actor: ActorConfig, *, temperature: float, device: torch.device) -> None:
        """Args:
        parts: the model.
        actor: how it is computed.
        temperature: divides the logits.
        device: this rank's.
        """
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
        self._positions_T = self._predictors_A = torch.empty(0, dtype=torch.int64)
        self._passed: list[_Passed] = []
        self._network.rotary_pos_emb.register_forward_hook(self._at_positions)
        if self._is_last:
            self._network.output_layer.register_forward_pre_hook(self._keep_predictors)

    def forward(self, batch: Sequences, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return float32 [A] log-probabilities and entropies of the answers' tokens, on every rank of the replica.

        Keeps what `backward` needs where gradients are enabled. Without `entropy` the second result is empty.
        """
        pieces = [
            PackedInputs.of(piece, self._device, shared_prompt=self._shared_prompt)
            for piece in cut(batch, self._num_pieces)
        ]
        sending, passed = [], []
        for inputs in pieces:
            passed.append(self._forward_piece(inputs, entropy))
            if not self._is_last:
                sending.append(self._send(passed[-1].output.detach(), self._stage + 1))
        for work in sending:
            work.wait()
        self._passed = passed if torch.is_grad_enabled() else []
        return self._shared([inputs.targets_A.numel() for inputs in pieces], passed, entropy)

    def backward(self, gradient_A: Tensor) -> None:
        """Accumulate the parameters' gradients for the last `forward`.

        Args:
            gradient_A: of its log-probabilities; only the last stage's counts.
        """
        passed, self._passed = self._passed, []
        gradients = torch.split(gradient_A, [one.output.numel() for one in passed]) if self._is_last else ()
        sending = []
        for number in reversed(range(len(passed))):
            one = passed[number]
            gradient = gradients[number] if self._is_last else self._receive(one.output.shape, self._stage + 1)
            torch.autograd.backward(one.output, gradient)
            if one.received is not None:
                assert one.received.grad is not None
                sending.append(self._send(one.received.grad, self._stage - 1))
        for work in sending:
            work.wait()

    @property
    def _is_last(self) -> bool:
        return self._stage == len(self._stages) - 1

    def _forward_piece(self, inputs: PackedInputs, entropy: bool) -> _Passed:
        received = None
        if self._stage:
            received = self._receive((inputs.tokens_T.numel(), 1, self._geometry.hidden_size), self._stage - 1)
            received.requires_grad_(torch.is_grad_enabled())
            self._network.set_input_tensor(received)
        self._positions_T, self._predictors_A = inputs.positions_T, inputs.predictors_A
        output: Tensor = self._network(
            inputs.tokens_T.unsqueeze(0), inputs.positions_T.unsqueeze(0), None, packed_seq_params=_packed(inputs)
        )
        if not self._is_last:
            return _Passed(received, output, output.detach().flatten()[:0])
        log_probs_A, entropy_A = self._log_probs(output[0], inputs.targets_A, entropy)
        return _Passed(received, log_probs_A, entropy_A)

    def _keep_predictors(self, _: object, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Have the output layer compute logits of the answers' positions only: [T, 1, W] -> [A, 1, W]."""
        return (arguments[0][self._predictors_A], *arguments[1:])

    def _at_positions(self, _: object, __: object, angles: Tensor) -> Tensor:
        """Return the angles of every token, [positions, 1, 1, D] -> [T, 1, 1, D]: an answer goes on where its prompt
        ends. Megatron takes as many angles as tokens for just this (`_apply_rotary_pos_emb_thd`, exact mapping)."""
        return angles[self._positions_T]

    def _log_probs(self, logits_AV: Tensor, targets_A: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits_AV = logits_AV.float() / self._temperature
        first = self._geometry.tp_rank * logits_AV.shape[-1]
        padding = max(0, first + logits_AV.shape[-1] - self._geometry.vocab_size)
        if padding:
            is_padding_V = torch.arange(logits_AV.shape[-1], device=self._device) >= logits_AV.shape[-1] - padding
            logits_AV = logits_AV.masked_fill(is_padding_V, torch.finfo(torch.float32).min / 2)
        # Before the cross entropy, which computes in place.
        entropy_A = self._entropy(logits_AV.detach()) if entropy else logits_AV.detach().flatten()[:0]
        loss_1A = vocab_parallel_cross_entropy(logits_AV.unsqueeze(0).contiguous(), targets_A.unsqueeze(0))
        return -loss_1A[0], entropy_A

    def _entropy(self, logits_AV: Tensor) -> Tensor:
        """log sum exp z - sum p z, over the vocabulary of all tensor-parallel ranks."""
        most_A = logits_AV.amax(-1)
        dist.all_reduce(most_A, op=dist.ReduceOp.MAX, group=self._tensor_group)
        shifted_AV = logits_AV - most_A.unsqueeze(-1)
        weights_AV = shifted_AV.exp()
        sums_2A = torch.stack([weights_AV.sum(-1), (weights_AV * shifted_AV).sum(-1)])
        dist.all_reduce(sums_2A, group=self._tensor_group)
        return sums_2A[0].log() - sums_2A[1] / sums_2A[0]

    def _shared(self, sizes: Sequence[int], passed: Sequence[_Passed], entropy: bool) -> tuple[Tensor, Tensor]:
        rows = 1 + entropy
        if self._is_last:
            columns = [torch.cat([one.output.detach() for one in passed])]
            columns += [torch.cat([one.entropy_A for one in passed])] if entropy else []
            known = torch.stack(columns)
        else:
            known = torch.empty(rows, sum(sizes), device=self._device)
        if len(self._stages) > 1:
            dist.broadcast(known, src=self._stages[-1], group=self._pipeline_group)
        return known[0], known[1] if entropy else known[0, :0]

    def _send(self, tensor: Tensor, stage: int) -> Any:
        return dist.isend(tensor.contiguous(), dst=self._stages[stage], group=self._pipeline_group)

    def _receive(self, shape: Sequence[int], stage: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        dist.recv(tensor, src=self._stages[stage], group=self._pipeline_group)
        return tensor


def cut(batch: Sequences, num_pieces: int) -> Iterator[Sequences]:
    """Yield a micro-batch in at most so many pieces of about as many tokens, whole samples each, in order."""
    lengths = batch.lengths_N.tolist()
    total, first, rows = sum(lengths), 0, 0
    while rows < len(lengths):
        begin, start = rows, first
        share = -(-(total - first) // num_pieces)
        while rows < len(lengths) and (rows == begin or first - start + lengths[rows] // 2 < share):
            first += lengths[rows]
            rows += 1
        num_pieces = max(1, num_pieces - 1)
        yield Sequences(batch.tokens_T[start:first], batch.lengths_N[begin:rows], batch.prompt_lengths_N[begin:rows])


def _packed(inputs: PackedInputs) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    layout, device = inputs.layout, inputs.tokens_T.device
    ends = torch.tensor([0, *accumulate(layout.lengths)], dtype=torch.int32, device=device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=layout.longest,
        max_seqlen_kv=layout.longest,
    )
    params.packed_layout = layout
    return params
