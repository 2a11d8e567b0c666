"""The forward pass over a packed micro-batch, shared by trainer, policy copies, critic and frozen reference.

Legend of shapes: N samples, T tokens of the micro-batch, A drawn tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from asyncflow.device import to_device
from asyncflow.vendors import vendor_of
from tq.columns import Int64s
from workers.engines.base import check_sequences
from workers.engines.device_memory import LOGITS_TILE
from workers.rows.packed_rows import Sequences, TokenSets

# Log-probabilities and entropies from hidden states through a language model's head, without materializing the logits.
#
# The head is processed one block of rows at a time (a *tile*: all tokens x part of the vocabulary, at most `TILE`
# logits), and each token keeps four running numbers. The backward pass recomputes the tiles. Memory therefore does not
# depend on the size of the vocabulary, and each row of the head gets its gradient in one matrix product, whatever the
# element type.
#
# On devices that can, the products come unrounded: a bfloat16 logit of 16 to 32 is wrong by up to 0.06.
#
#     tile      z = (h W^T + b) / temperature          m = max z, s = sum e^(z - m), u = sum (z - m) e^(z - m)
#     forward   log p = (z_target - m) - log s         entropy = log s - u / s
#     backward  dz = (1[target] - p) g - p (log p + entropy) g'        p = e^(z - m - log s), g' of the entropy
#
# With tensor parallelism each rank holds some rows of the head, and m, s, u and z_target are merged over ranks just as
# over tiles (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).
#
# Legend of shapes: A drawn tokens, D width, V rows of the head on this rank, n of them in a tile.

TILE = LOGITS_TILE  # logits of a tile; two tiles are held at once (128 MiB each in float32)
_ALIGNED = 64  # tiles have a multiple of this many rows, which suits matrix units


@dataclass(frozen=True)
class OtherTokens:
    """Further tokens whose log-probabilities are wanted, in the order of their ids: a tile then has a run of them."""

    ids_P: Tensor  # int64 [P], ascending token ids of the whole vocabulary
    place_P: Tensor  # int64 [P], the drawn token that each belongs to
    order_P: Tensor  # int64 [P], ascending -> the caller's order
    back_P: Tensor  # int64 [P], the caller's order -> ascending
    host_ids: Int64s  # `ids_P` in host memory

    @staticmethod
    def of(sets: TokenSets, device: torch.device) -> "OtherTokens":
        """Sort the sets, which are in host memory, and move them to `device`."""
        ids_P, order_P = sets.ids_P.long().sort(stable=True)
        place_P = torch.arange(len(sets.counts_A)).repeat_interleave(sets.counts_A.long())[order_P]
        back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P)))
        host_ids = ids_P.numpy()
        ids_P, place_P, order_P, back_P = to_device([ids_P, place_P, order_P, back_P], device)
        return OtherTokens(ids_P, place_P, order_P, back_P, host_ids)

    def in_tile(self, first: int, end: int) -> slice:
        """Return the run of tokens with ids from `first` to `end`, excluding `end`."""
        return slice(*self.host_ids.searchsorted([first, end]).tolist())


@dataclass
class HeadRequest:
    """What to compute with a head."""

    targets_A: Tensor  # int64 [A], token ids of the whole vocabulary
    temperature: float
    entropy: bool
    first: int = 0  # token id of this rank's first row of the head
    num_rows: int | None = None  # rows that are tokens, the rest being padding; None: all
    group: dist.ProcessGroup | None = None  # the ranks that hold the other rows; None: there are none
    # Whether to compute the gradients of entropies and of others; None: whenever there is one. If the results were
    # joined into one tensor there always is one, possibly all zeros; `note_gradients` then decides.
    trains_entropy: bool | None = None
    trains_others: bool | None = None
    others: OtherTokens | None = None  # only if no other ranks hold rows


def has_unrounded_products(weight: Tensor) -> bool:
    """Whether products with `weight`, of half precision, can be had in float32 instead of rounded to its type."""
    return weight.dtype in (torch.bfloat16, torch.float16) and vendor_of(weight.device.type).has_float32_products


def note_gradients(request: HeadRequest, entropy_A: Tensor, others_P: Tensor | None = None) -> None:
    """Compute the gradients of entropies, and of others, only if the loss uses them; both were sliced out of a joined
    tensor."""
    # Each takes a second product over each tile.
    request.trains_entropy = request.trains_others = False

    def note_entropy(gradient_A: Tensor | None) -> None:  # torch calls the hook with None, too
        request.trains_entropy = gradient_A is not None

    def note_others(gradient_P: Tensor | None) -> None:
        request.trains_others = gradient_P is not None

    for found, note in ((entropy_A, note_entropy), (others_P, note_others)):
        if found is not None and found.requires_grad:
            found.register_hook(note)  # type: ignore[no-untyped-call]


def head_log_probs(
    hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the target tokens under the tempered distribution, and entropies, float32 [A] each.

    Collective over `request.group`, forward and backward; every rank gets the whole gradient of `hidden_AD`. The
    gradient of a weight with `main_grad` (Megatron's, float32) is added to that instead of being returned. The head has
    the element type of `hidden_AD`, in which products are computed; for float64 results are float64. Entropies that
    were not requested are 0, without gradient.
    """
    return head_results(hidden_AD, weight_VD, bias_V, request)[:2]


