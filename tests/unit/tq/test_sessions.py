"""Who is connected to a controller."""

from tq.control.sessions import Sessions


def test_a_closed_channel_names_its_owners_and_units() -> None:
    sessions = Sessions()
    sessions.joined(1, "ref@a", 0.0)
    sessions.registered(2, "storage-0", 0.0)
    assert sessions.ended(1) == (["ref@a"], [])
    assert sessions.ended(2) == ([], ["storage-0"])
    assert sessions.ended(2) == ([], [])


def test_an_older_channel_of_an_owner_that_joined_again_ends_nothing() -> None:
    sessions = Sessions()
    sessions.joined(1, "ref@a", 0.0)
    sessions.joined(2, "ref@a", 1.0)
    sessions.registered(3, "storage-0", 0.0)
    sessions.registered(4, "storage-0", 0.0)
    assert sessions.ended(1) == ([], [])
    assert sessions.ended(3) == ([], [])
    assert sessions.owners == ["ref@a"]


def test_a_silent_owner_is_given_up_once() -> None:
    sessions = Sessions()
    sessions.joined(1, "ref@a", 0.0)
    sessions.joined(2, "ref@b", 0.0)
    assert sessions.heard("ref@b", 8.0)
    assert sessions.silent(8.0, 10.0) == []
    assert sessions.silent(11.0, 10.0) == ["ref@a"]
    assert sessions.silent(11.0, 10.0) == []
    assert not sessions.heard("ref@a", 12.0)


def test_an_owner_that_was_given_up_must_join_though_what_it_fetches_meanwhile_is_watched_over() -> None:
    sessions = Sessions()
    sessions.joined(1, "ref@a", 0.0)
    assert sessions.silent(8.0, 10.0) == []
    assert sessions.silent(11.0, 10.0) == ["ref@a"]
    sessions.asked(1, "ref@a", 12.0)
    assert not sessions.heard("ref@a", 13.0)
    assert sessions.ended(1) == (["ref@a"], [])
    sessions.asked(2, "ref@a", 14.0)
    assert sessions.silent(18.0, 10.0) == []
    assert sessions.silent(25.0, 10.0) == ["ref@a"]
    sessions.joined(2, "ref@a", 26.0)
    sessions.asked(2, "ref@a", 27.0)
    assert sessions.heard("ref@a", 28.0)


def test_owners_are_not_silent_when_this_process_was_stopped_itself() -> None:
    """Their signs of life lie in its sockets, and are read after the look."""
    sessions = Sessions()
    sessions.joined(1, "ref@a", 0.0)
    assert sessions.silent(1.0, 10.0) == []
    assert sessions.silent(60.0, 10.0) == []
    assert sessions.silent(69.0, 10.0) == []
    assert sessions.silent(71.0, 10.0) == ["ref@a"]


def test_an_owner_on_a_new_channel_is_known_to_have_an_older_one() -> None:
    sessions = Sessions()
    assert not sessions.elsewhere(1, "ref@a")
    sessions.joined(1, "ref@a", 0.0)
    assert not sessions.elsewhere(1, "ref@a")
    assert sessions.elsewhere(2, "ref@a")


def test_units_that_were_not_heard_of_are_silent_until_they_speak() -> None:
    sessions = Sessions()
    sessions.registered(3, "storage-0", 0.0)
    sessions.registered(4, "storage-1", 0.0)
    assert sessions.silent_units(1.0, 5.0) == []
    sessions.unit_heard(4, 4.0)
    assert sessions.silent_units(5.5, 5.0) == [("storage-0", 3)]
    sessions.unit_heard(3, 5.6)
    assert sessions.silent_units(6.0, 5.0) == []


def test_units_are_not_silent_when_this_process_was_stopped_itself() -> None:
    sessions = Sessions()
    sessions.registered(3, "storage-0", 0.0)
    assert sessions.silent_units(1.0, 5.0) == []
    assert sessions.silent_units(60.0, 5.0) == []
    assert sessions.silent_units(66.0, 5.0) == [], "nobody looked for too long"
    assert sessions.silent_units(70.0, 5.0) == []
    assert sessions.silent_units(72.0, 5.0) == [("storage-0", 3)]
