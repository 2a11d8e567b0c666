"""The rows that training reads: a row is a rollout, with its samples (token sequences) ragged inside it. Pure.

    tokens            p p p d d o d | p p d      T      d: drawn by the policy in this rollout, and trained here
    sample_lengths    7               3          S
    response_mask     0 0 0 1 1 0 1 | 0 0 1      T      p, o: prompt and observations
    rollout_log_probs       d d   d       d      A      like every column with one value per drawn token

Column tasks compute on rows. The trainer splits a round's rows into samples (`samples_of`), so that micro-batches are
cut at sample borders; every sample carries the sums and counts of its whole rollout.

Legend of shapes: N rows, S their samples, T tokens of these, A drawn tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tq.columns import Column, PackedBatch
from tq.policies import split_by_tokens
from workers.rows.micro_batches import cut_by_rows, cut_by_tokens
from workers.settings.dataflow import DRAWN_COLUMNS, KEPT_COLUMNS, SAMPLE_COLUMNS, WIDE_COLUMNS
from workers.settings.engines import TrainingConfig

SAMPLE_DRAWN, ROW_DRAWN, ROW_BEGINS = "sample_drawn", "row_drawn", "row_begins"
# Columns of samples, in the trainer alone: drawn tokens of the sample and of its row; whether it is the row's first.


@dataclass(frozen=True)
class TokenSets:
    """A set of token ids for each drawn token of a micro-batch; a set has no id twice."""

    ids_P: Tensor  # int32 [P], one set after the other
    counts_A: Tensor  # int32 [A], the size of each set

    @staticmethod
    def of(sets: Sequence[Sequence[int]]) -> "TokenSets":
        ids_P = torch.tensor([token for one in sets for token in one], dtype=torch.int32)
        return TokenSets(ids_P, torch.tensor([len(one) for one in sets], dtype=torch.int32))

    @staticmethod
    def from_column(column: Column, num_drawn: int) -> "TokenSets":
        """Return the sets of a column in which each of `num_drawn` tokens has equally many ids."""
        size = len(column.values) // max(1, num_drawn)
        return TokenSets(column.values, torch.full((num_drawn,), size, dtype=torch.int32))

    def contains(self, tokens_A: Tensor) -> Tensor:
        """Return bool [A]: whether each drawn token is in its set."""
        place_P = torch.arange(len(self.counts_A)).repeat_interleave(self.counts_A.long())
        is_own_P = self.ids_P == tokens_A[place_P]
        return torch.zeros(len(tokens_A), dtype=torch.bool).index_put((place_P[is_own_P],), torch.tensor(True))

    def part(self, begin: int, end: int) -> "TokenSets":
        """Return the sets of drawn tokens `begin` to `end`."""
        first = int(self.counts_A[:begin].sum())
        counts_A = self.counts_A[begin:end]
        return TokenSets(self.ids_P[first : first + int(counts_A.sum())], counts_A)


@dataclass(frozen=True)
class TopTokens:
    """The K likeliest tokens where each of R tokens was drawn, by the policy that drew it."""

    ids_RK: Tensor  # int32 [R, K]
    log_probs_RK: Tensor  # float32 [R, K], of the tempered distribution before top-p and top-k

    @staticmethod
    def joined(parts: "Sequence[TopTokens]") -> "TopTokens":
        """Return those of the tokens of all parts, one part after the other."""
        return TopTokens(torch.cat([one.ids_RK for one in parts]), torch.cat([one.log_probs_RK for one in parts]))

    def part(self, begin: int, end: int) -> "TopTokens":
        """Return those of drawn tokens `begin` to `end`."""
        return TopTokens(self.ids_RK[begin:end], self.log_probs_RK[begin:end])


@dataclass(frozen=True)
class Sequences:
    """A packed micro-batch of N samples."""

    tokens_T: Tensor  # int64 [T], one sample after the other
    lengths_N: Tensor  # int32 [N], tokens of each sample
    response_mask_T: Tensor  # uint8 [T], 1: drawn. Results for the A drawn tokens are in their order.
    # Tokens whose log-probabilities a loss needs beside those of the drawn ones.
    others: TokenSets | None = None
    # The tokens that each drawn one was drawn from (top-p, top-k), itself included: log-probabilities and entropies are
    # those of the distribution over them. None: all tokens. Not together with `others`.
    kept: TokenSets | None = None

    @property
    def num_drawn(self) -> int:
        return int(self.response_mask_T.sum())

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """int32 [N]: the number of tokens before the first drawn one; all tokens of a sample without any."""
        starts_N = self.lengths_N.cumsum(0) - self.lengths_N
        sample_T = torch.arange(len(self.lengths_N)).repeat_interleave(self.lengths_N)
        place_T = (torch.arange(len(self.tokens_T)) - starts_N[sample_T]).int()
        drawn_T = self.response_mask_T.bool()
        return self.lengths_N.int().scatter_reduce(0, sample_T[drawn_T], place_T[drawn_T], "amin")

    def clamped(self, num_tokens: int) -> "Sequences":
        """Return the samples for a model with `num_tokens` tokens; those beyond become its last one.

        Only padded embeddings of the policy have such tokens. They are no text, and hardly ever drawn.
        """
        most, kept = num_tokens - 1, self.kept
        if kept is not None:
            kept = TokenSets(kept.ids_P.clamp(max=most), kept.counts_A)
        return replace(self, tokens_T=self.tokens_T.clamp(max=most), kept=kept)

    def part(self, samples: slice, tokens: slice) -> "Sequences":
        """Return neighbouring samples, of which `tokens` are the tokens."""
        mask_T = self.response_mask_T[tokens]
        begin = int(self.response_mask_T[: tokens.start].sum())
        end = begin + int(mask_T.sum())
        others, kept = (None if sets is None else sets.part(begin, end) for sets in (self.others, self.kept))
        return Sequences(self.tokens_T[tokens], self.lengths_N[samples], mask_T, others, kept)

    @staticmethod
    def from_turns(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> "Sequences":
        """Join prompt (int64 [P]) and response (int64 [R]) of each of N >= 1 samples of one turn."""
        parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        length_NP = torch.tensor([len(part) for part in parts], dtype=torch.int32).reshape(-1, 2)
        is_response = torch.tensor([0, 1], dtype=torch.uint8).repeat(len(length_NP))
        return Sequences(torch.cat(parts), length_NP.sum(1).int(), is_response.repeat_interleave(length_NP.flatten()))


def sample_columns(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> dict[str, Column]:
    """Return the sample columns of N >= 1 rows with one turn each; int64 [P] and int64 [R] each."""
    pairs = list(zip(prompts, responses, strict=True))
    masks = [
        torch.cat([torch.zeros(len(p), dtype=torch.uint8), torch.ones(len(r), dtype=torch.uint8)]) for p, r in pairs
    ]
    tokens = Column.of_rows([torch.cat(pair) for pair in pairs])
    lengths = Column(tokens.lengths, torch.ones_like(tokens.lengths))
    return dict(zip(SAMPLE_COLUMNS, (tokens, lengths, Column.of_rows(masks)), strict=True))


def supervised_columns(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Column]:
    """Return the sample columns of N >= 1 rows of SFT: tokens, int64 [T], and which are trained, uint8 [T], of each."""
    tokens = Column.of_rows([row for row, _ in rows])
    lengths = Column(tokens.lengths, torch.ones_like(tokens.lengths))
    return dict(zip(SAMPLE_COLUMNS, (tokens, lengths, Column.of_rows([mask for _, mask in rows])), strict=True))


def drawn_per_row(batch: PackedBatch) -> Tensor:
    """Return int32 [N]: the drawn tokens of each row; `batch`: column `response_mask`."""
    return _ones(batch["response_mask"].values, batch["response_mask"].lengths)


def drawn_column(values_A: Tensor, batch: PackedBatch) -> Column:
    """Return a column with a value, or K, per drawn token, [A] or [A, K] on any device; `batch`: `response_mask`."""
    return per_drawn_token(values_A.flatten().cpu(), drawn_per_row(batch))


def per_drawn_token(values: Tensor, drawn_N: Tensor) -> Column:
    """Return the column of rows with `drawn_N` drawn tokens, int32 [N], that have equally many values each."""
    return Column(values, drawn_N * (len(values) // max(1, int(drawn_N.sum()))))


def drawn_per_sample(batch: PackedBatch) -> Tensor:
    """Return int32 [S]: the drawn tokens of each sample; `batch`: columns `sample_lengths`, `response_mask`."""
    return _ones(batch["response_mask"].values, batch["sample_lengths"].values)


def responses_of(batch: PackedBatch) -> list[Tensor]:
    """Return the drawn tokens of each row, int64, in order; `batch`: columns `tokens`, `response_mask`."""
    drawn_A = batch["tokens"].values[batch["response_mask"].values.bool()]
    return list(torch.split(drawn_A, drawn_per_row(batch).tolist()))


def samples_of(batch: PackedBatch) -> PackedBatch:
    """Return the S samples of N >= 0 rows as rows of their own, in order, with views of the token columns.

    A sample has its slices of per-token columns, and its row's index, group and columns with one value per row.
    """
    if not len(batch):
        return batch
    length_S, drawn_S, drawn_N = batch["sample_lengths"].values, drawn_per_sample(batch), drawn_per_row(batch)
    samples_N = batch["sample_lengths"].lengths.long()
    row_S = torch.arange(len(batch)).repeat_interleave(samples_N)
    rows = row_S.tolist()
    one_each_S = torch.ones_like(length_S)
    columns = {
        "tokens": Column(batch["tokens"].values, length_S),
        "sample_lengths": Column(length_S, one_each_S),
        "response_mask": Column(batch["response_mask"].values, length_S),
        SAMPLE_DRAWN: Column.of_scalars(drawn_S),
        ROW_DRAWN: Column.of_scalars(drawn_N[row_S]),
        ROW_BEGINS: Column.of_scalars(torch.diff(row_S, prepend=torch.tensor([-1])) != 0),
    }
    for name, column in batch.columns.items():
        if name in DRAWN_COLUMNS or (name == "advantages" and torch.equal(column.lengths, drawn_N)):
            columns[name] = Column(column.values, drawn_S)
        elif name in WIDE_COLUMNS:
            columns[name] = per_drawn_token(column.values, drawn_S)
        elif name not in columns:
            columns[name] = column if len(rows) == len(batch) else column.select(rows)
    groups = tuple(batch.groups[row] for row in rows) if batch.groups else ()
    return PackedBatch(tuple(batch.indices[row] for row in rows), columns, groups)


def _ones(mask_T: Tensor, length_K: Tensor) -> Tensor:
    """Return int32 [K]: the number of ones in each run of the mask."""
    piece_T = torch.arange(len(length_K)).repeat_interleave(length_K.long())
    return torch.zeros(len(length_K), dtype=torch.int32).index_add(0, piece_T, mask_T.int())


def sequences_of(batch: PackedBatch, *, others: str | None = None) -> Sequences:
    """Return the packed sequences of N >= 1 rows with the sample columns, neither padded nor sorted.

    `others` names the column of `Sequences.others`, with equally many ids for each drawn token.
    """
    tokens_T, lengths_N, response_mask_T = (batch[name].values for name in SAMPLE_COLUMNS)
    sequences = Sequences(tokens_T, lengths_N, response_mask_T)
    if KEPT_COLUMNS[0] in batch.columns:
        ids_P, counts_A = (batch[name].values for name in KEPT_COLUMNS)
        sequences = replace(sequences, kept=TokenSets(ids_P, counts_A))
    if others is None:
        return sequences
    return replace(sequences, others=TokenSets.from_column(batch[others], sequences.num_drawn))


def micro_batches(batch: PackedBatch, config: TrainingConfig) -> list[Sequence[int]]:
    """Return the positions of samples in each micro-batch, every one of the N >= 0 samples once."""
    if not len(batch):
        return []
    if not config.max_tokens_per_micro_batch:
        begins = batch[ROW_BEGINS].values.nonzero()[:, 0].tolist()
        return cut_by_rows(begins, len(batch), config.micro_batch_size)
    tokens, budget = batch["tokens"].lengths.tolist(), config.max_tokens_per_micro_batch
    if not config.shared_prompt:
        return [*split_by_tokens(tokens, budget)]
    before = sequences_of(batch).prompt_lengths.tolist()
    prompts = [row[:size].numpy().tobytes() for row, size in zip(batch["tokens"].rows(), before, strict=True)]
    lengths = [(size, total - size) for size, total in zip(before, tokens, strict=True)]
    return [*cut_by_tokens(prompts, lengths, budget)]
