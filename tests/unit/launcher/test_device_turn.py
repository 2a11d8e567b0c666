from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given

from launcher.process.device_turn import (
    DeviceTurn,
    TurnAsked,
    TurnGiven,
    TurnGranted,
    TurnInstruction,
    TurnLost,
    TurnWanted,
)

SIDES = {"rollout-0": "rollout", "rollout-1": "rollout", "actor": "actor"}


def test_the_first_to_ask_gets_the_turn_and_learns_who_waits() -> None:
    turn = DeviceTurn(SIDES)
    assert turn.handle(TurnAsked("actor")) == [TurnGranted("actor")]
    assert turn.handle(TurnAsked("rollout-0")) == [TurnWanted("actor")]
    assert turn.handle(TurnAsked("rollout-1")) == []
    assert (turn.holder, turn.waiting) == ("actor", ("rollout-0", "rollout-1"))
    assert turn.handle(TurnGiven("actor")) == [TurnGranted("rollout-0"), TurnGranted("rollout-1")]


def test_the_turn_passes_when_the_last_of_a_side_has_given_it() -> None:
    turn = DeviceTurn(SIDES)
    turn.handle(TurnAsked("rollout-0"))
    assert turn.handle(TurnAsked("rollout-1")) == [TurnGranted("rollout-1")]
    assert turn.handle(TurnAsked("actor")) == [TurnWanted("rollout-0"), TurnWanted("rollout-1")]
    assert turn.handle(TurnGiven("rollout-1")) == []
    assert turn.handle(TurnGiven("rollout-0")) == [TurnGranted("actor")]


def test_a_dead_holder_frees_the_turn_and_asks_anew() -> None:
    turn = DeviceTurn(SIDES)
    turn.handle(TurnAsked("actor"))
    turn.handle(TurnAsked("rollout-0"))
    assert turn.handle(TurnLost("actor")) == [TurnGranted("rollout-0")]
    # what it said before it died
    assert turn.handle(TurnAsked("actor", attempt=0)) == [] and turn.waiting == ()
    turn.start_attempt("actor", 1)
    assert turn.handle(TurnAsked("actor", attempt=1)) == [TurnWanted("rollout-0", urgent=True)]
    assert turn.handle(TurnGiven("actor", attempt=0)) == []
    assert turn.handle(TurnGiven("rollout-0")) == [TurnGranted("actor", attempt=1)]


def test_a_trainer_that_starts_again_is_urgent() -> None:
    turn = DeviceTurn(SIDES)
    turn.handle(TurnAsked("rollout-0"))
    assert turn.handle(TurnAsked("actor")) == [TurnWanted("rollout-0")]
    assert turn.handle(TurnLost("actor")) == []
    turn.start_attempt("actor", 1)
    assert turn.handle(TurnAsked("actor", attempt=1)) == [TurnWanted("rollout-0", urgent=True)]
    turn.handle(TurnLost("actor"))
    turn.start_attempt("actor", 2)
    assert turn.handle(TurnAsked("actor", attempt=2)) == [], "it knows"
    turn.handle(TurnGiven("rollout-0"))
    turn.handle(TurnAsked("rollout-0"))
    turn.handle(TurnGiven("actor", attempt=2))
    assert turn.handle(TurnAsked("actor", attempt=2)) == [TurnWanted("rollout-0")], "once, and then as ever"


def test_a_dead_asker_is_forgotten() -> None:
    turn = DeviceTurn(SIDES)
    turn.handle(TurnAsked("actor"))
    turn.handle(TurnAsked("rollout-0"))
    turn.handle(TurnLost("rollout-0"))
    assert turn.handle(TurnGiven("actor")) == [] and turn.holder == ""


def test_an_idle_instance_joins_its_own_side_unless_turns_interrupt() -> None:
    def instructions(*, interrupts: bool) -> list[TurnInstruction]:
        turn = DeviceTurn(SIDES, interrupts=interrupts)
        for event in (TurnAsked("rollout-0"), TurnAsked("rollout-1"), TurnAsked("actor"), TurnGiven("rollout-0")):
            turn.handle(event)
        return turn.handle(TurnAsked("rollout-0"))

    assert instructions(interrupts=False) == [TurnGranted("rollout-0"), TurnWanted("rollout-0")]
    assert instructions(interrupts=True) == []


