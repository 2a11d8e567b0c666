"""Which node of a run this launcher is: by `--nnodes`, `--node-rank` and `--head`, or by Slurm's variables. Pure."""

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncflow.errors import ConfigError

_MOST_NODES = 4096
_HIGHEST_PORT = 65535
_HOST = r"(?:[^\[\],]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_HEAD = re.compile(
    r"(?P<bare>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%\w[\w.-]*)?)"
    r"|(\[(?P<inside>[^\]]+)\]|(?P<host>[A-Za-z0-9._-]+))(:(?P<port>[0-9]{1,9}))?"
)
_NODE_LIST = re.compile(rf"(?P<first>{_HOST})(?:,{_HOST})*", re.ASCII)


@dataclass(frozen=True)
class NodePlace:
    """One launcher's place among those of its run; the default is a run on one node.

    Attributes:
        count: nodes of the run, each with one launcher.
        rank: of this node; node 0 is the head.
        head_host: name or address of node 0 as the user gave it; "": node 0 chooses.
        head_port: where node 0's job store listens; 0: any free port.
        hints: the scheduler's names of node 0; tried if the user gave none.
        job_id: the scheduler's; "" without one.
    """

    count: int = 1
    rank: int = 0
    head_host: str = ""
    head_port: int = 0
    hints: tuple[str, ...] = ()
    job_id: str = ""

    @property
    def is_head(self) -> bool:
        """Whether this launcher starts and ends the run."""
        return self.rank == 0


ONE_NODE = NodePlace()

LEAVE_S = 20.0
"""What a launcher needs after its workers have saved: services leave, files and the job end (s)."""


def save_time_left_s(env: Mapping[str, str], now: float) -> float:
    """Return how long a save may still take once the run is stopping (s); infinite outside of a Slurm job.

    Slurm ends a job without further notice, and then the script cannot queue it again. Versions before 22.05 do not
    say when; there a save gets no more time than `launcher.stop_timeout_s`. `now`: unix time.
    """
    if "SLURM_JOB_ID" not in env:
        return math.inf
    end = env.get("SLURM_JOB_END_TIME", "")
    return float(end) - LEAVE_S - now if end.isdecimal() else 0.0


def find_place(nnodes: int | None, node_rank: int | None, head: str | None, env: Mapping[str, str]) -> NodePlace:
    """Return this launcher's place.

    The user's options override Slurm's variables. These count only if `srun` started the command; an interactive shell
    in an allocation is one node.

    Args:
        nnodes, node_rank, head: the options; None: not given.

    Raises:
        ConfigError: an option or variable is invalid or missing, or two contradict each other.
    """
    host, port = _head(head)
    if nnodes is not None and not 1 <= nnodes <= _MOST_NODES:
        raise ConfigError(f"--nnodes: {nnodes} is not a number of nodes; give 1 to {_MOST_NODES}")
    if nnodes == 1 and host:
        raise ConfigError(f"--head: {head} needs --nnodes 2 or more; a run on one node listens on loopback only")
    if nnodes is not None and (nnodes == 1 or node_rank is not None):
        return _named(nnodes, node_rank or 0, host, port)
    step = _slurm_step(env)
    if step is None:
        if nnodes is not None:
            raise ConfigError(f"--node-rank: is missing; give each of the {nnodes} nodes its own, 0 to {nnodes - 1}")
        if node_rank is not None:
            raise ConfigError(f"--node-rank: {node_rank} needs --nnodes, the number of nodes")
        if host:
            raise ConfigError(f"--head: {head} needs --nnodes 2 or more; a run on one node listens on loopback only")
        return ONE_NODE
    if nnodes not in (None, step.count):
        raise ConfigError(f"--nnodes: {nnodes}, but srun started the command on {step.count}; leave --nnodes out")
    rank = step.rank if node_rank is None else node_rank
    place = _named(step.count, rank, host, port)
    return place if step.count == 1 else NodePlace(place.count, rank, host, port, step.hints, step.job_id)


def first_host(text: str) -> str:
    """Return the first host of Slurm's compact form: `gpu001` of `gpu[001-003,7],login1`; raises ConfigError."""
    # Only the first host is needed, so a regular expression replaces a library for node lists.
    matched = _NODE_LIST.fullmatch(text)
    if matched is None:
        raise ConfigError(
            f"node list: {text!r} is not a list of host names such as n[1-4,7]; correct it, or give --head"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", matched["first"])


def _named(count: int, rank: int, host: str, port: int) -> NodePlace:
    if not 0 <= rank < count:
        what = "must be 0, there is one node" if count == 1 else f"must be 0 to {count - 1}"
        raise ConfigError(f"--node-rank: {rank} {what} (--nnodes {count})")
    return NodePlace(count, rank, host, port) if count > 1 else ONE_NODE


def _head(text: str | None) -> tuple[str, int]:
    if text is None:
        return "", 0
    matched = _HEAD.fullmatch(text)
    address = "" if matched is None else matched["inside"] or matched["bare"] or ""
    if "%" in address and _is_ipv6(address):
        raise ConfigError(f"--head: {text!r}, an address of a link, means another host on each node; give a global one")
    if matched is None or (address and not _is_ipv6(address)):
        raise ConfigError(
            f"--head: {text!r} is not HOST or HOST:PORT, a name or an address; e.g. node1:29400, [fd00::1]:29400"
        )
    port = matched["port"]
    if port is not None and not 1 <= int(port) <= _HIGHEST_PORT:
        raise ConfigError(f"--head: {text!r} has no port from 1 to {_HIGHEST_PORT}; correct it, or leave it out")
    return address or matched["host"], int(port or 0)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _SlurmStep:
    count: int
    rank: int
    hints: tuple[str, ...]
    job_id: str


def _slurm_step(env: Mapping[str, str]) -> _SlurmStep | None:
    """Return what `srun` says; None: it did not start this process."""
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    # The step's own numbers come first: a step may use fewer nodes and tasks than its job.
    count = _number(env, "SLURM_STEP_NUM_NODES") if in_step else None
    count = _number(env, "SLURM_NNODES") if count is None else count
    if not in_step:
        if count is not None and count > 1 and "SLURM_PROCID" in env:
            raise ConfigError(
                f"--nnodes: this job has {count} nodes, but srun did not start the command; put `srun "
                f"--ntasks-per-node=1` before it, or give --nnodes 1"
            )
        return None
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    tasks = _number(env, "SLURM_NTASKS") if tasks is None else tasks
    count = 1 if count is None else count
    if tasks is not None and tasks != count:
        raise ConfigError(
            f"srun: {tasks} tasks on {count} node{'s' if count > 1 else ''}, but every node takes one launcher; use "
            f"srun --ntasks-per-node=1"
        )
    rank = _number(env, "SLURM_NODEID")
    rank = _number(env, "SLURM_PROCID") if rank is None else rank
    if rank is None:
        if count == 1:
            return None
        raise ConfigError("--node-rank: is missing, and so is SLURM_NODEID; give it")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    names = (first_host(nodelist),) if nodelist else ()
    address = env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    job_id = env.get("SLURM_JOB_ID", "")
    return _SlurmStep(count, rank, tuple(filter(None, (*names, address))), job_id)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None or text == "":
        return None
    if not (text.isdecimal() and text.isascii()):
        raise ConfigError(f"{name}: {text!r} is not a number; give --nnodes and --node-rank instead")
    return int(text)
