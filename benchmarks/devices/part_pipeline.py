"""How long pipeline stages idle in an update, and how many pieces' activations they keep: by the ranks' own slots."""

from itertools import accumulate

from workers.engines.megatron.schedule import PipelineSchedule, Slot

STAGES, MICRO_BATCHES, PIECES = 2, 4, 4


def run(**_: int) -> dict[str, float]:
    one_by_one, whole = _slots(together=False), _slots(together=True)
    return {
        "pipeline_bubble": _bubble(one_by_one),
        "pipeline_live_pieces": max(_peaks(one_by_one)),
        "pipeline_bubble_whole": _bubble(whole),
        "pipeline_live_pieces_whole": max(_peaks(whole)),
        "pipeline_bubble_virtual": _bubble(_slots(together=False, chunks=2)),
    }


def _slots(*, together: bool, chunks: int = 1) -> list[Slot]:
    """Return an update's slots; micro-batches come one by one, as from the trainer."""
    schedule, slots = PipelineSchedule(STAGES, chunks), list[Slot]()
    for _ in range(MICRO_BATCHES):
        schedule.add_pieces(PIECES, together=together)
        slots += schedule.slots()
    return [*slots, *schedule.slots(drain=True)]


def _bubble(slots: list[Slot]) -> float:
    return sum(task is None for slot in slots for task in slot) / sum(map(len, slots))


def _peaks(slots: list[Slot]) -> list[int]:
    columns = zip(*slots, strict=True)
    return [max(accumulate(0 if task is None else 1 - 2 * task.backward for task in column)) for column in columns]
