"""Agents, trainer ranks and receivers of one small model, each in a process of its own, driven over its pipe.

A process answers every command, a tuple of a verb and arguments, with what the verb returns, or with the error. The
model is that of `weight_model`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from echo_peers import credentials
from torch import Tensor
from weight_model import BUFFERS, DEADLINE_S, NEEDS, Setup, box_of, needs, same, shapes, weights

from asyncflow.transport.frame import Payload, PayloadPiece
from asyncflow.transport.meeting import SWITCH
from asyncflow.transport.server import Call
from weightsync.agent.agent_service import WeightAgent
from weightsync.broadcast_group import Broadcaster, BroadcastGroup, BroadcastMember, BucketLayout
from weightsync.config import WeightSyncConfig
from weightsync.messages import BucketFetched, FetchBucket
from weightsync.plan import Box, Need, plan_transfer
from weightsync.receiver import WeightReceiver
from weightsync.sender import ShardWriter, WeightSender, describe
from weightsync.version import Version

CPU = torch.device("cpu")


@dataclass
class Part:
    """A shard."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def stop_in_broadcast(pipe: Pipe) -> str:
    """Have this process say `midway` after the first bucket of its next broadcast, then wait."""
    summary = BucketLayout.make_summary

    def waiting(bucket: BucketLayout, words: Tensor) -> Tensor:
        pipe.send("midway")
        pipe.recv()
        return summary(bucket, words)

    setattr(BucketLayout, "make_summary", waiting)  # noqa: B010 - a test's hook
    return "will stop"


def run_commands(pipe: Pipe, party: Any) -> None:
    """Say `ready`, then carry out what the test wants, until it says `end`."""
    pipe.send("ready")
    while True:
        verb, *arguments = pipe.recv()
        try:
            pipe.send(getattr(party, verb)(*arguments))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send(error)
        if verb == "end":
            return


def weight_agent(
    port: int,
    pipe: Pipe,
    name: str,
    settings: Mapping[str, Any],
    peers: Sequence[str],
    on_wire: bool,
    lies: int,
    dies_after: int | None,
) -> None:
    """Serve as a node's agent.

    Args:
        port, pipe: of the test.
        name: of the agent.
        settings: of `WeightSyncConfig`.
        peers: other agents.
        on_wire: channels do not use shared memory.
        lies: so many buckets that it sends to other agents are damaged.
        dies_after: it is killed when it is asked for one more bucket than so many; None: never.
    """
    if on_wire:
        os.environ[SWITCH] = "0"
    config = WeightSyncConfig.model_validate({"timeout_s": DEADLINE_S} | dict(settings))
    run_commands(pipe, Agent(_LyingAgent(credentials(port), name, config, peers=peers), lies, dies_after))


class _LyingAgent(WeightAgent):
    lies = 0
    dies_after: int | None = None

    def _send_bucket(self, call: Call, wanted: FetchBucket) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.lies:
            self.lies -= 1
            with self._borrowed_region(wanted.version) as region:
                assert region is not None
                bucket = region.layout.plan.buckets[wanted.bucket]
                parts = [part.clone() for part in region.list_parts(bucket)]
            parts[0][0] ^= 1
            pieces = [PayloadPiece((part,), part.dtype) for part in parts]
            call.send_reply(BucketFetched(None, bucket.num_bytes), Payload(pieces))
        else:
            super()._send_bucket(call, wanted)


class Agent:
    """A node's agent."""

    def __init__(self, service: _LyingAgent, lies: int, dies_after: int | None) -> None:
        service.lies, service.dies_after = lies, dies_after
        self._service = service

    def status(self) -> Any:
        return self._service.status()

    def lies_left(self) -> int:
        return self._service.lies

    def end(self) -> str:
        self._service.close()
        return "closed"


def parts_of(rank: int, setup: Setup) -> list[Part]:
    """Return what a trainer rank holds, as it is before the first version."""
    all_shapes = {**shapes(setup.wide), **BUFFERS}
    boxes = {key: box_of(key, shape, rank, setup) for key, shape in all_shapes.items()}
    return [
        Part(key, shape, boxes[key], weights(Version(0, 0), setup.wide)[key][boxes[key].slices].clone())
        for key, shape in all_shapes.items()
    ]


def weight_trainer(port: int, pipe: Pipe, agent: str, rank: int, setup: Setup) -> None:
    """Be a trainer rank."""
    run_commands(pipe, Trainer(port, pipe, agent, rank, setup))


