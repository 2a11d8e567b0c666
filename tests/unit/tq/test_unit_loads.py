"""Which unit a put goes to."""

import pytest

from asyncflow.errors import TransportError
from tq.client.session import UnitLoads


def test_the_emptiest_unit_is_chosen() -> None:
    loads = UnitLoads()
    assert loads.choose_emptiest({"a": 500, "b": 20, "c": 300}, ()) == "b"


def test_own_puts_count_before_the_next_report() -> None:
    loads = UnitLoads()
    units = {"a": 0, "b": 0}
    assert loads.choose_emptiest(units, ()) == "a"
    loads.put("a", 100)
    assert loads.choose_emptiest(units, ()) == "b"
    loads.put("b", 200)
    assert loads.choose_emptiest(units, ()) == "a"


def test_a_newer_report_counts_more_than_an_older_put() -> None:
    loads = UnitLoads()
    loads.choose_emptiest({"a": 0, "b": 50}, ())
    loads.put("a", 100)
    assert loads.choose_emptiest({"a": 10, "b": 50}, ()) == "a"


def test_units_of_equal_load_take_turns() -> None:
    loads = UnitLoads()
    chosen = []
    for _ in range(4):
        chosen.append(loads.choose_emptiest({"a": 0, "b": 0}, ()))
        loads.put(chosen[-1], 0)
    assert chosen == ["a", "b", "a", "b"]


def test_a_unit_that_failed_is_the_last_choice() -> None:
    loads = UnitLoads()
    assert loads.choose_emptiest({"a": 0, "b": 900}, {"a"}) == "b"
    assert loads.choose_emptiest({"a": 0}, {"a"}) == "a"


def test_no_unit_is_an_error() -> None:
    with pytest.raises(TransportError, match="no storage unit is up"):
        UnitLoads().choose_emptiest({}, ())
