"""Swap turns: at most so many at once, in the order of asking; nobody waits for the dead."""

from weightsync.agent.swap_turns import SwapTurns


def test_without_a_limit_everybody_swaps_at_once() -> None:
    turns = SwapTurns(None)
    assert [turns.ask(f"call {k}", k, None) for k in range(3)] == [True] * 3
    assert turns.end(0) == []


def test_turns_are_passed_on_in_the_order_of_asking() -> None:
    turns = SwapTurns(1)
    assert turns.ask("call a", "a", 9.0) is True
    assert turns.ask("call b", "b", 9.0) is None
    assert turns.ask("call c", "c", 9.0) is None
    assert turns.end("a") == ["call b"]
    assert turns.end("b") == ["call c"]
    assert turns.end("c") == []


def test_who_has_no_patience_is_told_at_once() -> None:
    turns = SwapTurns(1)
    turns.ask("call a", "a", None)
    assert turns.ask("call b", "b", None) is False
    assert turns.end("a") == []


def test_who_has_a_turn_may_ask_again() -> None:
    turns = SwapTurns(1)
    turns.ask("call a", "a", None)
    assert turns.ask("call a2", "a", None) is True
    assert turns.ask("call b", "b", 9.0) is None
    assert turns.end("a") == ["call b"]


def test_who_died_while_waiting_gets_no_turn() -> None:
    turns = SwapTurns(1)
    turns.ask("call a", "a", 9.0)
    turns.ask("call b", "b", 9.0)
    turns.ask("call c", "c", 9.0)
    assert turns.end("b") == []
    assert turns.end("a") == ["call c"]


def test_who_waited_too_long_is_forgotten() -> None:
    turns = SwapTurns(1)
    turns.ask("call a", "a", 1.0)
    turns.ask("call b", "b", 1.0)
    turns.ask("call c", "c", 2.0)
    assert turns.take_overdue(0.5) == []
    assert turns.take_overdue(1.0) == ["call b"]
    assert turns.end("a") == ["call c"]
