"""When a silent peer counts as gone."""

from launcher.nodes.membership import SILENT_S, HeartbeatTimeout

LOOK_S = 0.5


def silent_looks(timeout: HeartbeatTimeout, number: int, now: float) -> int:
    """Return after how many looks without news the peer counts as gone."""
    for looks in range(1, 100):
        if timeout.look(number, now + looks * LOOK_S):
            return looks
    raise AssertionError("it never does")


def test_silence_counts_from_the_last_heartbeat() -> None:
    timeout = HeartbeatTimeout(100.0)
    for number in range(20):
        assert not timeout.look(number, 100.0 + number)
    assert silent_looks(timeout, 19, 119.0) == SILENT_S / LOOK_S + 1


def test_peer_that_never_spoke_counts_from_the_beginning() -> None:
    assert silent_looks(HeartbeatTimeout(0.0), 0, 0.0) > SILENT_S / LOOK_S


def test_old_heartbeat_does_not_count() -> None:
    timeout = HeartbeatTimeout(0.0)
    assert not timeout.look(5, 0.0)
    assert silent_looks(timeout, 4, 0.0) == SILENT_S / LOOK_S + 1


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    timeout = HeartbeatTimeout(0.0)
    assert not timeout.look(1, 1.0)
    assert not timeout.look(1, 3600.0)
    assert not timeout.look(2, 3600.5)
    assert silent_looks(timeout, 2, 3600.5) == SILENT_S / LOOK_S + 1
