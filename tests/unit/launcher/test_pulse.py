"""When a silent peer counts as gone."""

from launcher.pulse import SILENT_S, Pulse

LOOK_S = 0.5


def silent_looks(pulse: Pulse, number: int, now: float) -> int:
    """Return after how many looks without news the peer counts as gone."""
    for looks in range(1, 100):
        if pulse.look(number, now + looks * LOOK_S):
            return looks
    raise AssertionError("it never does")


def test_silence_counts_from_the_last_sign_of_life() -> None:
    pulse = Pulse(100.0)
    for number in range(20):
        assert not pulse.look(number, 100.0 + number)
    assert silent_looks(pulse, 19, 119.0) == SILENT_S / LOOK_S + 1


def test_peer_that_never_spoke_counts_from_the_beginning() -> None:
    assert silent_looks(Pulse(0.0), 0, 0.0) > SILENT_S / LOOK_S


def test_old_sign_of_life_is_none() -> None:
    pulse = Pulse(0.0)
    assert not pulse.look(5, 0.0)
    assert silent_looks(pulse, 4, 0.0) == SILENT_S / LOOK_S + 1


def test_who_did_not_run_itself_knows_nothing_of_the_others() -> None:
    pulse = Pulse(0.0)
    assert not pulse.look(1, 1.0)
    assert not pulse.look(1, 3600.0)
    assert not pulse.look(2, 3600.5)
    assert silent_looks(pulse, 2, 3600.5) == SILENT_S / LOOK_S + 1
