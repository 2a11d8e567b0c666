"""What all storage backends have in common: `from asyncflow.testing.backends import *` in a test module.

The module must have a fixture `open_backend` that returns a function: name of a unit -> its backend, with all units of
one run at one server.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from asyncflow.errors import TransportError
from tq.backends.backend import Backend

OpenBackend = Callable[[str], Backend]


@pytest.fixture
def backend(open_backend: OpenBackend) -> Iterator[Backend]:
    opened = open_backend("storage-0")
    yield opened
    opened.close()


def block(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [1, 4096, 2**24, 3 * 2**25 + 8])
def test_block_comes_back_as_it_was(backend: Backend, num_bytes: int) -> None:
    payload = block(num_bytes)
    backend.store("asyncflow:run-1:storage-0:i:0", payload)
    assert torch.equal(backend.load("asyncflow:run-1:storage-0:i:0", num_bytes), payload)


def test_blocks_are_kept_apart_and_deleted_one_by_one(backend: Backend) -> None:
    keys = [f"asyncflow:run-1:storage-0:i:{k}" for k in range(3)]
    for k, key in enumerate(keys):
        backend.store(key, block(1000, seed=k))
    backend.delete([keys[1], "asyncflow:run-1:storage-0:i:99"])
    with pytest.raises(TransportError, match=f"{re.escape(backend.name.split()[0])}.*no block {keys[1]}"):
        backend.load(keys[1], 1000)
    for k in (0, 2):
        assert torch.equal(backend.load(keys[k], 1000), block(1000, seed=k))
    backend.delete([])
    backend.delete(keys)


def test_block_that_was_read_can_be_deleted_at_once(backend: Backend) -> None:
    for _ in range(3):
        backend.store("asyncflow:run-1:storage-0:i:0", block(2**20))
        backend.load("asyncflow:run-1:storage-0:i:0", 2**20)
        backend.delete(["asyncflow:run-1:storage-0:i:0"])
    with pytest.raises(TransportError, match="no block"):
        backend.load("asyncflow:run-1:storage-0:i:0", 2**20)


def test_wrong_size_is_noticed(backend: Backend) -> None:
    backend.store("asyncflow:run-1:storage-0:i:0", block(1000))
    with pytest.raises(TransportError, match="no block"):
        backend.load("asyncflow:run-1:storage-0:i:0", 999)


def test_closed_backend_leaves_nothing_and_may_be_closed_again(open_backend: OpenBackend) -> None:
    first, other = open_backend("storage-0"), open_backend("storage-00")
    first.store("asyncflow:run-1:storage-0:i:0", block(1000))
    other.store("asyncflow:run-1:storage-00:i:0", block(1000, seed=1))
    first.close()
    first.close()
    assert torch.equal(other.load("asyncflow:run-1:storage-00:i:0", 1000), block(1000, seed=1))
    other.close()