def head_results(
    hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `head_log_probs`; third are the log-probabilities of `request.others`, [P], empty without these."""
    assert request.group is None or request.others is None, "others are not merged over ranks"
    found: tuple[Tensor, Tensor, Tensor] = _HeadLogProbs.apply(hidden_AD, weight_VD, bias_V, request)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def head_top_log_probs(
    hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, temperature: float, k: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the `k` most likely of the first `num_tokens` tokens at each place, int64 [A, K], and their
    log-probabilities under the whole distribution, float32 [A, K].

    K is smaller than `k` if there are fewer tokens. No rank may hold other rows of the head.
    """
    request = HeadRequest(hidden_AD.new_zeros(len(hidden_AD), dtype=torch.int64), temperature, entropy=False)
    tiles = _Tiles(hidden_AD, weight_VD, bias_V, request)
    sums = _Sums(len(hidden_AD), tiles.dtype, hidden_AD.device)
    best_AK = torch.empty(len(hidden_AD), 0, dtype=tiles.dtype, device=hidden_AD.device)
    ids_AK = torch.empty(len(hidden_AD), 0, dtype=torch.int64, device=hidden_AD.device)
    for rows, z_An in tiles:
        if rows.start < num_tokens:
            known_An = z_An[:, : num_tokens - rows.start]
            found_AK, column_AK = known_An.topk(min(k, known_An.shape[1]), dim=1)
            best_AK, ids_AK = torch.cat([best_AK, found_AK], 1), torch.cat([ids_AK, column_AK + rows.start], 1)
            best_AK, column_AK = best_AK.topk(min(k, best_AK.shape[1]), dim=1)
            ids_AK = ids_AK.gather(1, column_AK)
        sums.raise_most(z_An.amax(1))
        sums.sum_A += z_An.sub_(sums.most_A.unsqueeze(1)).exp_().sum(1)
    return ids_AK, best_AK - (sums.most_A + sums.sum_A.log()).unsqueeze(1)


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _Tiles(hidden_AD, weight_VD, bias_V, request)
        sums = _Sums(len(hidden_AD), tiles.dtype, hidden_AD.device)
        # The entropy needs z and e^z at once; without it, e^z overwrites the tile.
        exponentials = torch.empty_like(tiles.buffer) if request.entropy else tiles.buffer
        others = request.others
        other_P = torch.empty(0 if others is None else len(others.ids_P), dtype=tiles.dtype, device=hidden_AD.device)
        for rows, z_An in tiles:
            if others is not None:
                run = others.in_tile(rows.start, rows.stop)
                other_P[run] = z_An[others.place_P[run], others.ids_P[run] - rows.start]
            column_A1, inside_A1 = tiles.targets_in_tile(rows)
            sums.target_A += (z_An.gather(1, column_A1) * inside_A1)[:, 0]
            sums.raise_most(z_An.amax(1))
            z_An.sub_(sums.most_A.unsqueeze(1))
            e_An = torch.exp(z_An, out=exponentials[: z_An.numel()].view_as(z_An))
            sums.sum_A += e_An.sum(1)
            if request.entropy:
                sums.weighted_A += e_An.mul_(z_An).sum(1)
        if request.group is not None:
            sums.merge_ranks(request.group)
        log_sum_A = sums.sum_A.log()
        entropy_A = log_sum_A - sums.weighted_A / sums.sum_A if request.entropy else torch.zeros_like(log_sum_A)
        without = [*(() if request.entropy else (entropy_A,)), *((other_P,) if others is None else ())]
        ctx.mark_non_differentiable(*without)
        # A None gradient stays None, so `backward` can skip the entropy's work.
        ctx.set_materialize_grads(False)
        ctx.request, ctx.main_grad = request, getattr(weight_VD, "main_grad", None)
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, sums.most_A + log_sum_A, entropy_A)
        if others is not None:
            other_P = ((other_P - sums.most_A[others.place_P]) - log_sum_A[others.place_P])[others.back_P]
        return (sums.target_A - sums.most_A) - log_sum_A, entropy_A, other_P

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_A: Tensor | None, entropy_gradient_A: Tensor | None, other_gradient_P: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        hidden_AD, weight_VD, bias_V, log_total_A, entropy_A = ctx.saved_tensors
        if ctx.request.trains_others is False:
            other_gradient_P = None
        others = None if other_gradient_P is None else ctx.request.others
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
        if others is not None:
            assert other_gradient_P is not None
            # Each other token adds (1[token] - p) g, like the target.
            other_P = other_gradient_P[others.order_P] / ctx.request.temperature
            of_others_A1 = torch.zeros_like(gradient_A).index_add_(0, others.place_P, other_P).unsqueeze(1)
            of_others = torch.empty_like(tiles.buffer)
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
            if others is not None:
                of_others_An = torch.mul(z_An, -of_others_A1, out=of_others[: z_An.numel()].view_as(z_An))
                run = others.in_tile(rows.start, rows.stop)
                places = others.place_P[run], others.ids_P[run] - rows.start
                of_others_An.index_put_(places, other_P[run], accumulate=True)
            column_A1, inside_A1 = tiles.targets_in_tile(rows)
            z_An.scatter_(1, column_A1, z_An.gather(1, column_A1) - inside_A1)
            z_An.mul_(factor_A1)
            if entropy_gradient_A is not None:
                z_An.add_(of_entropy_An)
            if others is not None:
                z_An.add_(of_others_An)
            dz_An = z_An.to(weight_VD.dtype)
            if returned:
                torch.mm(dz_An.T, hidden_AD, out=weight_grad_VD[rows])
            elif ctx.needs_input_grad[1]:
                _add_product(weight_grad_VD[rows], dz_An.T, hidden_AD)
            if bias_grad_V is not None:
                bias_grad_V[rows] = z_An.sum(0)
            _add_product(hidden_grad_AD, dz_An, weight_VD[rows])
        if ctx.request.group is not None:
            dist.all_reduce(hidden_grad_AD, group=ctx.request.group)
        if returned:
            # Rows of padding are in no tile, and the gradient was allocated uninitialized.
            weight_grad_VD[tiles.num_rows :] = 0
        return hidden_grad_AD.to(hidden_AD.dtype), weight_grad_VD if returned else None, bias_grad_V, None


