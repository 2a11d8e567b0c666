"""Checksums of tensors: from whatever parts they are summed, the number is the same, and any change changes it."""

import random

import pytest
import torch

from weightsync.checksums import box_checksum, tensor_checksum
from weightsync.plan import Box

MASK = 2**64 - 1


def random_parts(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Cut a tensor along random planes into boxes."""
    boxes = [Box.from_shape(shape)]
    for axis, length in enumerate(shape):
        cut = chance.randint(0, length)
        halves = []
        for box in boxes:
            for start, size in ((0, cut), (cut, length - cut)):
                offset, sizes = list(box.offset), list(box.size)
                offset[axis], sizes[axis] = start, size
                halves.append(Box(tuple(offset), tuple(sizes)))
        boxes = halves
    return boxes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (13,), (64,), (5, 12), (7, 9), (3, 4, 6), (2, 3, 5, 8)])
def test_parts_add_up_to_the_checksum_of_the_whole(shape: tuple[int, ...], dtype: str) -> None:
    chance = random.Random(str((shape, dtype)))
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(getattr(torch, dtype))
    whole = int(tensor_checksum(values)) & MASK
    for _ in range(10):
        parts = random_parts(shape, chance)
        assert sum(int(box_checksum(values[box.slices], box, shape)) for box in parts) & MASK == whole


def test_it_is_the_sum_of_words_times_factors_of_their_places() -> None:
    """The definition, in Python's integers: words of a row, little end first, padded with zeros."""
    from weightsync.checksums import _TENSOR_ROWS, _TENSOR_WORDS, _odd_numbers

    values = torch.arange(1, 22, dtype=torch.int16).reshape(3, 7).view(torch.bfloat16)
    rows, words = (_odd_numbers(8, table, values.device).tolist() for table in (_TENSOR_ROWS, _TENSOR_WORDS))
    expected = 0
    for r, row in enumerate(values.view(torch.int16).tolist()):
        for w in range(2):
            word = sum(bits << 16 * k for k, bits in enumerate(row[4 * w : 4 * w + 4]))
            expected += rows[r] * words[w] * word
    assert int(tensor_checksum(values)) & MASK == expected & MASK


def test_a_bit_two_rows_or_two_columns_change_it() -> None:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = int(tensor_checksum(values))
    for place in range(values.numel()):
        changed = values.clone()
        changed.view(torch.int16).view(-1)[place] ^= 1
        assert int(tensor_checksum(changed)) != whole
    assert int(tensor_checksum(values[[1, 0, 2, 3, 4, 5]])) != whole
    assert int(tensor_checksum(values[:, [4, 1, 2, 3, 0, 5, 6, 7]])) != whole


def test_large_tensors_are_summed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(40, 16)
    whole = int(tensor_checksum(values))
    monkeypatch.setattr("weightsync.checksums._WORDS_AT_A_TIME", 24)
    assert int(tensor_checksum(values)) == whole
    assert int(tensor_checksum(values.t().contiguous().t())) == whole, "strides do not matter"
