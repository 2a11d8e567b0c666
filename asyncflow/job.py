"""What every process of a run needs to find the others: `job.json` in the run directory.

The launcher writes it with mode 0600 (it holds the job's secret) before the first worker starts and removes it when
the run ends. Workers, also those started by hand, read it. It never travels through the store or argv.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError
from asyncflow.run_files import JOB_FILE

_ERROR_PREFIX = "error:"
_LEFT_WELL = "ok"


@dataclass(frozen=True)
class GangSpec:
    """Ranks that live and die together.

    Attributes:
        name: unique in the run, e.g. `actor`, `rollout-0`, `ref-1`, `storage-0`, `controller`.
        role: `rollout actor ref reward advantages evaluate`, or the services `storage`, `controller`, `weights`.
        index: which instance of the role this gang is, from 0.
        num_ranks: worker processes.
        devices: one device string per rank, e.g. `("cpu", "cpu")` or `("cuda:0", "cuda:1")`; of one process that drives
            several (tensor parallelism in a generating engine), all of them, side by side.
        nodes: the node of each rank, never descending; left out: all ranks are on node 0.
    """

    name: str
    role: str
    index: int
    num_ranks: int
    devices: tuple[str, ...]
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", (0,) * self.num_ranks)
        assert len(self.nodes) == self.num_ranks and list(self.nodes) == sorted(self.nodes), self.nodes

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """(node, device), of every device."""
        nodes = self.nodes * len(self.devices) if self.num_ranks == 1 else self.nodes
        return tuple(zip(nodes, self.devices, strict=True))

    @property
    def parts(self) -> tuple[int, ...]:
        """The nodes that have ranks of this gang, ascending."""
        return tuple(dict.fromkeys(self.nodes))

    def ranks_on(self, node: int) -> range:
        """Return the ranks of this gang on a node."""
        first = sum(1 for other in self.nodes if other < node)
        return range(first, first + self.nodes.count(node))


@dataclass(frozen=True)
class Node:
    """One host of a run.

    Attributes:
        rank: its number; node 0 has the head launcher and the job store.
        host: its name, for people.
        address: by which the others reach it.
        clock: of this host, aligned to node 0's.
    """

    rank: int
    host: str
    address: str
    clock: HostClock


@dataclass(frozen=True)
class Job:
    """Endpoints and membership of one run.

    Attributes:
        store_host, store_port: the job store (TCPStore), on loopback for a one-node run, else at node 0's address.
        secret: hex; channels prove it by challenge-response.
        launcher_pid: the launcher's process id on the head node.
        gangs: every gang of the run, started by the launcher or by hand.
        lineage: number of actor restores before this start (0 for a fresh run).
        resume_from: checkpoint directory to restore, or "".
        last_step: number of the last step to train.
        started_at: unix time (s) at which the user's command started; metrics count from it.
        clock: of the head launcher's host; every timeline there uses it.
        nodes: all hosts, by rank; empty for a one-node run, and until the launchers of all nodes have joined.
        revision: counts what was written, so that other hosts know whether they see the newest.
    """

    store_host: str
    store_port: int
    secret: str
    launcher_pid: int
    gangs: tuple[GangSpec, ...]
    lineage: int
    resume_from: str
    last_step: int
    started_at: float
    clock: HostClock
    nodes: tuple[Node, ...] = ()
    revision: int = 0

    def changed(self, **fields: Any) -> "Job":
        """Return this job with other values, as its next revision."""
        return replace(self, revision=self.revision + 1, **fields)

    def local_clock(self) -> HostClock:
        """Return the clock of the host that this process runs on."""
        return HostClock.of_this_host([self.clock, *(node.clock for node in self.nodes)])

    def gang(self, name: str) -> GangSpec:
        """Return the gang called `name`; raises ConfigError with the known names."""
        for gang in self.gangs:
            if gang.name == name:
                return gang
        known = " ".join(gang.name for gang in self.gangs)
        raise ConfigError(f"gang: no gang is named {name!r} in this run; known: {known}")

    def of_role(self, role: str) -> tuple[GangSpec, ...]:
        """Return the gangs of `role`, by index; empty when the role was not launched."""
        return tuple(gang for gang in self.gangs if gang.role == role)

    def save(self, run_dir: Path) -> None:
        """Write `job.json` (mode 0600) atomically; a job that was written before must be `changed` first."""
        target = run_dir / JOB_FILE
        beside = target.with_suffix(".tmp")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        beside.replace(target)

    @staticmethod
    def load(run_dir: Path) -> "Job":
        """Read `job.json`; raises ConfigError when the run is not running."""
        path = run_dir / JOB_FILE
        if not path.is_file():
            raise ConfigError(f"run directory: {run_dir} has no {JOB_FILE}, so nothing runs there; start it first")
        fields = json.loads(path.read_text())
        gangs = tuple(
            GangSpec(**{**gang, "devices": tuple(gang["devices"]), "nodes": tuple(gang["nodes"])})
            for gang in fields.pop("gangs")
        )
        nodes = tuple(Node(**{**node, "clock": HostClock(**node["clock"])}) for node in fields.pop("nodes"))
        return Job(gangs=gangs, nodes=nodes, clock=HostClock(**fields.pop("clock")), **fields)


def last_words(error: BaseException | None) -> str:
    """Return what a rank writes into the store key `left/GANG/RANK` when it leaves, with an error or without."""
    return _LEFT_WELL if error is None else f"{_ERROR_PREFIX} {type(error).__name__}: {error}"


def error_in(words: str | None) -> str:
    """Return the error in a rank's last words, in one line; "" when there is none."""
    if words is None or not words.startswith(_ERROR_PREFIX):
        return ""
    return " ".join(words.removeprefix(_ERROR_PREFIX).split()) or "it gave no reason"
