"""What the checks compare this machine with. Travels to the process that checks, so it holds plain values only."""

from dataclasses import dataclass
from pathlib import Path

from launcher.devices import Kind, find_devices


@dataclass(frozen=True)
class Needs:
    """What is to run here. Numbers are 0 where nobody knows: no CONFIG was given.

    Attributes:
        run_dir: absolute; need not exist.
        device: where model ranks run.
        num_nodes: over how many nodes.
        engines: names of the engines that the launched roles use.
        backend, backend_address: where storage units keep values.
        shared_memory: whether payloads of the queue are to go through shared memory.
        processes: of the run on this node, without the launcher.
        connections: TCP connections of those.
        descriptors: of the process that has most open.
        threads: of all processes together.
        channels: of the process that has most.
        memory_bytes: least host memory on this node, see `launcher.doctor.estimate`.
        memory_parts: the same as a text, the largest first.
        checkpoint_bytes: one checkpoint, and what is exported beside.
        num_checkpoints: that exist at the same time, the one that is being written included.
    """

    run_dir: str
    device: Kind = "cpu"
    num_nodes: int = 1
    engines: tuple[str, ...] = ()
    backend: str = "memory"
    backend_address: str = ""
    shared_memory: bool = True
    processes: int = 0
    connections: int = 0
    descriptors: int = 0
    threads: int = 0
    channels: int = 0
    memory_bytes: int = 0
    memory_parts: str = ""
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0


def needs_of_machine(run_dir: str | None, *, num_nodes: int) -> Needs:
    """Return what any run needs here; touches no file system but /dev.

    Args:
        run_dir: as the user wrote it; None: where runs are by default.
        num_nodes: over how many nodes.
    """
    return Needs(
        run_dir=str(Path(run_dir or "runs").absolute()),
        device=find_devices("auto").kind,
        num_nodes=num_nodes,
        engines=("hf", "fsdp"),
    )
