"""The messages between the launchers of a run's nodes, over one channel each (`asyncflow.transport`). Node 0 serves.

node K                               node 0
  |-- Hello ---------------------------->|   who I am; or why I cannot take part
  |<------------------ Welcome | Refuse -|
  |-- Ping --------------------- Pong ---|   several times: the offset of the clocks
  |-- Ready -------------------- Noted --|
  |-- NextOrder ------------------------>|   waits there for an order; once it came, the next one is asked for
  |<- StartPart | KillPart | DumpStacks -|
  |-- PartExited | StopAsked --- Noted --|   `LauncherAlive` if there is nothing to say
  |<------------------------- FinishRun -|
  |-- Left --------------------- Noted --|   all its processes are gone
"""

import msgspec

from asyncflow.job import Network
from launcher.process.run_events import GangExited, StopRequested


class Hello(msgspec.Struct, tag=True):
    """A launcher asks to take part.

    Attributes:
        rank, count: as given at its start.
        launcher: names this process; another attempt of the same process replaces the first.
        host: for people.
        address: at which the others reach it.
        identity: what must be equal on all nodes (`asyncflow.agreement`).
        device: kind of its devices, as PyTorch names it.
        num_devices: 0 for the CPU.
        complaint: why it cannot take part, or "".
        networks: of those that node 0 offers (`Job.networks`), the ones in which it reaches node 0, and answers.
    """

    rank: int
    count: int
    launcher: str
    host: str
    address: str
    identity: dict[str, str]
    device: str
    num_devices: int
    complaint: str = ""
    networks: list[Network] = []


class Ping(msgspec.Struct, tag=True):
    """Asks for node 0's time; `asked` is the asking host's monotonic clock (s)."""

    asked: float


class Ready(msgspec.Struct, tag=True):
    """This launcher can start gangs.

    Attributes:
        boot: names its host's monotonic clock.
        offset_s: node 0's unix time minus that clock (s).
        ahead_s: how far its wall clock is ahead of node 0's (s).
        networks: those in which it reaches everybody that it was told of in `Welcome`, too.
    """

    boot: str
    offset_s: float
    ahead_s: float
    networks: list[str] = []


class NextOrder(msgspec.Struct, tag=True):
    """Asks for this launcher's next order; answered once there is one."""


class LauncherAlive(msgspec.Struct, tag=True):
    """A heartbeat of a launcher that has nothing else to say."""


class PartExited(msgspec.Struct, tag=True):
    """All ranks of a gang on this node are gone; `exited.at` is in node 0's time."""

    exited: GangExited


class StopAsked(msgspec.Struct, tag=True):
    """This launcher received a signal; `count` is the number so far."""

    count: int


class Left(msgspec.Struct, tag=True):
    """This launcher leaves; all its processes are gone."""


class Welcome(msgspec.Struct, tag=True):
    """The launcher is a member of the run. `others`: where those that said hello before it answer."""

    others: list[Network] = []


class Refuse(msgspec.Struct, tag=True):
    """The launcher may not take part; `later`: another attempt may succeed."""

    reason: str
    later: bool


class Pong(msgspec.Struct, tag=True):
    """The answer to a `Ping`; `arrived` and `answered` are node 0's unix time (s)."""

    asked: float
    arrived: float
    answered: float


class Noted(msgspec.Struct, tag=True):
    """Node 0 has taken note."""


class StartPart(msgspec.Struct, tag=True):
    """Start this node's ranks of a gang as described by this revision of `job.json`, or a later one."""

    gang: str
    attempt: int
    revision: int


class KillPart(msgspec.Struct, tag=True):
    """SIGKILL this node's ranks of a gang."""

    gang: str


class DumpStacks(msgspec.Struct, tag=True):
    """Have every process of this node write its threads' stacks into its log."""


class FinishRun(msgspec.Struct, tag=True):
    """The run is over: end what is left, print `line`, exit with `code`."""

    code: int
    line: str


Order = StartPart | KillPart | DumpStacks | FinishRun
FromNode = Hello | Ping | Ready | NextOrder | LauncherAlive | PartExited | StopAsked | Left
FromHead = Welcome | Refuse | Pong | Noted | Order
Inbound = Order | GangExited | StopRequested
"""What the launcher of node 1, 2, ... handles."""
