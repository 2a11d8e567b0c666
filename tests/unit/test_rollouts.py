"""Rows of several samples, and what the trainer makes of them."""

import torch

from tq.columns import Column, PackedBatch
from workers.rows.packed_rows import (
    ROW_BEGINS,
    ROW_DRAWN,
    SAMPLE_DRAWN,
    drawn_per_row,
    drawn_per_sample,
    responses_of,
    sample_columns,
    samples_of,
)

ROWS = (
    ([5, 6, 7, 8, 9, 1], [6], [0, 0, 1, 1, 0, 1]),
    ([5, 6, 7, 5, 8, 5, 9], [3, 2, 2], [0, 0, 1, 0, 0, 0, 1]),
    ([4, 3], [2], [0, 0]),
)
"""Tokens, lengths of the samples, mask: two turns; three samples, the second without a drawn token; none at all."""


def rows() -> PackedBatch:
    columns = {
        "tokens": Column.of_rows([torch.tensor(tokens) for tokens, _, _ in ROWS]),
        "sample_lengths": Column.of_rows([torch.tensor(lengths, dtype=torch.int32) for _, lengths, _ in ROWS]),
        "response_mask": Column.of_rows([torch.tensor(mask, dtype=torch.uint8) for _, _, mask in ROWS]),
        "rollout_log_probs": Column(torch.arange(5.0), torch.tensor([3, 2, 0], dtype=torch.int32)),
        "rewards": Column.of_scalars(torch.tensor([1.0, 0.5, 0.0])),
    }
    return PackedBatch((7, 8, 9), columns, (3, 3, 4))


def test_what_was_drawn_is_counted_and_read_per_row_and_sample() -> None:
    assert drawn_per_row(rows()).tolist() == [3, 2, 0]
    assert drawn_per_sample(rows()).tolist() == [3, 1, 0, 1, 0]
    assert [row.tolist() for row in responses_of(rows())] == [[7, 8, 1], [7, 9], []]


def test_a_sample_has_its_slices_and_what_its_row_has() -> None:
    samples = samples_of(rows())
    assert (samples.indices, samples.groups) == ((7, 8, 8, 8, 9), (3, 3, 3, 3, 4))
    assert [row.tolist() for row in samples["tokens"].rows()] == [[5, 6, 7, 8, 9, 1], [5, 6, 7], [5, 8], [5, 9], [4, 3]]
    assert [row.tolist() for row in samples["rollout_log_probs"].rows()] == [[0, 1, 2], [3], [], [4], []]
    assert samples["rewards"].values.tolist() == [1.0, 0.5, 0.5, 0.5, 0.0]
    assert samples[SAMPLE_DRAWN].values.tolist() == [3, 1, 0, 1, 0]
    assert samples[ROW_DRAWN].values.tolist() == [3, 2, 2, 2, 0]
    assert samples[ROW_BEGINS].values.tolist() == [True, True, False, False, True]
    chosen = samples.select([3, 0])
    assert chosen["response_mask"].values.tolist() == [0, 1, 0, 0, 1, 1, 0, 1]
    assert chosen["sample_lengths"].values.tolist() == [2, 6]


def test_advantages_per_token_are_cut_and_those_per_row_repeated() -> None:
    per_token = Column(torch.arange(5.0), rows()["rollout_log_probs"].lengths)
    per_row = Column.of_scalars(torch.tensor([1.0, 2.0, 3.0]))
    cut, repeated = (samples_of(rows().with_columns({"advantages": one}))["advantages"] for one in (per_token, per_row))
    assert [row.tolist() for row in cut.rows()] == [[0, 1, 2], [3], [], [4], []]
    assert repeated.values.tolist() == [1, 2, 2, 2, 3]


def test_rows_of_one_turn_are_their_samples() -> None:
    prompts, responses = [torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4]), torch.tensor([5, 6])]
    batch = PackedBatch((0, 1), sample_columns(prompts, responses))
    samples = samples_of(batch)
    assert samples["tokens"].values.tolist() == [1, 2, 4, 3, 5, 6]
    assert samples["response_mask"].values.tolist() == [0, 0, 1, 0, 1, 1]
    assert [row.tolist() for row in responses_of(batch)] == [[4], [5, 6]]
    assert samples[SAMPLE_DRAWN].values.tolist() == samples[ROW_DRAWN].values.tolist() == [1, 2]
    assert not len(samples_of(PackedBatch((), {})))
