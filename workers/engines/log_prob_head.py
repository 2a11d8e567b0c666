"""Log-probabilities and entropies from hidden states through a language model's head, without the logits as a whole.

The head's rows are taken a run at a time (*tile*: all tokens x some of the vocabulary, at most `TILE` logits), and each
token keeps four running numbers. The backward pass computes the tiles again. So the memory does not depend on the size
of the vocabulary, and each row of the head gets its gradient in one matrix product, whatever the element type.

    tile      z = (h W^T + b) / temperature          m = max z, s = sum e^(z - m), u = sum (z - m) e^(z - m)
    forward   log p = (z_target - m) - log s         entropy = log s - u / s
    backward  dz = (1[target] - p) g - p (log p + entropy) g'        p = e^(z - m - log s), g' of the entropy

With tensor parallelism each rank has some rows of the head, and m, s, u and z_target are merged over ranks as they are
over tiles (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).

Legend of shapes: A drawn tokens, D width, V rows of the head on this rank, n of them in a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from workers.engines.device_memory import LOGITS_TILE

TILE = LOGITS_TILE
"""Logits of a tile; two of them are held at once (128 MiB each in float32)."""
_ALIGNED = 64
"""Rows of a tile are a multiple of this, which matrix units want."""


@dataclass
class HeadRequest:
    """What is asked of a head.

    Attributes:
        targets_A: int64 [A], tokens of the whole vocabulary.
        temperature: divides the logits.
        entropy: whether entropies are wanted, too.
        first: token of the first row of the head that this rank has.
        num_rows: rows that are tokens, the others being padding; None: all.
        group: the ranks that have the other rows; None: there are none.
        trains_entropy: whether the entropies' gradient is computed; None: if there is one. Where both results were
            joined into one tensor there always is one, maybe of zeros: there `note_entropy_gradient` says it.
    """

    targets_A: Tensor
    temperature: float
    entropy: bool
    first: int = 0
    num_rows: int | None = None
    group: dist.ProcessGroup | None = None
    trains_entropy: bool | None = None


def note_entropy_gradient(entropy_A: Tensor, request: HeadRequest) -> None:
    """Have the gradient of entropies computed only where a loss has one: it takes a second product over each tile.

    Args:
        entropy_A: of `head_log_probs`, taken out of a tensor into which both results were joined.
        request: that it answers.
    """
    request.trains_entropy = False
    if entropy_A.requires_grad:

        def note(gradient_A: Tensor | None) -> None:  # None: torch calls it all the same
            request.trains_entropy = gradient_A is not None

        entropy_A.register_hook(note)  # type: ignore[no-untyped-call]


def head_log_probs(
    hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the target tokens under the tempered distribution.

    Collective over `request.group`, forward and backward; there each rank gets the whole gradient of `hidden_AD`. The
    gradient of a weight with `main_grad` (Megatron's, float32) is added to that instead of being returned.

    Args:
        hidden_AD: what the head is applied to.
        weight_VD, bias_V: the head, in the element type of `hidden_AD`, in which products are computed.
        request: the rest.
    Returns:
        float32 [A] (float64 of a float64 head) and entropies [A], with gradient where enabled; these are 0, without, if
        they are not wanted.
    """
    found: tuple[Tensor, Tensor] = _HeadLogProbs.apply(hidden_AD, weight_VD, bias_V, request)  # type: ignore[no-untyped-call]
    return found


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(hidden_AD, weight_VD, bias_V, request)
        sums = _Sums(len(hidden_AD), tiles.dtype, hidden_AD.device)
        exponentials = torch.empty_like(tiles.buffer) if request.entropy else tiles.buffer
        for rows, z_An in tiles:
            column_A1, inside_A1 = tiles.targets(rows)
            sums.target_A += (z_An.gather(1, column_A1) * inside_A1)[:, 0]
            sums.raise_most(z_An.amax(1))
            z_An.sub_(sums.most_A.unsqueeze(1))
            e_An = torch.exp(z_An, out=exponentials[: z_An.numel()].view_as(z_An))
            sums.sum_A += e_An.sum(1)
            if request.entropy:
                sums.weighted_A += e_An.mul_(z_An).sum(1)
        if request.group is not None:
            sums.merge(request.group)
        log_sum_A = sums.sum_A.log()
        entropy_A = log_sum_A - sums.weighted_A / sums.sum_A if request.entropy else torch.zeros_like(log_sum_A)
        if not request.entropy:
            ctx.mark_non_differentiable(entropy_A)
        ctx.set_materialize_grads(False)
        ctx.request, ctx.main_grad = request, getattr(weight_VD, "main_grad", None)
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, sums.most_A + log_sum_A, entropy_A)
        return (sums.target_A - sums.most_A) - log_sum_A, entropy_A

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_A: Tensor | None, entropy_gradient_A: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        hidden_AD, weight_VD, bias_V, log_total_A, entropy_A = ctx.saved_tensors
        if gradient_A is None:
            gradient_A = torch.zeros_like(log_total_A)
        if ctx.request.trains_entropy is False:
            entropy_gradient_A = None
        tiles = _Tiles(hidden_AD, weight_VD, bias_V, ctx.request)
        returned = ctx.main_grad is None and ctx.needs_input_grad[1]
        weight_grad_VD = torch.empty_like(weight_VD) if returned else ctx.main_grad
        bias_grad_V = None if bias_V is None else torch.zeros_like(bias_V)
        hidden_grad_AD = torch.zeros_like(hidden_AD, dtype=tiles.dtype)
        factor_A1 = (gradient_A / -ctx.request.temperature).unsqueeze(1)
        if entropy_gradient_A is not None:
            entropy_factor_A1 = (entropy_gradient_A / -ctx.request.temperature).unsqueeze(1)
            of_entropy = torch.empty_like(tiles.buffer)
        for rows, z_An in tiles:
            z_An.sub_(log_total_A.unsqueeze(1))
            if entropy_gradient_A is not None:
                of_entropy_An = of_entropy[: z_An.numel()].view_as(z_An).copy_(z_An)
                of_entropy_An.add_(entropy_A.unsqueeze(1)).mul_(entropy_factor_A1)
            z_An.exp_()
            if entropy_gradient_A is not None:
                of_entropy_An.mul_(z_An)
            column_A1, inside_A1 = tiles.targets(rows)
            z_An.scatter_(1, column_A1, z_An.gather(1, column_A1) - inside_A1)
            z_An.mul_(factor_A1)
            if entropy_gradient_A is not None:
                z_An.add_(of_entropy_An)
            dz_An = z_An.to(weight_VD.dtype)
            if returned:
                torch.mm(dz_An.T, hidden_AD, out=weight_grad_VD[rows])
            elif ctx.needs_input_grad[1]:
                weight_grad_VD[rows] += dz_An.T @ hidden_AD
            if bias_grad_V is not None:
                bias_grad_V[rows] = z_An.sum(0)
            if dz_An.dtype == tiles.dtype:
                hidden_grad_AD.addmm_(dz_An, weight_VD[rows])
            else:
                hidden_grad_AD += dz_An @ weight_VD[rows]
        if ctx.request.group is not None:
            dist.all_reduce(hidden_grad_AD, group=ctx.request.group)
        if returned:
            weight_grad_VD[tiles.num_rows :] = 0
        return hidden_grad_AD.to(hidden_AD.dtype), weight_grad_VD if returned else None, bias_grad_V, None


