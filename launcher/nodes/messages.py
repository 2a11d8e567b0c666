"""The messages between the launchers of a run's nodes: orders of node 0, and events of the others.

node K                               node 0
  |-- Hello ---------------------------->|   who I am; or why I cannot take part
  |<------------------ Welcome | Refuse -|
  |-- Ping --------------------- Pong ---|   several times: the offset of the clocks
  |-- Ready ---------------------------->|
  |<- StartPart | KillPart | DumpStacks -|
  |-- PartExited | StopAsked ----------->|
  |<------------------------- FinishRun -|
  |-- Left ----------------------------->|   all its processes are gone
"""

import msgspec

from launcher.run.events import GangExited


class Hello(msgspec.Struct, tag=True):
    """A launcher asks to take part.

    Attributes:
        rank, count: as it was started.
        launcher: names this process; another try of the same one replaces the first.
        host, address: for people, and for the others to reach it.
        version: of AsyncFlow.
        device: kind of its devices, as PyTorch names it.
        num_devices: that it has; 0 for the CPU.
        complaint: why it cannot take part, or "".
    """

    rank: int
    count: int
    launcher: str
    host: str
    address: str
    version: str
    device: str
    num_devices: int
    complaint: str = ""


class Ping(msgspec.Struct, tag=True):
    """Asks for node 0's time; `asked` is the asking host's monotonic clock (s)."""

    asked: float


class Ready(msgspec.Struct, tag=True):
    """This launcher can start gangs.

    Attributes:
        boot: names its host's monotonic clock.
        offset_s: node 0's unix time minus that clock.
        ahead_s: how far its wall clock is ahead of node 0's.
    """

    boot: str
    offset_s: float
    ahead_s: float


class PartExited(msgspec.Struct, tag=True):
    """All ranks of a gang on this node are gone; `exited.at` is in node 0's time."""

    exited: GangExited


class StopAsked(msgspec.Struct, tag=True):
    """A signal came to this launcher; `count` is how often so far."""

    count: int


class Left(msgspec.Struct, tag=True):
    """This launcher leaves, and all its processes are gone."""


class Welcome(msgspec.Struct, tag=True):
    """The launcher is a member of the run."""


class Refuse(msgspec.Struct, tag=True):
    """The launcher may not take part; `later`: another try may succeed."""

    reason: str
    later: bool


class Pong(msgspec.Struct, tag=True):
    """The answer to a `Ping`; `arrived` and `answered` are node 0's unix time (s)."""

    asked: float
    arrived: float
    answered: float


class StartPart(msgspec.Struct, tag=True):
    """Start this node's ranks of a gang, as the revision of `job.json`, or a later one, describes it."""

    gang: str
    attempt: int
    revision: int


class KillPart(msgspec.Struct, tag=True):
    """SIGKILL this node's ranks of a gang."""

    gang: str


class DumpStacks(msgspec.Struct, tag=True):
    """Have every process of this node write the stacks of its threads into its log."""


class FinishRun(msgspec.Struct, tag=True):
    """The run is over: end what is left, say `line`, exit with `code`."""

    code: int
    line: str


FromNode = Hello | Ping | Ready | PartExited | StopAsked | Left
Order = Welcome | Refuse | Pong | StartPart | KillPart | DumpStacks | FinishRun
