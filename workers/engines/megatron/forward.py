"""One stage's forward and backward over the pieces of a micro-batch, with log-probabilities at its end.

All pieces go forward through the stages, then backward in reverse order (GPipe): the loss is a function of all of a
micro-batch's log-probabilities, so no piece can go back before the last one came.

    stage 0   0 1 2 3 . . . 3 2 1 0          memory: the activations of one micro-batch, as without pieces
    stage 1   . 0 1 2 3 L 3 2 1 0 .          L: loss

The last stage then broadcasts the log-probabilities to its pipeline, so every rank knows the same. Where ranks share
the tokens of a piece (`TokenShare`), each does so for its own; without, t is T and a is A.

Legend of shapes: t tokens of a piece that this rank has, W width of the residual stream, A drawn tokens, a those
that this rank's tokens predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.device import to_device
from workers.engines.log_prob_head import HeadRequest, head_log_probs, note_entropy_gradient
from workers.engines.megatron.context import TokenShare
from workers.engines.megatron.model import MegatronParts
from workers.engines.packed_forward import PackedInputs, cut
from workers.rows.rows import Sequences
from workers.settings.engines import ActorConfig


@dataclass
class _Passed:
    """A piece between its forward and its backward pass.

    Attributes:
        received: [t, 1, W] of the stage before; None on the first.
        output: [t, 1, W] for the next stage; on the last log-probabilities [a].
        entropy_a: of the last stage, where it is wanted.
        share: the tokens.
    """

    received: Tensor | None
    output: Tensor
    entropy_a: Tensor
    share: TokenShare


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
        self._context = parts.context
        self._positions_t = self._predictors_a = self._targets_a = torch.empty(0, dtype=torch.int64)
        self._entropy = False
        self._request: HeadRequest | None = None
        self._passed: list[_Passed] = []
        self._network.rotary_pos_emb.register_forward_hook(self._at_positions)
        if self._is_last:
            self._network.output_layer.forward = self._head

    def forward(self, batch: Sequences, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return float32 [A] log-probabilities and entropies of the drawn tokens, on every rank of the replica.

        Keeps what `backward` needs where gradients are enabled. Without `entropy` the second result is empty.
        """
        sending, passed = [], []
        for piece in [self._share(piece) for piece in cut(batch, self._num_pieces)]:
            passed.append(self._forward_piece(piece, entropy))
            if not self._is_last:
                sending.append(self._send(passed[-1].output.detach(), self._stage + 1))
        for work in sending:
            work.wait()
        self._passed = passed if torch.is_grad_enabled() else []
        return self._shared(passed, entropy)

    def backward(self, gradient_A: Tensor, entropy_gradient_A: Tensor | None = None) -> None:
        """Accumulate the parameters' gradients for the last `forward`.

        Args:
            gradient_A: of its log-probabilities; only the last stage's counts.
            entropy_gradient_A: of its entropies; None: there is none.
        """
        passed, self._passed = self._passed, []
        sizes = [one.share.num_drawn for one in passed]
        gradients = torch.split(gradient_A, sizes)
        of_entropies = None if entropy_gradient_A is None else torch.split(entropy_gradient_A, sizes)
        sending = []
        for number in reversed(range(len(passed))):
            one = passed[number]
            outputs = [one.output]
            if self._is_last:
                given = [one.share.own(gradients[number])]
                if of_entropies is not None:
                    outputs.append(one.entropy_a)
                    given.append(one.share.own(of_entropies[number]))
            else:
                given = [self._receive(one.output.shape, self._stage + 1)]
            torch.autograd.backward(outputs, given)
            if one.received is not None:
                assert one.received.grad is not None
                sending.append(self._send(one.received.grad, self._stage - 1))
        for work in sending:
            work.wait()

    @property
    def _is_last(self) -> bool:
        return self._stage == len(self._stages) - 1

    def _share(self, piece: Sequences) -> TokenShare:
        inputs = PackedInputs.of(piece, torch.device("cpu"), shared_prompt=self._shared_prompt)
        if self._context is None:
            return TokenShare.of(inputs, 0, 1, self._device)
        rank, size = dist.get_rank(self._context), dist.get_world_size(self._context)
        return TokenShare.of(inputs, rank, size, self._device)

    def _forward_piece(self, share: TokenShare, entropy: bool) -> _Passed:
        received = None
        if self._stage:
            received = self._receive((share.tokens_t.numel(), 1, self._geometry.hidden_size), self._stage - 1)
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

    def _head(self, hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Take the place of the output layer: [t, 1, W] -> [a, 1, 2], log-probabilities and entropies, at the drawn
        tokens' positions only. `weight` is the input embedding where that is the head, too."""
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
        """Return the angles of every token, [positions, 1, 1, D] -> [t, 1, 1, D]: a response goes on where its prompt
        ends. Megatron takes as many angles as tokens for just this (`_apply_rotary_pos_emb_thd`, exact mapping)."""
        return angles[self._positions_t]

    def _shared(self, passed: Sequence[_Passed], entropy: bool) -> tuple[Tensor, Tensor]:
        if self._is_last:
            columns = [torch.cat([one.share.spread(one.output.detach()) for one in passed])]
            columns += [torch.cat([one.share.spread(one.entropy_a.detach()) for one in passed])] if entropy else []
            known = torch.stack(columns)
            if self._context is not None:
                dist.all_reduce(known, group=self._context)
        else:
            known = torch.empty(1 + entropy, sum(one.share.num_drawn for one in passed), device=self._device)
        if len(self._stages) > 1:
            dist.broadcast(known, src=self._stages[-1], group=self._pipeline_group)
        return known[0], known[1] if entropy else known[0, :0]

    def _send(self, tensor: Tensor, stage: int) -> Any:
        return dist.isend(tensor.contiguous(), dst=self._stages[stage], group=self._pipeline_group)

    def _receive(self, shape: Sequence[int], stage: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        dist.recv(tensor, src=self._stages[stage], group=self._pipeline_group)
        return tensor


def _packed(share: TokenShare, context: dist.ProcessGroup | None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    # One sequence, as far as Megatron looks: `_at_positions` knows the positions, and our attention the documents.
    (ends,) = to_device([torch.tensor([0, share.tokens_t.numel()], dtype=torch.int32)], share.tokens_t.device)
    longest = share.layout.longest
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    params.packed_layout, params.context = share.layout, context
    return params
