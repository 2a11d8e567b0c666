"""Lanes hold what was written to them, whatever enters, leaves and moves."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.engines.hf.lanes import KeyShape, Lane

SHAPE = KeyShape(num_layers=2, num_heads=2, head_dim=3, dtype=torch.float32, device=torch.device("cpu"))


def tokens(slot: int, count: int) -> Tensor:
    """Return float32 [J, P, D]: every token of a response is another number."""
    return (100.0 * slot + torch.arange(count)).view(1, -1, 1).expand(2, -1, 3)


def advance(lane: Lane, lengths: dict[int, int]) -> None:
    """Give every response its next token and check that it sees all of its own."""
    lane.open_column()
    num_rows = lane.num_rows
    mask = lane.attention_mask(num_rows)
    newest = torch.stack([tokens(slot, lengths[slot] + 1)[:, -1] for slot in lane.slots])
    for layer in range(2):
        keys, values = lane.append(layer, newest + layer, -newest, None)
        for row, slot in enumerate(lane.slots):
            count = lengths[slot] + 1
            assert keys[row, :, -count:].equal(tokens(slot, count) + layer)
            assert values[row, :, -count:].equal(-tokens(slot, count))
            seen = keys.shape[2] if mask is None else int((mask[row, 0, 0] == 0).sum())
            assert seen == count
    for slot in lane.slots:
        lengths[slot] += 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "advance"]), st.integers(1, 30)), max_size=40))
def test_responses_keep_their_tokens(events: list[tuple[str, int]]) -> None:
    lane = Lane(SHAPE, num_rows=1, length=3, max_new_tokens=4)
    lengths: dict[int, int] = {}
    next_slot = 0
    for what, number in events:
        if what == "join":
            count = 1 + number % 3
            slots = list(range(next_slot, next_slot + count))
            next_slot += count
            first = lane.join(slots, number)
            for layer in range(2):
                for place, slot in enumerate(slots):
                    row = slice(first + place, first + place + 1)
                    lane.write_tokens(layer, row, tokens(slot, number) + layer, -tokens(slot, number))
                    lengths[slot] = number
        elif what == "leave" and lane.num_rows:
            gone = lane.slots[:: 1 + number % 3]
            lane.remove_rows(gone)
            for slot in gone:
                del lengths[slot]
        elif lane.num_rows:
            advance(lane, lengths)
        assert sorted(lane.slots) == sorted(lengths)


def test_copied_response_is_pasted_as_it_was() -> None:
    lane = Lane(SHAPE, num_rows=2, length=5, max_new_tokens=4)
    lane.join([7], 5)
    for layer in range(2):
        lane.write_tokens(layer, slice(0, 1), tokens(7, 5) + layer, -tokens(7, 5))
    copied = lane.copy_of(7)
    other = Lane(SHAPE, num_rows=2, length=9, max_new_tokens=4)
    first = other.join([3, 4], 5)
    other.paste_rows(slice(first, first + 2), copied)
    assert other.copy_of(3).equal(copied) and other.copy_of(4).equal(copied)


def test_only_responses_of_about_the_same_length_share_a_lane() -> None:
    lane = Lane(SHAPE, num_rows=2, length=100, max_new_tokens=4)
    lane.join([0], 100)
    assert lane.response_fits(100) and lane.response_fits(80) and lane.response_fits(120)
    assert not lane.response_fits(60) and not lane.response_fits(160)
    assert Lane(SHAPE, num_rows=2, length=4, max_new_tokens=4).response_fits(12), "short ones always do"


def test_window_hides_what_is_too_old() -> None:
    lane = Lane(SHAPE, num_rows=2, length=5, max_new_tokens=4)
    lane.join([1], 5)
    for layer in range(2):
        lane.write_tokens(layer, slice(0, 1), tokens(1, 5), tokens(1, 5))
    lane.open_column()
    keys, _ = lane.append(0, tokens(1, 6)[None, :, -1], tokens(1, 6)[None, :, -1], 3)
    assert keys[0].equal(tokens(1, 6)[:, -3:])
