"""Memory that is used again."""

import torch

from asyncflow.transport.channel import BufferPool


def test_buffer_is_used_again_after_its_last_view_is_gone() -> None:
    pool = BufferPool(2**20)
    first = pool.borrow_buffer(1000)
    second = pool.borrow_buffer(1000)
    first.fill_(1)
    second.fill_(2)
    assert int(first.sum()) == 1000
    place = first.data_ptr()
    view = first[10:20]
    del first
    assert pool.borrow_buffer(1000).data_ptr() != place
    del view
    assert pool.borrow_buffer(1000).data_ptr() == place
    assert int(second.sum()) == 2000


def test_long_use_does_not_grow() -> None:
    pool = BufferPool(2**20)
    for _ in range(1000):
        pool.borrow_buffer(100_000)
    assert pool.highest < 250_000


def test_what_does_not_fit_is_allocated_as_usual() -> None:
    pool = BufferPool(2**16)
    kept = [pool.borrow_buffer(2**15) for _ in range(4)]
    assert [buffer.numel() for buffer in kept] == [2**15] * 4
    assert pool.borrow_buffer(2**17).dtype is torch.uint8
    assert pool.borrow_buffer(0).numel() == 0
