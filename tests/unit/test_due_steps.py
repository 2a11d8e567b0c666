"""Which versions are evaluated, and by whom."""

from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.evaluate import due_steps, own_steps


def own(instance: int = 0, *, interval: int = 4, last: int = 10, of: int = 1, **changes: object) -> list[int]:
    settings = {"first": 0, "done": ()} | changes
    return own_steps(interval=interval, last=last, instance=instance, num_instances=of, **settings)  # type: ignore[arg-type]


def test_initial_weights_every_interval_and_the_last_step_are_due() -> None:
    assert due_steps(interval=4, last=10) == [0, 4, 8, 10]
    assert due_steps(interval=5, last=10) == [0, 5, 10]
    assert due_steps(interval=100, last=3) == [0, 3]


def test_instances_take_turns_and_the_first_one_has_the_last_step() -> None:
    assert [own(k, of=2) for k in (0, 1)] == [[0, 8, 10], [4]]
    assert [own(k, of=3, interval=2, last=8) for k in (0, 1, 2)] == [[0, 6, 8], [2], [4]]


def test_resumed_run_evaluates_what_is_to_come_and_is_not_there() -> None:
    assert own(first=4) == [4, 8, 10]
    assert own(first=4, done={0, 4}) == [8, 10]
    assert own(1, of=2, first=6) == []


@given(st.integers(1, 7), st.integers(1, 40), st.integers(1, 5))
def test_every_due_version_is_evaluated_once(interval: int, last: int, num_instances: int) -> None:
    parts = [own(k, interval=interval, last=last, of=num_instances) for k in range(num_instances)]
    assert sorted(step for part in parts for step in part) == due_steps(interval=interval, last=last)
    assert parts[0][-1] == last
