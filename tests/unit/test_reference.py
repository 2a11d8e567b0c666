"""Which weights are the reference of a step."""

from workers.reference import reference_step


def test_reference_changes_after_every_interval() -> None:
    assert [reference_step(step, 4) for step in range(1, 11)] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [reference_step(step, 1) for step in (1, 2, 3)] == [0, 1, 2]


def test_reference_stays_without_an_interval() -> None:
    assert {reference_step(step, 0) for step in (1, 2, 100)} == {0}