class _Tiles:
    """Iterates over tiles: their rows of the head, and their tempered logits [A, n]; each takes the place of the one
    before it."""

    def __init__(self, hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest) -> None:
        self._hidden_AD, self._weight_VD, self._bias_V, self._request = hidden_AD, weight_VD, bias_V, request
        self.num_rows = len(weight_VD) if request.num_rows is None else request.num_rows
        self.dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self._step = max(_ALIGNED, TILE // max(1, len(hidden_AD)) // _ALIGNED * _ALIGNED)
        size = len(hidden_AD) * min(self._step, self.num_rows)
        self.buffer = torch.empty(size, dtype=self.dtype, device=hidden_AD.device)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.num_rows, self._step):
            rows = slice(start, min(start + self._step, self.num_rows))
            weight_nD = self._weight_VD[rows]
            bias_n = None if self._bias_V is None else self._bias_V[rows]
            z_An = self.buffer[: len(self._hidden_AD) * len(weight_nD)].view(-1, len(weight_nD))
            if bias_n is None and weight_nD.dtype == self.dtype:
                torch.mm(self._hidden_AD, weight_nD.T, out=z_An)
            else:
                z_An.copy_(linear(self._hidden_AD, weight_nD, bias_n))
            if self._request.temperature != 1.0:
                z_An.div_(self._request.temperature)
            yield rows, z_An

    def targets(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return each token's target as a column of the tile, [A, 1], and whether it is there; else any column."""
        place_A = self._request.targets_A - (self._request.first + rows.start)
        column_A = place_A.clamp(0, rows.stop - rows.start - 1)
        return column_A.unsqueeze(1), (column_A == place_A).unsqueeze(1).to(self.dtype)


class _Sums:
    """Each token's running numbers: m, s, u and the target's logit of the module's formulas, [A] each."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        # A rank whose rows are all padding keeps the least number: finite, so that nothing becomes 0 x infinity.
        self.most_A = torch.full((num_tokens,), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
        self.sum_A, self.weighted_A, self.target_A = torch.zeros(3, num_tokens, dtype=dtype, device=device).unbind(0)

    def raise_most(self, other_A: Tensor) -> None:
        """Note logits as high as `other_A`: what was summed is of `z - m`, so it changes with m."""
        most_A = torch.maximum(self.most_A, other_A)
        difference_A = self.most_A - most_A
        self.weighted_A += self.sum_A * difference_A
        factor_A = difference_A.exp()
        self.sum_A *= factor_A
        self.weighted_A *= factor_A
        self.most_A = most_A

    def merge(self, group: dist.ProcessGroup) -> None:
        """Add up what the ranks found in their rows of the head."""
        most_A = self.most_A.clone()
        dist.all_reduce(most_A, op=dist.ReduceOp.MAX, group=group)
        self.raise_most(most_A)
        found_3A = torch.stack([self.sum_A, self.weighted_A, self.target_A])
        dist.all_reduce(found_3A, group=group)
        self.sum_A, self.weighted_A, self.target_A = found_3A.unbind(0)
