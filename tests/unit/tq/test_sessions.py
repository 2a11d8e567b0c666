"""Who is connected to a controller."""

import pytest

from tq.control.connected import OpenSessions


def looks(sessions: OpenSessions, first: int, last: int) -> list[str]:
    """Look every second, as controllers do several times in a timeout; returns who was given up."""
    return [owner for now in range(first, last + 1) for owner in sessions.silent_owners(float(now))]


def test_a_closed_channel_names_its_owners_and_units() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_owner(1, "ref@a", 0.0)
    sessions.add_unit(2, "storage-0", 0.0)
    assert sessions.end_session(1) == (["ref@a"], [])
    assert sessions.end_session(2) == ([], ["storage-0"])
    assert sessions.end_session(2) == ([], [])


def test_an_older_channel_of_an_owner_that_joined_again_ends_nothing() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_owner(1, "ref@a", 0.0)
    sessions.add_owner(2, "ref@a", 1.0)
    sessions.add_unit(3, "storage-0", 0.0)
    sessions.add_unit(4, "storage-0", 0.0)
    assert sessions.end_session(1) == ([], [])
    assert sessions.end_session(3) == ([], [])
    assert sessions.owners == ["ref@a"]


def test_a_silent_owner_is_given_up_once() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_owner(1, "ref@a", 0.0)
    sessions.add_owner(2, "ref@b", 0.0)
    assert looks(sessions, 1, 8) == []
    assert sessions.note_heartbeat("ref@b", 8.0)
    assert looks(sessions, 9, 11) == ["ref@a"]
    assert looks(sessions, 11, 18) == []
    assert not sessions.note_heartbeat("ref@a", 18.0)
    assert looks(sessions, 19, 19) == ["ref@b"]


def test_an_owner_that_was_given_up_must_join_though_what_it_fetches_meanwhile_is_watched_over() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_owner(1, "ref@a", 0.0)
    assert looks(sessions, 1, 11) == ["ref@a"]
    sessions.watch_owner(1, "ref@a", 12.0)
    assert not sessions.note_heartbeat("ref@a", 13.0)
    assert sessions.end_session(1) == (["ref@a"], [])
    sessions.watch_owner(2, "ref@a", 14.0)
    assert looks(sessions, 12, 25) == ["ref@a"]
    sessions.add_owner(2, "ref@a", 26.0)
    sessions.watch_owner(2, "ref@a", 27.0)
    assert sessions.note_heartbeat("ref@a", 28.0)


@pytest.mark.parametrize("still_s", [3, 8, 9, 60])
def test_time_in_which_this_process_stood_still_is_nobodys_silence(still_s: int) -> None:
    """Signs of life lie in its sockets, and are read after the look."""
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_owner(1, "ref@a", 0.0)
    assert looks(sessions, 1, 3) == []
    awake = 3 + still_s
    assert looks(sessions, awake, awake + 4) == []
    assert looks(sessions, awake + 5, awake + 6) == ["ref@a"], "it was silent for 10 s besides"


def test_an_owner_on_a_new_channel_is_known_to_have_an_older_one() -> None:
    sessions = OpenSessions(10.0, 5.0)
    assert not sessions.is_elsewhere(1, "ref@a")
    sessions.add_owner(1, "ref@a", 0.0)
    assert not sessions.is_elsewhere(1, "ref@a")
    assert sessions.is_elsewhere(2, "ref@a")


def unit_looks(sessions: OpenSessions, first: int, last: int) -> list[tuple[str, int]]:
    """See `looks`."""
    return [unit for now in range(first, last + 1) for unit in sessions.silent_units(float(now))]


def test_units_that_were_not_heard_of_are_silent_until_they_speak() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_unit(3, "storage-0", 0.0)
    sessions.add_unit(4, "storage-1", 0.0)
    assert unit_looks(sessions, 1, 4) == []
    sessions.unit_heard(4, 4.0)
    assert unit_looks(sessions, 5, 6) == [("storage-0", 3)]
    sessions.unit_heard(3, 6.0)
    assert unit_looks(sessions, 7, 8) == []


def test_units_are_not_silent_when_this_process_was_stopped_itself() -> None:
    sessions = OpenSessions(10.0, 5.0)
    sessions.add_unit(3, "storage-0", 0.0)
    assert unit_looks(sessions, 1, 1) == []
    assert unit_looks(sessions, 60, 62) == []
    assert unit_looks(sessions, 63, 63) == [("storage-0", 3)]
