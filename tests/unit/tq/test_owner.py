"""Incarnations of one name: which of them says that another is gone."""

from tq.refill import new_owner, replaces


def test_later_start_of_a_process_that_is_there_once_replaces_earlier_ones() -> None:
    first, second = new_owner("rollout-0/0", 0), new_owner("rollout-0/0", 1)
    assert replaces(second, first)
    assert not replaces(first, second)
    assert not replaces(second, new_owner("rollout-0/0", 1)), "two clients of one process"
    assert not replaces(second, new_owner("rollout-1/0", 0))


def test_name_that_several_may_have_says_nothing_about_others() -> None:
    assert not replaces(new_owner("trainer"), new_owner("trainer"))
    assert not replaces(new_owner("trainer", 3), new_owner("trainer"))
    assert not replaces(new_owner("trainer"), new_owner("trainer", 0))
    assert not replaces("a@5@1.00", "a@0.00"), "the name may have the separator in it"
    assert replaces("a@5@1.00", "a@5@0.00")
