"""A trainer, agents and receivers for a test: starts their processes and speaks to them."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from weight_model import Setup
from weight_peers import weight_agent, weight_receiver, weight_trainer

from weightsync.messages import AgentStatus
from weightsync.plan import TransferPlan
from weightsync.slot_memory import RegionLayout
from weightsync.version import Version

_HEADER_BYTES = 4096


class WeightRun:
    """All processes of one test; commands go through `ask`."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start
        self.setup = Setup()
        self.trainers: list[Any] = []

    def configure(self, **changes: Any) -> None:
        """Change the setup of what is started from now on."""
        self.setup = replace(self.setup, **changes)

    def start_agent(
        self,
        number: int = 0,
        *,
        nodes: int = 1,
        on_wire: bool = False,
        lies: int = 0,
        dies_after: int | None = None,
        **settings: Any,
    ) -> Any:
        """Start the agent of a node and wait until it serves."""
        names = [f"weights-{k}" for k in range(nodes)]
        name = names.pop(number)
        settings = {"num_slots": self.setup.num_slots, "bucket_bytes": self.setup.bucket_bytes} | settings
        child = self._start(weight_agent, name, settings, names, on_wire, lies, dies_after)
        assert child.hear() == "ready"
        return child

    def start_trainers(self) -> list[Any]:
        """Start all trainer ranks."""
        ranks = range(self.setup.num_ranks)
        self.trainers = [self._start(weight_trainer, "weights-0", rank, self.setup) for rank in ranks]
        for child in self.trainers:
            assert child.hear() == "ready"
        return self.trainers

    def start_receivers(
        self, *names: str, node: int = 0, wanted: Mapping[str, Any] | None = None, log: str = ""
    ) -> list[Any]:
        """Start receivers on a node."""
        children = [self._start(weight_receiver, f"weights-{node}", name, self.setup, wanted, log) for name in names]
        for child in children:
            assert child.hear() == "ready"
        return children

    def start_node(self, *names: str, **settings: Any) -> list[Any]:
        """Start an agent, the trainer, and receivers; returns these."""
        self.agent = self.start_agent(**settings)
        self.start_trainers()
        return self.start_receivers(*names)

    def publish(self, *versions: Version, wait: bool = True) -> None:
        """Have every rank publish, one version after the other, and (`wait`) see them delivered."""
        for held_up in ask_all(self.trainers, "publish", *versions):
            assert isinstance(held_up, list), held_up
        if wait:
            assert ask_all(self.trainers, "wait") == ["delivered"] * len(self.trainers)

    def plan(self) -> TransferPlan:
        """Return the trainer's plan."""
        plan = ask(self.trainers[0], "plan")
        assert isinstance(plan, TransferPlan)
        return plan

    def status(self, agent: Any = None) -> AgentStatus:
        """Return an agent's state."""
        status = ask(agent or self.agent, "status")
        assert isinstance(status, AgentStatus)
        return status

    def slot_paths(self, agent: Any = None) -> list[Path]:
        """Return the slots' memory, as another process finds it."""
        num_bytes = _HEADER_BYTES + self.plan().region_bytes
        found = []
        for path in Path(f"/proc/{(agent or self.agent).process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                is_slot = str(path.readlink()).startswith("/memfd:asyncflow") and path.stat().st_size == num_bytes
                found += [path] if is_slot else []
        return found

    def mapped(self, child: Any) -> dict[int, str]:
        """Return the slots that a process has mapped: inode -> address."""
        found, num_bytes = {}, -(-(_HEADER_BYTES + self.plan().region_bytes) // PAGESIZE) * PAGESIZE
        for line in Path(f"/proc/{child.process.pid}/maps").read_text().splitlines():
            address, _, _, _, inode, *name = line.split(maxsplit=5)
            start, end = (int(each, 16) for each in address.split("-"))
            if name and name[0].startswith("/memfd:asyncflow") and end - start == num_bytes:
                found[int(inode)] = address
        return found

    def damage(self, version: Version, name: str, expected: bytes, agent: Any = None) -> None:
        """Change one byte of a tensor in the slot where it lies."""
        plan = self.plan()
        start = _HEADER_BYTES + RegionLayout(plan).tensor_extent(plan.names.index(name))[0]
        for path in self.slot_paths(agent):
            with path.open("r+b", buffering=0) as file:
                file.seek(start)
                if file.read(len(expected)) == expected:
                    file.seek(start + len(expected) // 2)
                    byte = file.read(1)[0]
                    file.seek(start + len(expected) // 2)
                    file.write(bytes([byte ^ 4]))
                    return
        raise AssertionError(f"{name} of {version} is in no slot")

    def end(self, *children: Any) -> None:
        """Close what is named; nothing is left of it."""
        for child in children:
            assert ask(child, "end") in ([], "closed")
            assert child.end() == 0


def ask(child: Any, verb: str, *arguments: Any) -> Any:
    """Give one process a command; returns its answer."""
    child.tell((verb, *arguments))
    return child.hear()


def ask_all(children: Iterable[Any], verb: str, *arguments: Any) -> list[Any]:
    """Give several processes a command at the same time; returns their answers."""
    for child in children:
        child.tell((verb, *arguments))
    return [child.hear() for child in children]


def steps(first: int, last: int, lineage: int = 0) -> list[Version]:
    """Return versions one after the other."""
    return [Version(lineage, step) for step in range(first, last + 1)]
