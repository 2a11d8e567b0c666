"""Checksums of weights, computed by the device that has them: of a bucket's words, and of a tensor from its parts.

A checksum is the sum of all 64-bit words, each multiplied by an odd number that depends on its position, modulo 2**64.
Integers add exactly in any order, so every device computes the same sum, and a change of any single word always changes
it. Since a sum can be made of parts, ranks that hold different boxes of a tensor add theirs up, and a fused or sharded
layout gives the same number as the whole tensor.
"""

from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from weightsync.plan import Box

_WORD_BYTES = 8
_COLUMNS = 1024
# Where the tables of factors begin, in units of 2**40.
_ROW_FACTORS, _COLUMN_FACTORS, _TENSOR_ROWS, _TENSOR_WORDS = 1, 2, 3, 4
# Tables of tensors' factors have a multiple of this many numbers, so that few different ones are made.
_TABLE_STEP = 4096
# Words of a tensor that are multiplied at a time: accelerators need memory for the products.
_WORDS_AT_A_TIME = 2**23
# Integer types of the same size, through which the bits of other types are read.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def checksum(words: Tensor) -> Tensor:
    """Return int64 []: sum over r, c of row(r) * column(c) * words[1024 r + c], modulo 2**64, for int64 [any] words."""
    rows, device = words.numel() // _COLUMNS, words.device
    body, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    columns = _odd_numbers(_COLUMNS, _COLUMN_FACTORS, device)
    sums = torch.cat((_row_sums(body, columns), (rest * columns[: rest.numel()]).sum().view(1)))
    return (sums * _odd_numbers(rows + 1, _ROW_FACTORS, device)).sum()


def box_checksum(values: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
    """Return int64 []: the share of a box in the checksum of its tensor. The shares of boxes that make up a tensor add
    up to the checksum, modulo 2**64.

    A tensor's words are those of its rows along the last dimension, each padded with zeros to whole words; its factors
    are row(r) * word(w), with rows numbered in row-major order.

    Args:
        values: the box's elements on any device, in its shape.
        shape: of the whole tensor.
    """
    if not box.numel:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    per_word = _WORD_BYTES // values.element_size()
    first, width = (box.offset[-1], box.size[-1]) if shape else (0, 1)
    flat = values.detach().reshape(-1, width)
    rows = _row_factors(box, shape, values.device)
    if first % per_word == 0 and width % per_word == 0:
        words = flat.contiguous().view(torch.int64)
        factors = _factors(_TENSOR_WORDS, first // per_word, words.shape[1], values.device)
    else:
        # A part of a word: its elements are moved to their places in the word, and summed one by one.
        words = _place_in_words(flat, first, per_word)
        place = torch.arange(first, first + width, device=values.device)
        factors = _factors(_TENSOR_WORDS, 0, place.numel() + first, values.device)[place // per_word]
    at_a_time = max(1, _WORDS_AT_A_TIME // words.shape[1])
    sums = [
        (_row_sums(part, factors) * own).sum()
        for part, own in zip(torch.split(words, at_a_time), torch.split(rows, at_a_time), strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def tensor_checksum(values: Tensor) -> Tensor:
    """Return the checksum of a whole tensor, int64 []."""
    shape = tuple(values.shape)
    return box_checksum(values, Box.from_shape(shape), shape)


def _place_in_words(flat: Tensor, first: int, per_word: int) -> Tensor:
    """Return int64: each element's bits, moved to where they are in their word."""
    flat = flat.contiguous()
    size = flat.element_size()
    bits = flat.view(torch.int64) if size == _WORD_BYTES else flat.view(_INTEGERS[size]).to(torch.int64)
    if size < _WORD_BYTES:
        bits = bits & ((1 << 8 * size) - 1)
    place = torch.arange(first, first + flat.shape[1], device=flat.device) % per_word
    return bits << (8 * size * place)


def _row_factors(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the factors of the rows of a box, int64 [rows], in row-major order."""
    leading = Box(box.offset[:-1], box.size[:-1])
    run = leading.contiguous_run(shape[:-1])
    if run is not None:
        return _factors(_TENSOR_ROWS, *run, device)
    numbers = torch.zeros((), dtype=torch.int64)
    for start, size, length in zip(leading.offset, leading.size, shape[:-1], strict=True):
        numbers = numbers[..., None] * length + torch.arange(start, start + size)
    return _factors(_TENSOR_ROWS, 0, prod(shape[:-1]), device)[numbers.flatten().to(device)]


def _factors(table: int, start: int, count: int, device: torch.device) -> Tensor:
    whole = -(-(start + count) // _TABLE_STEP) * _TABLE_STEP
    return _odd_numbers(whole, table, device)[start : start + count]


def _row_sums(words: Tensor, factors: Tensor) -> Tensor:
    # Accelerators have no integer matrix product. On the CPU it needs no second buffer and a sixth of the time.
    return words.mv(factors) if words.device.type == "cpu" else (words * factors).sum(1)


@lru_cache(maxsize=256)
def _odd_numbers(count: int, table: int, device: torch.device) -> Tensor:
    """Return int64 [count]: splitmix64 of the positions, lowest bit set (Steele et al. 2014, figure 14)."""
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64((table << 40) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)