class Trainer:
    """One rank, whose parameters change in place as an optimizer's would."""

    def __init__(self, port: int, pipe: Pipe, agent: str, rank: int, setup: Setup) -> None:
        self._pipe = pipe
        mine, name = credentials(port), f"actor/{rank}"
        self._wide = setup.wide
        everybodys = [parts_of(each, setup) for each in range(setup.num_ranks)]
        self._parts = everybodys[rank]
        self._plan = plan_transfer(
            [describe(parts) for parts in everybodys], bucket_bytes=setup.bucket_bytes, dtype=setup.dtype
        )
        caster = None
        if setup.broadcast:
            caster = Broadcaster(
                mine, "weights-0", name, self._plan, rank, device=CPU, epoch=setup.epoch, timeout_s=setup.timeout_s
            )
        self._built = _count_epochs()
        self._stops = False
        self._tampers = _tamper(setup.tampers)
        _after_first_bucket(self._wait_for_the_test)
        self._sender = WeightSender(
            mine, agent, name, self._plan, rank,
            device=CPU, timeout_s=setup.timeout_s, broadcaster=caster,
        )  # fmt: skip

    def plan(self) -> Any:
        return self._plan

    def publish(self, *versions: Version) -> list[float]:
        """Update to each version and publish it; returns seconds held up."""
        held_up = []
        for version in versions:
            self.update(version)
            held_up.append(self._sender.publish(version, self._parts, timeout_s=DEADLINE_S))
        return held_up

    def publish_slowly(self, version: Version) -> list[float]:
        """Say `midway` in the middle of the copy, then wait."""
        self._stops = True
        held_up = self.publish(version)
        self._sender.before_update()  # the copy is done by another thread
        return held_up

    def publish_until_stopped(self, version: Version) -> list[float]:
        """Say `publishing`, then publish; the next order stops that. Returns seconds held up after it came."""
        self.update(version)
        stop, stopped = threading.Event(), []

        def obey() -> None:
            self._pipe.recv()
            stopped.append(time.monotonic())
            stop.set()

        self._pipe.send("publishing")
        waits = threading.Thread(target=obey)
        waits.start()
        self._sender.publish(version, self._parts, timeout_s=DEADLINE_S, stop=stop)
        ended = time.monotonic()
        waits.join()
        return [ended - stopped[0]]

    def update(self, version: Version) -> str:
        """Let the weights become those of a version, in place."""
        self._sender.before_update()
        for part in self._parts:
            part.values.copy_(weights(version, self._wide)[part.name][part.box.slices])
        return "updated"

    def wait(self) -> str:
        self._sender.wait(DEADLINE_S)
        return "delivered"

    def tampers_left(self) -> int:
        return len(self._tampers)

    def groups_built(self) -> int:
        return len(self._built)

    def end(self, timeout_s: float = 10.0) -> list[str]:
        self._sender.close(timeout_s)
        return _threads_left("weight-sender")

    def _wait_for_the_test(self) -> None:
        if self._stops:
            self._stops = False
            self._pipe.send("midway")
            self._pipe.recv()


def weight_receiver(
    port: int, pipe: Pipe, agent: str, name: str, setup: Setup, wanted: Mapping[str, Need] | None, log: str = ""
) -> None:
    """Be a receiver; `wanted` None: the whole model; `log`: file that tells when it swaps."""
    run_commands(pipe, Receiver(port, pipe, agent, name, setup, wanted, log))


