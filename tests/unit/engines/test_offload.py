"""State that leaves its device and comes back: memory, views, blocks. On the CPU, where blocks are ordinary memory."""

import pytest
import torch

import workers.engines.offload
from asyncflow.errors import ConfigError
from workers.engines.offload import StateOffload

CPU = torch.device("cpu")


def test_memory_leaves_once_and_all_views_of_it_come_back_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.engines.offload, "_BLOCK_BYTES", 100)  # so that a tensor lies in several blocks
    buffer = torch.randn(64)
    weight, gradient = torch.nn.Parameter(buffer[:40].view(5, 8)), buffer[40:]
    moment = torch.full((7,), float("nan"))
    expected = [each.detach().clone() for each in (buffer, weight, gradient, moment)]
    offload = StateOffload(CPU)
    for _ in range(2):
        offload.move_out([weight, gradient, moment])
        assert offload.is_out and [each.untyped_storage().nbytes() for each in (buffer, moment)] == [0, 0]
        offload.move_in()
        assert not offload.is_out
        for value, each in zip(expected, (buffer, weight, gradient, moment), strict=True):
            torch.testing.assert_close(each.detach(), value, rtol=0, atol=0, equal_nan=True)
    weight.data.fill_(3.0)
    assert buffer[:40].eq(3.0).all(), "it is a view as before"


def test_a_host_without_memory_is_told_and_nothing_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, offload = torch.ones(10), StateOffload(CPU)

    with monkeypatch.context() as patched:
        patched.setattr(workers.engines.offload, "_BLOCK_BYTES", 2**62)  # which no machine has
        with pytest.raises(ConfigError, match="roles: no host memory for the state of a model that sleeps: 0 blocks"):
            offload.move_out([tensor])
    assert not offload.is_out and tensor.eq(1).all()


def test_scratch_comes_back_without_a_copy_and_memory_of_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.engines.offload, "_BLOCK_BYTES", 4096)
    kept, scratch = torch.ones(10), torch.ones(5000)
    others = torch.frombuffer(bytearray(16), dtype=torch.float32)  # as weights that a model adopted
    offload = StateOffload(CPU)
    offload.move_out([kept, others], [scratch, kept])
    assert (kept.untyped_storage().nbytes(), scratch.untyped_storage().nbytes()) == (0, 0)
    assert len(offload._blocks) == 1, "scratch was copied"
    assert others.eq(0).all()
    offload.move_in()
    assert kept.eq(1).all() and scratch.untyped_storage().nbytes() == 20000


def test_memory_that_a_killed_process_still_has_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.engines.offload, "_LOOK_S", 0.0)
    resize, refusals = torch.UntypedStorage.resize_, 3

    def full(storage: torch.UntypedStorage, num_bytes: int) -> None:
        nonlocal refusals
        if num_bytes and refusals:
            refusals -= 1
            raise torch.OutOfMemoryError("no room")
        resize(storage, num_bytes)

    tensors, offload = [torch.ones(10), torch.full((20,), 2.0)], StateOffload(CPU)
    offload.move_out(tensors)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    offload.move_in()
    assert refusals == 0 and tensors[0].eq(1).all() and tensors[1].eq(2).all()

    offload.move_out(tensors)
    monkeypatch.setattr(workers.engines.offload, "_FREED_S", 0.0)
    refusals = 1
    with pytest.raises(torch.OutOfMemoryError):
        offload.move_in()
    assert offload.is_out, "what was kept is still in host memory"