class _Tiles:
    """Iterates over tiles: their rows of the head, and their tempered logits [A, n], in memory that they share."""

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
            elif bias_n is None and has_unrounded_products(weight_nD):
                torch.mm(self._hidden_AD, weight_nD.T, self.dtype, out=z_An)
            else:
                z_An.copy_(linear(self._hidden_AD, weight_nD, bias_n))
            if self._request.temperature != 1.0:
                z_An.div_(self._request.temperature)
            yield rows, z_An

    def targets_in_tile(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return each token's target as a column of the tile, [A, 1], and whether it really lies in the tile."""
        place_A = self._request.targets_A - (self._request.first + rows.start)
        column_A = place_A.clamp(0, rows.stop - rows.start - 1)
        return column_A.unsqueeze(1), (column_A == place_A).unsqueeze(1).to(self.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which has their element type or a wider one."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.dtype == torch.float32 and has_unrounded_products(right):
        torch.addmm(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


class _Sums:
    """Each token's running numbers, [A] each: m, s, u and the target's logit in the formulas above."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        # A rank whose rows are all padding keeps this minimum: it is finite, so that nothing becomes 0 x infinity.
        self.most_A = torch.full((num_tokens,), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
        self.sum_A, self.weighted_A, self.target_A = torch.zeros(3, num_tokens, dtype=dtype, device=device).unbind(0)

    def raise_most(self, other_A: Tensor) -> None:
        """Raise m to at least `other_A`."""
        # s and u are sums over `z - m`, so they have to be rescaled when m changes.
        most_A = torch.maximum(self.most_A, other_A)
        difference_A = self.most_A - most_A
        self.weighted_A += self.sum_A * difference_A
        factor_A = difference_A.exp()
        self.sum_A *= factor_A
        self.weighted_A *= factor_A
        self.most_A = most_A

    def merge_ranks(self, group: dist.ProcessGroup) -> None:
        """Combine the sums of all ranks' rows of the head."""
        most_A = self.most_A.clone()
        dist.all_reduce(most_A, op=dist.ReduceOp.MAX, group=group)
        self.raise_most(most_A)
        found_3A = torch.stack([self.sum_A, self.weighted_A, self.target_A])
        dist.all_reduce(found_3A, group=group)
        self.sum_A, self.weighted_A, self.target_A = found_3A.unbind(0)


# Where the documents of a packed sequence lie, and which tokens each may see. Pure.
#
# A document is a run of tokens that attend causally to each other. It may continue another document, its prompt; its
# tokens then see the whole prompt, too. A prompt is thus computed once for all its responses, which never see each
# other:
#
#     sequence    p p p p | s s s s s | a a | b b b         p: a prompt, a and b: its responses, s: a sample by itself
#     lengths     4         5           2     3             prompts  -1 -1 0 0
#
#     a sees      p p p p   a a          (as if it directly followed the prompt)
#
# Source: shared-prompt attention, arXiv 2511.18871, section 4.3.

ALONE = -1  # in `PackedLayout.prompts`: the document continues no other


class QueryBlock(NamedTuple):
    """Neighbouring queries that one call of an attention kernel computes."""

    start: int  # first token of the queries
    documents: int  # how many, of `length` tokens each
    length: int
    keys: int  # first token of the keys
    num_keys: int  # per document: its own `length`, or the length of its prompt (then `documents` is 1)


@dataclass(frozen=True)
class PackedLayout:
    """The documents of a packed sequence; passed to the model as the keyword argument `packed_layout`."""

    lengths: tuple[int, ...]  # tokens of each document, at least 1, in sequence order
    # For each document the index of the one it continues, which precedes it and continues none; `ALONE`: it continues
    # none.
    prompts: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each document."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """How many tokens the last token of each document sees."""
        return tuple(
            length if prompt == ALONE else self.lengths[prompt] + length
            for length, prompt in zip(self.lengths, self.prompts, strict=True)
        )

    @property
    def longest(self) -> int:
        """Positions of the longest document, its prompt included."""
        return max(self.key_lengths)

    @cached_property
    def own_blocks(self) -> tuple[QueryBlock, ...]:
        """Each document against itself, causal; neighbours of equal length share a block. Covers each token once."""
        blocks = []
        for length, run in groupby(range(len(self.lengths)), key=lambda document: self.lengths[document]):
            documents = list(run)
            start = self.starts[documents[0]]
            blocks.append(QueryBlock(start, len(documents), length, start, length))
        return tuple(blocks)

    @cached_property
    def prompt_blocks(self) -> tuple[QueryBlock, ...]:
        """Documents against the prompt that they continue, unmasked; neighbours with the same prompt share a block."""
        blocks = []
        for prompt, run in groupby(range(len(self.lengths)), key=lambda document: self.prompts[document]):
            documents = list(run)
            if prompt != ALONE:
                length = sum(self.lengths[document] for document in documents)
                blocks.append(
                    QueryBlock(self.starts[documents[0]], 1, length, self.starts[prompt], self.lengths[prompt])
                )
        return tuple(blocks)

    def key_index(self) -> Tensor | None:
        """Return int64 [K]: the tokens that each document sees, document by document, its own tokens last.

        For kernels that need each document's keys in one piece. None: the sequence itself will do.
        """
        if not self.prompt_blocks:
            return None
        pieces = []
        for document, prompt in enumerate(self.prompts):
            for part in (document,) if prompt == ALONE else (prompt, document):
                pieces.append(torch.arange(self.starts[part], self.starts[part] + self.lengths[part]))
        return torch.cat(pieces)


# The smallest batch that has a drawn token.
_IDLE = Sequences(
    tokens_T=torch.zeros(2, dtype=torch.int64),
    lengths_N=torch.tensor([2], dtype=torch.int32),
    response_mask_T=torch.tensor([0, 1], dtype=torch.uint8),
)


@dataclass(frozen=True)
class PackedInputs:
    """A micro-batch in the order in which the model sees it.

    The last token of a sample predicts nothing, so it is left out. Samples that share a prompt (everything before their
    first drawn token) become one document for the prompt and one for the rest of each; the others are one document
    each, sorted by length (stable).
    """

    tokens_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T], from 0 in each sample
    layout: PackedLayout
    # int64 [A], position in `tokens_T` whose logits predict each drawn token; in the micro-batch's order, not the
    # sorted one.
    predictors_A: Tensor
    targets_A: Tensor  # int64 [A], the drawn tokens
    others: OtherTokens | None = None  # the batch's, or what each token was drawn from
    masks: bool = False  # whether they are the latter

    @staticmethod
    def from_batch(batch: Sequences, device: torch.device, *, shared_prompt: bool = False) -> "PackedInputs":
        """Pack a micro-batch that is in host memory, and move it to `device` in one asynchronous copy."""
        lengths, prompts = batch.lengths_N.tolist(), batch.prompt_lengths.tolist()
        starts = [0, *accumulate(lengths)][:-1]
        documents = _documents(batch.tokens_T, starts, lengths, prompts, shared_prompt=shared_prompt)
        layout = PackedLayout(tuple(one.length for one in documents), tuple(one.prompt for one in documents))
        # Row 0: where each sample would begin, extrapolated from its prompt's place; row 1: from its rest's place.
        begins_2N = torch.zeros(2, len(lengths), dtype=torch.int64)
        for document, start in zip(documents, layout.starts, strict=True):
            for sample in document.samples:
                begins_2N[int(document.position > 0) :, sample] = start - document.position
        tokens_T = batch.tokens_T.to(torch.int64)
        source_T = _ranges([(one.source, one.length) for one in documents])
        targets_A = batch.response_mask_T.nonzero()[:, 0]
        sample_A = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[targets_A]
        before_A = targets_A - torch.tensor(starts)[sample_A] - 1
        continues_A = (before_A >= torch.tensor(prompts)[sample_A]).long()
        fed_T, positions_T, predictors_A, drawn_A = to_device(
            [
                tokens_T[source_T],
                _ranges([(one.position, one.length) for one in documents]),
                begins_2N[continues_A, sample_A] + before_A,
                tokens_T[targets_A],
            ],
            device,
        )
        sets = batch.kept if batch.others is None else batch.others
        others = None if sets is None else OtherTokens.of(sets, device)
        masks = batch.kept is not None
        return PackedInputs(fed_T, positions_T, layout, predictors_A, drawn_A, others, masks)


class InputsOfBatch:
    """Packs micro-batches for one or several models; packs a repeated batch only once."""

    def __init__(self, device: torch.device, *, vocab_size: int, shared_prompt: bool) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._shared_prompt = shared_prompt
        self._last: tuple[Sequences, PackedInputs] | None = None

    def __call__(self, batch: Sequences | None) -> PackedInputs:
        """Return the packed batch; None: a minimal one, for ranks without rows.
        Raises BadRequest, see `check_sequences`."""
        batch = _IDLE if batch is None else batch
        # By identity: policy and copies are given the same object in turn.
        if self._last is None or self._last[0] is not batch:
            check_sequences(batch, vocab_size=self._vocab_size)
            self._last = batch, PackedInputs.from_batch(batch, self._device, shared_prompt=self._shared_prompt)
        return self._last[1]


def cut(batch: Sequences, num_pieces: int) -> Iterator[Sequences]:
    """Yield a micro-batch in at most `num_pieces` pieces of roughly equal tokens; whole samples each, in order."""
    lengths = batch.lengths_N.tolist()
    total, first, rows = sum(lengths), 0, 0
    while rows < len(lengths):
        begin, start = rows, first
        share = -(-(total - first) // num_pieces)
        # Take another sample as long as half of it still fits.
        while rows < len(lengths) and (rows == begin or first - start + lengths[rows] // 2 < share):
            first += lengths[rows]
            rows += 1
        num_pieces = max(1, num_pieces - 1)
        yield batch.part(slice(begin, rows), slice(start, first))


def use_float32_logits(model: nn.Module) -> None:
    """Let a language model's head return unrounded float32 logits where the device can, as `head_log_probs` does."""
    known: Any = model
    head: Any = known.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is None and has_unrounded_products(head.weight):
        head.forward = partial(_float32_logits, head)


def _float32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    logits = torch.mm(hidden.flatten(0, -2), head.weight.T, torch.float32)
    return logits.view(*hidden.shape[:-1], -1)


def response_logits(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """Return the logits at the predictor of each drawn token, float32 [A, V] (float64 for a float64 model).

    `model` is a transformers causal language model built with packed attention; with a scalar head, V is 1.
    """
    logits_AV = _forward(model, inputs)
    return logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32))


class HeadResults(NamedTuple):
    """What a loss is computed from; all have a gradient where enabled."""

    log_probs_A: Tensor  # of the drawn tokens, under the tempered distribution
    entropy_A: Tensor  # of that distribution; empty if it was not asked for
    others_P: Tensor  # of `Sequences.others`; empty without these


def response_log_probs(
    model: nn.Module, inputs: PackedInputs, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the drawn tokens under the tempered distribution, and entropies; float32 [A] each.

    Both have a gradient where enabled. Without `entropy` the second result is empty.
    """
    return response_results(model, inputs, temperature, entropy=entropy)[:2]


def response_results(
    model: nn.Module, inputs: PackedInputs, temperature: float, *, entropy: bool = False
) -> HeadResults:
    """Like `response_log_probs`, with the log-probabilities of the inputs' other tokens, float32 [P]."""
    if not inputs.masks:
        return _whole_results(model, inputs, temperature, entropy=entropy)
    assert inputs.others is not None
    return masked_results(_whole_results(model, inputs, temperature, entropy=False), inputs.others)


def masked_results(whole: HeadResults, kept: OtherTokens) -> HeadResults:
    """Return results under the distribution over the kept tokens, whose log-probabilities are `whole.others_P`.

    log q = log p - log (sum of p over the kept)        entropy = - sum of q log q over the kept
    """
    # Source: DeepSeek-V3.2 (arXiv 2512.02556), "keep sampling mask": both policies of a ratio share the truncated
    # distribution's support.
    place_P, num_drawn = kept.place_P[kept.back_P], len(whole.log_probs_A)
    most_A = whole.others_P.detach().new_full((num_drawn,), -torch.inf)
    most_A = most_A.scatter_reduce(0, place_P, whole.others_P.detach(), "amax")
    sums_A = torch.zeros_like(most_A).index_add(0, place_P, (whole.others_P - most_A[place_P]).exp())
    total_A = most_A + sums_A.log()
    kept_P = whole.others_P - total_A[place_P]
    entropy_A = -torch.zeros_like(most_A).index_add(0, place_P, kept_P.exp() * kept_P)
    return HeadResults(whole.log_probs_A - total_A, entropy_A, kept_P.detach()[:0])


def _whole_results(model: nn.Module, inputs: PackedInputs, temperature: float, *, entropy: bool) -> HeadResults:
    head = _tiled_head(model)
    if head is None:
        return _of_whole_logits(response_logits(model, inputs), inputs, temperature, entropy=entropy)
    request = HeadRequest(inputs.targets_A, temperature, entropy, others=inputs.others)
    found_R2 = _through_head(model, inputs, head, partial(_head_forward, head, request))
    if found_R2 is None:
        return _whole_results(model, inputs, temperature, entropy=entropy)
    num_drawn, num_others = len(inputs.targets_A), 0 if inputs.others is None else len(inputs.others.ids_P)
    log_probs_A, entropy_A = found_R2[:num_drawn].unbind(-1)
    others_P = found_R2[num_drawn:].flatten()[:num_others]
    note_gradients(request, entropy_A, others_P)
    return HeadResults(log_probs_A, entropy_A if entropy else log_probs_A.detach()[:0], others_P)


@torch.no_grad()
def response_top_log_probs(
    model: nn.Module, inputs: PackedInputs, temperature: float, k: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the `k` most likely tokens where each drawn token was drawn, int32 [A, K], and their log-probabilities,
    float32 [A, K]; see `head_top_log_probs`."""
    head = _tiled_head(model)
    if head is None:
        log_probs_AV = (response_logits(model, inputs) / temperature).log_softmax(-1)[:, :num_tokens]
        log_probs_AK, ids_AK = log_probs_AV.topk(min(k, log_probs_AV.shape[1]), dim=-1)
        return ids_AK.int(), log_probs_AK
    found_RJ = _through_head(model, inputs, head, partial(_top_forward, head, temperature, k, num_tokens))
    if found_RJ is None:
        return response_top_log_probs(model, inputs, temperature, k, num_tokens)
    ids_AK, log_probs_AK = found_RJ.chunk(2, dim=-1)
    return ids_AK.int(), log_probs_AK


# Head -> whether its model changes the logits; filled on first use.
_whole_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_WITNESS = 1 / 3  # a number that any scaling, capping or rounding of the head's output would change


def _tiled_head(model: nn.Module) -> nn.Linear | None:
    """Return the head if the logits need not be materialized; None for models that change them after the head (scaling,
    capping) or whose head is not a plain linear layer."""
    known: Any = model
    head = known.get_output_embeddings()
    return head if isinstance(head, nn.Linear) and not _whole_logits.get(head) else None


def _through_head(
    model: nn.Module, inputs: PackedInputs, head: nn.Linear, forward: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return what `forward` has in place of the head's logits, [R, J]; None: the model changes its head's results."""
    patched: Any = head
    # Patch the head's own forward: FSDP2 has gathered its weight there, and its result passes the model's hooks.
    patched.forward = lambda hidden_1AD: _with_witness(forward(hidden_1AD[0]))
    try:
        found_RJ = _forward(model, inputs)
    finally:
        del patched.forward
    if head not in _whole_logits:  # the first time only, since it waits for the device
        _whole_logits[head] = not bool((found_RJ[-1] == _WITNESS).all())
        if _whole_logits[head]:
            return None
    return found_RJ[:-1]


def _with_witness(found_RJ: Tensor) -> Tensor:
    """Return [1, R + 1, J] in place of logits: what was found, then a row of `_WITNESS`."""
    # A new tensor: FSDP2 warns about views.
    return torch.cat([found_RJ[None], found_RJ.new_full((1, 1, found_RJ.shape[1]), _WITNESS)], dim=1)


def _head_forward(head: nn.Linear, request: HeadRequest, hidden_AD: Tensor) -> Tensor:
    """Return [R, 2]: log-probabilities and entropies of drawn tokens, then the others' log-probabilities in pairs."""
    log_probs_A, entropy_A, others_P = head_results(hidden_AD, head.weight, head.bias, request)
    found_A2 = torch.stack([log_probs_A, entropy_A], dim=-1)
    if not len(others_P):
        return found_A2
    return torch.cat([found_A2, pad(others_P, (0, len(others_P) % 2)).view(-1, 2)])


def _top_forward(head: nn.Linear, temperature: float, k: int, num_tokens: int, hidden_AD: Tensor) -> Tensor:
    """Return [A, 2 K]: ids, which float32 holds up to 2^24, and log-probabilities."""
    ids_AK, log_probs_AK = head_top_log_probs(
        hidden_AD, head.weight, head.bias, temperature=temperature, k=k, num_tokens=num_tokens
    )
    return torch.cat([ids_AK.to(log_probs_AK.dtype), log_probs_AK], dim=1)


def _forward(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """Return the model's output for the tokens that predict drawn ones, [A, ...]."""
    output: Any = model(
        input_ids=inputs.tokens_T.unsqueeze(0),
        position_ids=inputs.positions_T.unsqueeze(0),
        logits_to_keep=inputs.predictors_A,
        packed_layout=inputs.layout,
        use_cache=False,
    )
    logits_AV: Tensor = output.logits[0]
    return logits_AV


def _of_whole_logits(logits_AV: Tensor, inputs: PackedInputs, temperature: float, *, entropy: bool) -> HeadResults:
    if temperature != 1.0:
        logits_AV = logits_AV / temperature
    log_probs_AV = logits_AV.log_softmax(-1)
    log_probs_A = log_probs_AV.gather(-1, inputs.targets_A.unsqueeze(-1)).squeeze(-1)
    others, others_P = inputs.others, log_probs_A.detach()[:0]
    if others is not None:
        others_P = log_probs_AV[others.place_P, others.ids_P][others.back_P]
    if not entropy:
        return HeadResults(log_probs_A, log_probs_A.detach()[:0], others_P)
    # Recompute in the backward pass: keeping it would store two more copies of the logits, which few losses need.
    entropy_A: Tensor = checkpoint(_entropy, log_probs_AV, use_reentrant=False)
    return HeadResults(log_probs_A, entropy_A, others_P)


def _entropy(log_probs_AV: Tensor) -> Tensor:
    return -(log_probs_AV.exp() * log_probs_AV).sum(-1)


@dataclass(frozen=True)
class _Document:
    """Neighbouring tokens of one or several samples."""

    source: int  # first token in the micro-batch
    length: int
    samples: tuple[int, ...]  # those that own the tokens; several for a shared prompt
    position: int = 0  # of the first token; 0 unless it continues a prompt
    prompt: int = ALONE  # index of the document that it continues


def _documents(
    tokens_T: Tensor, starts: list[int], lengths: list[int], prompts: list[int], *, shared_prompt: bool
) -> list[_Document]:
    """Return a micro-batch's documents: lone samples and shared prompts by length, then what continues the latter."""
    groups: dict[object, list[int]] = {}
    for sample, start in enumerate(starts):
        key = tokens_T[start : start + prompts[sample]].numpy().tobytes() if shared_prompt else sample
        groups.setdefault(key, []).append(sample)
    first = []
    for samples in groups.values():
        one = samples[0]
        # A shared prompt ends before the first drawn token; a lone sample is fed up to its last token but one.
        fed = prompts[one] if len(samples) > 1 else max(prompts[one], lengths[one] - 1)
        first.append(_Document(starts[one], fed, tuple(samples)))
    first.sort(key=lambda document: document.length)
    responses = []
    for place, document in enumerate(first):
        fed_last = [s for s in document.samples if lengths[s] - 1 > prompts[s]] if len(document.samples) > 1 else []
        for sample in sorted(fed_last, key=lambda sample: lengths[sample]):
            prompt = prompts[sample]
            source, length = starts[sample] + prompt, lengths[sample] - 1 - prompt
            responses.append(_Document(source, length, (sample,), position=prompt, prompt=place))
    return first + responses


def _ranges(parts: list[tuple[int, int]]) -> Tensor:
    """Return the concatenation of `arange(start, start + length)`, int64."""
    starts_N, lengths_N = torch.tensor(parts, dtype=torch.int64).unbind(1)
    before_N = lengths_N.cumsum(0) - lengths_N
    return torch.arange(int(lengths_N.sum())) + (starts_N - before_N).repeat_interleave(lengths_N)
