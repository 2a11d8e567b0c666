"""Who may hold device memory in a run whose rollout and actor have the same devices. Pure: events in, instructions out.

    rollout-0   Asked ... TurnGranted | draws ........ TurnWanted | sleeps, TurnGiven
    actor                             Asked ......................|.......... TurnGranted | trains ... TurnGiven

One turn covers all devices of the run: it belongs to a *side* (a role), and passes when every gang of that side that
had it has given it back or is gone. A gang asks before it allocates anything, so also when it starts again. The holder
learns that the other side waits (`TurnWanted`) and decides itself when it has reached a border, since only it knows:

    a rollout   has nothing to draw (its prompts are not ready, or need newer weights, or users' tools run);
                in `colocate_async` at once, and its responses continue later; also at once if a trainer that starts
                again waits, since then they are void
    the actor   waits for rows

So nobody waits for something that only a sleeper can make: a side that waits for the other one is at its border.

`launcher.run.run_job` feeds it messages and exits, and sends what it says; `workers.rank.device_turn` is a gang's end.
The planner's simulation uses it, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from workers.settings.dataflow import TRAINERS


@dataclass(frozen=True)
class TurnAsked:
    """A gang needs the devices. `attempt`: its start, counted from 0; a message of an earlier one counts no more."""

    gang: str
    attempt: int = 0


@dataclass(frozen=True)
class TurnGiven:
    """A gang that had the devices has freed its memory there. `version`: the newest weights (lineage, step) that it has
    published, which the other side should load; None: it publishes none."""

    gang: str
    attempt: int = 0
    version: tuple[int, int] | None = None


@dataclass(frozen=True)
class TurnLost:
    """All processes of a gang are gone, and their memory with them."""

    gang: str


TurnEvent = TurnAsked | TurnGiven | TurnLost


@dataclass(frozen=True)
class TurnGranted:
    """The gang may allocate, until it says `TurnGiven`. `version`: the newest one of any `TurnGiven`."""

    gang: str
    attempt: int = 0
    version: tuple[int, int] | None = None


@dataclass(frozen=True)
class TurnWanted:
    """The other side waits for the devices that this gang has; sent once per grant and, as `urgent`, when a trainer
    starts again: the run went back to a checkpoint, so what a rollout draws is void."""

    gang: str
    attempt: int = 0
    urgent: bool = False


TurnInstruction = TurnGranted | TurnWanted


class DeviceTurn:
    """The turn of one run.

    Args:
        sides: gang -> the side that it is of. Gangs that are not here have devices of their own.
        interrupts: a side that is asked for the turn does not get it again before the other one had it
            (`colocate_async`, where every holder stops at once). Otherwise its gangs may: the step that the other side
            waits for may need one that was idle before.
    """

    def __init__(self, sides: Mapping[str, str], *, interrupts: bool = False) -> None:
        self._sides = dict(sides)
        self._interrupts = interrupts
        self._attempts = dict.fromkeys(self._sides, 0)
        self._holders: dict[str, TurnWanted | None] = {}  # gang -> what it was told last
        self._asked: dict[str, None] = {}  # in order of arrival
        self._restarted: set[str] = set()  # have not had the turn since they started again
        self._version: tuple[int, int] | None = None

    @property
    def holder(self) -> str:
        """The side that has the turn; "": nobody."""
        return next((self._sides[gang] for gang in self._holders), "")

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._holders)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Gangs that asked, the first one first."""
        return tuple(self._asked)

    def to_text(self) -> str:
        """Return one line for people; "": no gang takes turns."""
        if not self._sides:
            return ""
        waiting = f"; {', '.join(self._asked)} wait{'s' if len(self._asked) == 1 else ''}" if self._asked else ""
        return f"{', '.join(self._holders) or 'nobody'}{waiting}"

    def start_attempt(self, gang: str, attempt: int) -> None:
        """A gang starts again: believe only messages of this start from now on."""
        if gang in self._sides:
            self._attempts[gang] = attempt
            self._restarted.add(gang)

    def handle(self, event: TurnEvent) -> list[TurnInstruction]:
        """Take in one event; return what to tell whom."""
        gang = event.gang
        if gang not in self._sides:
            return []
        match event:
            case TurnLost():
                # What it may have said last arrives later, or never.
                self._attempts[gang] += 1
                self._holders.pop(gang, None)
                self._asked.pop(gang, None)
            case TurnAsked() | TurnGiven() if event.attempt != self._attempts[gang]:
                return []
            case TurnAsked():
                self._asked[gang] = None
            case TurnGiven():
                self._holders.pop(gang, None)
                self._version = max(self._version or (0, -1), event.version) if event.version else self._version
        return [*self._grant(), *self._tell_holders()]

    def _grant(self) -> Iterable[TurnInstruction]:
        side = self.holder or next((self._sides[gang] for gang in self._asked), "")
        if self._holders and self._is_wanted(side) and (self._interrupts or self._is_urgent):
            return []
        granted = [gang for gang in self._asked if self._sides[gang] == side]
        for gang in granted:
            del self._asked[gang]
            self._holders[gang] = None
            self._restarted.discard(gang)
        return [TurnGranted(gang, self._attempts[gang], self._version) for gang in granted]

    def _tell_holders(self) -> Iterable[TurnInstruction]:
        if not self._is_wanted(self.holder):
            return []
        news = [TurnWanted(gang, self._attempts[gang], self._is_urgent) for gang in self._holders]
        news = [one for one in news if self._holders[one.gang] not in (one, replace(one, urgent=True))]
        self._holders |= {one.gang: one for one in news}
        return news

    @property
    def _is_urgent(self) -> bool:
        return any(self._sides[gang] in TRAINERS for gang in self._restarted.intersection(self._asked))

    def _is_wanted(self, side: str) -> bool:
        return any(self._sides[gang] != side for gang in self._asked)
