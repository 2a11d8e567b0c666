"""Regions that two ends share: what a receiver believes, and when memory is used again."""

import contextlib
import gc
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from asyncflow.errors import TransportError
from asyncflow.transport.frame import Arena, ArenaOffer, PeerArena, create_memfd, open_memfd, take_released

NUM_BYTES = 2**20


@pytest.fixture(name="arena")
def _arena() -> Arena:
    return Arena(NUM_BYTES)


@pytest.fixture(name="peer")
def _peer(arena: Arena) -> PeerArena:
    return PeerArena(os.getpid(), arena.offer)


def test_receiver_reads_what_was_written_where_it_is(arena: Arena, peer: PeerArena) -> None:
    offset = _put(arena, 5, 1000)
    view = peer.borrow_region(offset, 1000, arena.offer.generation)
    assert torch.equal(view, torch.full((1000,), 5, dtype=torch.uint8))
    view[0] = 6
    assert arena.view_region(offset, 1)[0] == 6


def test_region_is_used_again_only_after_its_last_view_is_gone(arena: Arena, peer: PeerArena) -> None:
    offset = _put(arena, 1, 64)
    views = [peer.borrow_region(offset, 64, arena.offer.generation)]
    views += [views[0][8:16].view(torch.int32), views[0].numpy()[:3], views[0].view(8, 8).t()]
    while views:
        assert take_released(peer.released, 10) == []
        views.pop(0)
    assert take_released(peer.released, 10) == [offset]
    arena.release_regions([offset])
    assert arena.idle
    assert arena.allocate_region(64) == offset


def test_last_view_may_go_in_any_thread(arena: Arena, peer: PeerArena) -> None:
    held = [peer.borrow_region(_put(arena, k, 64), 64, arena.offer.generation) for k in range(20)]
    threads = [threading.Thread(target=held.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    first, rest = take_released(peer.released, 15), take_released(peer.released, 15)
    assert (len(first), len(rest)) == (15, 5)
    arena.release_regions(first + rest)
    assert arena.idle


def test_views_outlive_both_ends(arena: Arena) -> None:
    offset = _put(arena, 9, 100)
    view = PeerArena(os.getpid(), arena.offer).borrow_region(offset, 100, arena.offer.generation)
    arena.close()
    del arena
    assert int(view.sum()) == 900


def test_handles_that_do_not_belong_to_the_arena_are_refused(arena: Arena, peer: PeerArena) -> None:
    generation = arena.offer.generation
    offset = _put(arena, 1, 64)
    for bad in (
        (0, 64, generation),  # the token's page
        (offset + 1, 64, generation),
        (offset, NUM_BYTES, generation),
        (NUM_BYTES - 64, 65, generation),
        (2**63, 64, generation),
        (offset, 0, generation),
        (offset, 64, generation ^ 1),
    ):
        with pytest.raises(TransportError, match="does not belong"):
            peer.borrow_region(*bad)


def test_release_of_what_was_not_sent_is_refused(arena: Arena) -> None:
    offset = _put(arena, 1, 64)
    arena.release_regions([offset])
    for bad in (offset, offset + 64, 0, 2**63):
        with pytest.raises(TransportError, match="no region is in use"):
            arena.release_regions([bad])


def test_arena_without_room_says_so(arena: Arena) -> None:
    assert arena.allocate_region(NUM_BYTES) is None
    offset = arena.allocate_region(NUM_BYTES - 4096)
    assert offset == 4096
    assert arena.allocate_region(1) is None


def test_nothing_but_the_offered_memory_is_mapped(arena: Arena) -> None:
    pid, offer = os.getpid(), arena.offer
    other, token = create_memfd(4096)
    for changes in ({"token": b"x" * 16}, {"num_bytes": 2 * NUM_BYTES}, {"fd": other}, {"fd": 10**6}, {"fd": 0}):
        with pytest.raises(TransportError, match="arena"):
            PeerArena(pid, msgspec.structs.replace(offer, **changes))
    os.close(open_memfd(pid, other, 4096, token))
    with pytest.raises(TransportError, match="cannot be opened"):
        open_memfd(2**22 + 1, offer.fd, NUM_BYTES, offer.token)
    os.close(other)


def test_memory_that_may_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("asyncflow", os.MFD_CLOEXEC)
    os.pwrite(fd, b"t" * 16 + bytes(4080), 0)
    with pytest.raises(TransportError, match="not what the peer offered"):
        PeerArena(os.getpid(), ArenaOffer(fd, 4096, 0, b"t" * 16))
    os.close(fd)


def test_descriptors_are_closed_once_the_peer_has_the_mapping() -> None:
    before = _descriptors()
    arena = Arena(NUM_BYTES)
    peer = PeerArena(os.getpid(), arena.offer)
    assert _descriptors() == before + 1
    offset = _put(arena, 1, 64)
    peer.borrow_region(offset, 64, arena.offer.generation)
    arena.release_regions(take_released(peer.released, 1))
    arena.close()
    arena.close()
    assert _descriptors() == before
    assert arena.allocate_region(64) == offset


def _put(arena: Arena, value: int, num_bytes: int) -> int:
    offset = arena.allocate_region(num_bytes)
    assert offset is not None
    arena.view_region(offset, num_bytes).fill_(value)
    return offset


def _descriptors() -> int:
    """Return how many of this process are of shared memory; other tests' may be closed at any time."""
    gc.collect()
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += link.readlink().name.startswith("memfd:asyncflow")
    return count
