"""Groups with rows that were finished before a restart: whatever is put again, the others are worked on once."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tq import TaskSpec
from tq.control.events import DeadlinePassed, RecalledFinished, RecalledLosses, RecoveryDeadline
from tq.control.state import Recovering
from tq.messages import LeaseGrant, RegisterUnit, RowRecords

World = Callable[..., Any]
TRAIN = TaskSpec("train", frozenset({"x"}), whole_groups=True)
SCORE = TaskSpec("score", frozenset({"x"}))
UNIT = "storage-0"


class Story:
    """What was where when the controller died.

    Attributes:
        size: of a group.
        finished: rows; of those, `tombs` are known to the unit.
        live: rows at the unit; of those, `scored` are done for one task.
        lost: rows that went with a unit.
    """

    def __init__(self, random: Random) -> None:
        self.size = random.choice([2, 3, 4])
        self.rows = range(self.size * random.choice([1, 2, 3]))
        self.finished = _some(random, self.rows[: random.randint(0, len(self.rows) - 1)])
        self.tombs = _some(random, self.finished)
        unfinished = sorted({*self.rows} - {*self.finished})
        self.live = _some(random, unfinished)
        self.scored = _some(random, self.live)
        self.lost = _some(random, {*unfinished} - {*self.live})

    def records(self, rows: Iterable[int], *done: str) -> list[RowRecords]:
        """Describe rows that are alike."""
        rows = sorted(rows)
        ones = [1] * len(rows)
        groups, sizes = [row // self.size for row in rows], [self.size] * len(rows)
        return [RowRecords(1, rows, groups, sizes, ones, ones, ["x"], list(done))] if rows else []


def _some(random: Random, rows: Iterable[int]) -> list[int]:
    return [row for row in sorted(rows) if random.random() < 0.5]


def restarted(make_world: World, story: Story) -> Any:
    """Return a controller that has recovered."""
    world = make_world(TRAIN, SCORE, first_token=1000, recovering=Recovering(frozenset({UNIT}), frozenset()))
    world.handle(RecalledFinished(1, sorted({*story.finished} - {*story.tombs})))
    world.handle(RecalledLosses(tuple(story.records(story.lost))))
    records = story.records({*story.live} - {*story.scored}) + story.records(story.scored, "score")
    world.request(RegisterUnit(UNIT, "1", records, {1: story.tombs} if story.tombs else {}))
    world.unit_of.update(dict.fromkeys(story.live, UNIT))
    world.handle(RecoveryDeadline())
    world.confirm_fences()
    return world


def work(world: Any, story: Story, done: dict[str, list[int]]) -> None:
    """Do everything that can be done."""
    for task, rows in done.items():
        while isinstance(granted := world.answers.get(ask := world.ask(task, story.size)), LeaseGrant):
            rows += granted.rows
            world.write(task, granted)
        world.handle(DeadlinePassed(ask))


def put_again(world: Any, story: Story, rows: list[int], random: Random) -> None:
    """A producer repeats its put of a group, as a whole or row by row, on any unit, now and then twice."""
    pieces = [rows] if random.random() < 0.5 else [[row] for row in rows]
    random.shuffle(pieces)
    for repeated in (False, True) if random.random() < 0.3 else (False,):
        for piece in pieces:
            if repeated and not {*piece}.isdisjoint(world.state.table.rows):
                continue  # refused where it is
            unit, announced = random.choice([UNIT, "storage-1"]), random.random() < 0.4
            world.put(piece, unit, size=story.size, group_size=story.size, announced=announced)
            if announced:
                world.confirm(piece, unit)
            world.unit_of.update(dict.fromkeys(piece, unit))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.booleans())
def test_each_other_row_is_worked_on_once(make_world: World, random: Random, declared: bool) -> None:
    story = Story(random)
    world = restarted(make_world, story)
    if declared:
        world.open(len(story.rows))
    done: dict[str, list[int]] = {"train": [], "score": []}
    groups = list(range(len(story.rows) // story.size))
    random.shuffle(groups)
    for group in groups:
        members = range(group * story.size, (group + 1) * story.size)
        if missing := sorted({*members} - {*story.live}):
            put_again(world, story, missing, random)
        if random.random() < 0.5:
            work(world, story, done)
    work(world, story, done)
    unfinished = sorted({*story.rows} - {*story.finished})
    assert sorted(done["train"]) == unfinished
    assert sorted(done["score"]) == sorted({*unfinished} - {*story.scored})
    assert world.state.known_rows() == {1: list(story.rows)}
    assert [task.num_left for task in world.state.table.tasks.values()] == [0, 0]