class Receiver:
    """Keeps what it loaded, as an engine would."""

    def __init__(
        self, port: int, pipe: Pipe, agent: str, name: str, setup: Setup, wanted: Mapping[str, Need] | None, log: str
    ) -> None:
        self._pipe, self._name, self._setup, self._log = pipe, name, setup, log
        self._built = _count_epochs()
        self._wanted = wanted
        mine = credentials(port)
        member = BroadcastMember(mine.group_store(setup.timeout_s), name, CPU) if setup.broadcast else None
        self._receiver = WeightReceiver(
            mine, agent, name, needs(setup.wide) if wanted is None else wanted,
            device=CPU, whole=wanted is None, adopts=setup.adopts, takes_turns=setup.takes_turns,
            member=member, lead="weights-0", timeout_s=setup.timeout_s,
        )  # fmt: skip
        self._loaded: Version | None = None
        self._views: Mapping[str, Tensor] = {}

    def newest(self) -> Version | None:
        return self._receiver.newest

    def load(self, step: int, timeout_s: float = DEADLINE_S, wait_s: float = DEADLINE_S) -> Any:
        """Wait for a step and load; returns the version and whether the weights are those."""
        self._receiver.wait_for(step, timeout_s=timeout_s)
        return self._load(wait_s)

    def load_from(self, version: Version) -> Any:
        """Load as soon as this version or a newer one is at hand, whatever its step."""
        pause = threading.Event()
        while (newest := self._receiver.newest) is None or newest < version:
            pause.wait(0.01)
        return self._load(DEADLINE_S)

    def load_again(self) -> Any:
        """Load what is at hand, whatever was loaded before."""
        self._loaded = None
        return self._load(DEADLINE_S)

    def load_slowly(self, step: int) -> Any:
        """Say `inside` while loading, then wait; the weights are compared after that."""
        self._receiver.wait_for(step, timeout_s=DEADLINE_S)
        return self._load(DEADLINE_S, slow=True)

    def follow(self, last: Version) -> list[Any]:
        """Load version after version of one lineage as they come, until `last`."""
        loads = []
        while self._loaded != last:
            self._receiver.wait_for(0 if self._loaded is None else self._loaded.step + 1, timeout_s=DEADLINE_S)
            load = self._load(DEADLINE_S)
            loads += [load] if load is not None else []  # it may have made room for the next one just now
        return loads

    def still_whole(self) -> bool:
        """Whether what was loaded last, and not copied, is still that version."""
        assert self._loaded is not None
        return same(self._views, self._loaded, dtype=self._setup.dtype, wide=self._setup.wide)

    def groups_built(self) -> int:
        return len(self._built)

    def stop_in_broadcast(self) -> str:
        return stop_in_broadcast(self._pipe)

    def end(self) -> list[str]:
        self._receiver.close()
        return _threads_left("weight-receiver", "weight-member")

    def _load(self, wait_s: float, *, slow: bool = False) -> Any:
        loaded: dict[str, Tensor] = {}

        def apply(views: Mapping[str, Tensor]) -> None:
            self._note("begin")
            if slow:
                self._pipe.send("inside")
                self._pipe.recv()
            loaded.update({name: view.clone() for name, view in views.items()})
            self._views = views
            self._note("end")

        version = self._receiver.load(apply, newer_than=self._loaded, wait_s=wait_s)
        if version is None:
            return None
        self._loaded = version
        if self._wanted is not None:
            return version, loaded
        whole = loaded.keys() == NEEDS.keys()
        return version, whole and same(loaded, version, dtype=self._setup.dtype, wide=self._setup.wide)

    def _note(self, event: str) -> None:
        if self._log:
            with Path(self._log).open("a") as file:  # one short line: appended as a whole
                file.write(f"{event} {self._name}\n")


def _count_epochs() -> set[str]:
    built: set[str] = set()
    connect = BroadcastGroup.connect_members

    def counted(group: BroadcastGroup, transfer: Any, plan: Any, **limits: Any) -> None:
        built.add(transfer.epoch)
        connect(group, transfer, plan, **limits)

    setattr(BroadcastGroup, "connect_members", counted)  # noqa: B010 - a test's hook
    return built


def _tamper(number: int) -> list[None]:
    left: list[None] = [None] * number
    stamp = BucketLayout.stamp_trailer

    def tampering(bucket: BucketLayout, words: Tensor, version: Version) -> None:
        stamp(bucket, words, version)
        if left:
            left.pop()
            words.view(torch.uint8)[2] ^= 1

    setattr(BucketLayout, "stamp_trailer", tampering)  # noqa: B010 - a test's hook
    return left


def _after_first_bucket(called: Callable[[], None]) -> None:
    """Have the copy of the shards stop after its first bucket."""
    write = ShardWriter.write

    def halting(writer: ShardWriter, bucket: int, views: Any, shards: Any) -> None:
        write(writer, bucket, views, shards)
        called()

    setattr(ShardWriter, "write", halting)  # noqa: B010 - a test's hook


def _threads_left(*names: str) -> list[str]:
    """Return which threads of these names do not end, though they were told to and had some more time."""
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    for thread in threads:
        thread.join(10)
    return [thread.name for thread in threads if thread.is_alive()]
