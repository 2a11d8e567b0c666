"""Ready rows leave in ascending order, whatever came in between."""

from hypothesis import given
from hypothesis import strategies as st

from tq.control.row_table import ReadyQueue


@given(st.lists(st.one_of(st.integers(0, 5000), st.none()), max_size=60), st.integers(0, 3))
def test_numbers_leave_in_order_and_once(steps: list[int | None], returned: int) -> None:
    queue, expected = ReadyQueue(), set()
    for number in steps:
        if number is not None:
            queue.push(number)
            expected.add(number)
            continue
        popped = [queue.pop() for _ in range(returned + 1)]
        found = [number for number in popped if number is not None]
        assert found == sorted(expected)[: returned + 1]
        expected -= set(found[:1])
        queue.put_back(found[1:])
    assert [queue.pop() for _ in range(len(expected) + 1)] == [*sorted(expected), None]
