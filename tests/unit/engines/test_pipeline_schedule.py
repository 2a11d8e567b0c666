"""The slots of a pipeline: what each stage computes when, what it keeps, and how long it idles."""

from itertools import accumulate

import pytest

from workers.engines.megatron.schedule import PipelineSchedule, Slot

Added = list[tuple[int, bool]]  # (pieces, whether their gradients are known together), call by call


def slots_of(stages: int, added: Added, *, chunks: int = 1, backward: bool = True) -> list[Slot]:
    schedule, slots = PipelineSchedule(stages, chunks, backward=backward), list[Slot]()
    for number, together in added:
        schedule.add_pieces(number, together=together)
        slots += schedule.slots()
    return [*slots, *schedule.slots(drain=True)]


def bubble(slots: list[Slot]) -> float:
    return sum(task is None for slot in slots for task in slot) / sum(map(len, slots))


def peaks(slots: list[Slot]) -> list[int]:
    """Return the most forward passes of each stage that waited for their backward pass."""
    steps = ([0 if task is None else 1 - 2 * task.backward for task in column] for column in zip(*slots, strict=True))
    return [max(accumulate(column)) for column in steps]


def test_stages_go_forward_and_backward_in_turn() -> None:
    rows = [
        " ".join("." if task is None else f"{task.piece}{chr(39) * task.backward}" for task in column)
        for column in zip(*slots_of(2, [(4, False)]), strict=True)
    ]
    assert rows == ["0 1 . 0' 2 1' 3 2' . 3'", ". 0 0' 1 1' 2 2' 3 3' ."]


def test_four_micro_batches_of_four_pieces_idle_at_the_ends_alone() -> None:
    slots = slots_of(2, [(4, False)] * 4)
    assert bubble(slots) == pytest.approx(2 / 34)
    assert peaks(slots) == [2, 1]


def test_pieces_of_a_loss_of_the_whole_micro_batch_are_kept_together() -> None:
    slots = slots_of(2, [(4, True)] * 4)
    assert peaks(slots) == [4, 4], "as many activations as without pieces"
    place = {task: number for number, slot in enumerate(slots) for task in slot if task is not None}
    for first in (0, 4, 8, 12):
        arrived = max(place[task] for task in place if task.part == 1 and not task.backward and task.piece < first + 4)
        begun = min(place[task] for task in place if task.part == 1 and task.backward and task.piece >= first)
        assert arrived < begun


def test_interleaved_stages_idle_less() -> None:
    plain, interleaved = slots_of(4, [(16, False)]), slots_of(4, [(16, False)], chunks=2)
    assert bubble(plain) == pytest.approx(3 / 19)
    assert bubble(interleaved) == pytest.approx(3 / 35), "(S - 1) / chunks of N + (S - 1) / chunks, S 4, N 16"
    assert peaks(plain) == [4, 3, 2, 1]
    assert peaks(interleaved) == [11, 9, 7, 5], "Megatron's, of half as many layers each"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_part_takes_every_piece_once_after_the_parts_before_it(stages: int, chunks: int) -> None:
    for added in ([(1, False)], [(7, False)], [(5, True)], [(3, True), (4, False), (2, True), (0, False), (5, False)]):
        for backward in (False, True):
            slots = slots_of(stages, added, chunks=chunks, backward=backward)
            place = {task: number for number, slot in enumerate(slots) for task in slot if task is not None}
            pieces, last = sum(number for number, _ in added), stages * chunks - 1
            assert len(place) == pieces * stages * chunks * (1 + backward)
            for task, number in place.items():
                assert slots[number][task.part % stages] == task
                if task.backward and task.part == last:
                    assert place[task._replace(backward=False)] < number
                elif task.backward or task.part:
                    before = task._replace(part=task.part + (1 if task.backward else -1))
                    assert place[before] < number


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_slots_do_not_depend_on_when_pieces_are_added(stages: int, chunks: int) -> None:
    """So the order in which gradients are added up does not, either. A call that adds none changes nothing."""
    for number in (1, 5, 8, 11):
        whole = slots_of(stages, [(number, False)], chunks=chunks)
        assert slots_of(stages, [(1, False)] * number, chunks=chunks) == whole
        assert slots_of(stages, [(number - 1, False), (0, False), (1, False)], chunks=chunks) == whole