def test_a_generator_learns_of_the_weights_that_the_trainer_has_published() -> None:
    turn = DeviceTurn(SIDES)
    turn.handle(TurnAsked("actor"))
    turn.handle(TurnAsked("rollout-0"))
    assert turn.handle(TurnGiven("actor", version=(0, 7))) == [TurnGranted("rollout-0", version=(0, 7))]
    assert turn.handle(TurnAsked("rollout-1")) == [TurnGranted("rollout-1", version=(0, 7))]


def test_gangs_with_devices_of_their_own_have_no_part_in_it() -> None:
    turn = DeviceTurn(SIDES)
    turn.start_attempt("ref-0", 1)
    assert turn.handle(TurnAsked("ref-0")) == [] and turn.handle(TurnLost("ref-0")) == []


class _Model:
    """Gangs that ask, hold, give and die; messages of a gang arrive in order, exits whenever they are noticed."""

    def __init__(self, *, interrupts: bool) -> None:
        self.turn = DeviceTurn(SIDES, interrupts=interrupts)
        self.attempts = Counter[str]()
        self.memory: dict[str, bool] = dict.fromkeys(SIDES, False)  # what is really allocated
        self.wanted: set[str] = set()
        self.asking: set[str] = set()
        self.inbox: list[TurnAsked | TurnGiven] = []

    def check(self) -> None:
        assert len({SIDES[gang] for gang, held in self.memory.items() if held}) <= 1, "two sides have device memory"

    def ask(self, gang: str) -> None:
        if not self.memory[gang] and gang not in self.asking:
            self.asking.add(gang)
            self.inbox.append(TurnAsked(gang, self.attempts[gang]))

    def give(self, gang: str) -> None:
        if self.memory[gang]:
            self.memory[gang] = False
            self.wanted.discard(gang)
            self.inbox.append(TurnGiven(gang, self.attempts[gang]))

    def kill(self, gang: str) -> None:
        """All processes are gone; the launcher notices, and starts the gang again."""
        self.memory[gang] = False
        self.wanted.discard(gang)
        self.asking.discard(gang)
        self.obey(self.turn.handle(TurnLost(gang)))
        self.attempts[gang] += 1
        self.turn.start_attempt(gang, self.attempts[gang])

    def deliver(self) -> None:
        if self.inbox:
            self.obey(self.turn.handle(self.inbox.pop(0)))

    def obey(self, instructions: list[TurnInstruction]) -> None:
        for one in instructions:
            assert one.attempt == self.attempts[one.gang]
            if isinstance(one, TurnGranted):
                assert one.gang in self.asking and not self.memory[one.gang]
                self.asking.discard(one.gang)
                self.memory[one.gang] = True
            else:
                assert self.memory[one.gang] or any(m.gang == one.gang for m in self.inbox)
                self.wanted.add(one.gang)
        self.check()


_ACTIONS: dict[str, Callable[[_Model, str], None]] = {
    "ask": _Model.ask,
    "give": _Model.give,
    "kill": _Model.kill,
    "deliver": lambda model, _: model.deliver(),
}


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(sorted(_ACTIONS)), st.sampled_from(sorted(SIDES))), max_size=60),
)
def test_never_two_holders_and_everyone_who_asks_gets_it(interrupts: bool, actions: list[tuple[str, str]]) -> None:
    model = _Model(interrupts=interrupts)
    for action, gang in actions:
        _ACTIONS[action](model, gang)
    # From here on nobody asks again: whoever has asked gets the turn, if each gives it once it is told.
    for _ in range(20):
        while model.inbox:
            model.deliver()
        if not model.asking:
            return
        for gang in sorted(model.wanted):
            model.give(gang)
    raise AssertionError(f"{model.asking} wait for ever; {model.turn.holders} hold")
