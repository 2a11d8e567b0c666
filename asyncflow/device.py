"""Devices as everything but the launcher sees them: opened, grouped, copied from. What differs between vendors is in
`asyncflow.vendors`; all else asks PyTorch (`torch.accelerator`) or this module, never `if npu`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from asyncflow.errors import ConfigError
from asyncflow.vendors import CPU, vendor_of, vendors

_GROWING = "expandable_segments:True"
_BUFFERS = 2
"""Page-locked buffers that staged copies take in turn."""
_ALIGNED = 64
"""Bytes that the parts of a buffer are aligned to."""
_LOOK_S = 0.2
"""How often what may be stopped looks whether it is (s)."""


def name_device(name: str) -> torch.device:
    """Return `name` (`cpu`, `cuda:1`, `npu:0`) as a device, of which nothing is used yet."""
    vendor_of(name).load()
    return torch.device(name)


def open_device(name: str) -> torch.device:
    """Make `name` (`cpu`, `cuda:1`, `npu:0`) the calling thread's current device.

    Raises:
        ConfigError: this build of PyTorch has no such device.
    """
    device = name_device(name)
    if device.type == "cpu":
        return device
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device(device.type):
        raise ConfigError(f"launcher.device: {name} is not there for this PyTorch ({torch.__version__}); use cpu")
    use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make `device` the calling thread's current one, in each thread that touches it.

    Every thread begins with device 0, and the first call on a device makes a context there: half a gigabyte of the
    first rank's memory for each process that forgets it.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return what makes `device` the calling thread's current one while a block runs."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index or 0)


@contextmanager
def side_stream(device: torch.device, stream: torch.Stream | None = None) -> Iterator[None]:
    """Give the calling thread a stream of its own while a block runs; threads begin with the same one.

    Args:
        device: the CPU has none.
        stream: to be used; None: a new one. It begins behind what the current stream was given so far.
    """
    if device.type == "cpu":
        yield
        return
    side = stream or torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        yield


def visible_alone(device: torch.device, *, number: int = 1, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a child process sees so many devices from `device` on; nothing for the CPU."""
    variable = vendor_of(device.type).visible
    if not variable:
        return {}
    listed = [name.strip() for name in env.get(variable, "").split(",") if name.strip()]
    first = device.index or 0
    indices = range(first, first + number)
    return {variable: ",".join(listed[index] if listed else str(index) for index in indices)}


def grow_segments(kind: str) -> None:
    """Let this process's allocator grow its blocks instead of making others, before its device is opened: a trainer's
    micro-batches are of all sizes, and the gaps between blocks would not be used again. What the user set counts."""
    variables = vendor_of(kind).allocator
    if variables and not any(variable in os.environ for variable in variables):
        os.environ[variables[0]] = _GROWING


def without_growing(device: torch.device, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the allocator's variables as a process needs them that hands device memory out by itself, as vLLM does."""
    found = {variable: env[variable] for variable in vendor_of(device.type).allocator if variable in env}
    return {
        variable: ",".join(one for one in value.split(",") if not one.strip().startswith("expandable_segments"))
        for variable, value in found.items()
    }


def make_deterministic(device: torch.device) -> None:
    """Let this process's kernels give the same bits for the same inputs, before the first one runs.

    PyTorch raises RuntimeError, which names the operation, where a kernel has no such variant.
    """
    for variable, value in vendor_of(device.type).determinism().items():
        os.environ.setdefault(variable, value)
    torch.use_deterministic_algorithms(True)


def group_backends(device: torch.device) -> str:
    """Return the backends of a default group: Gloo for host values, the vendor's own for those of `device`."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{vendor_of(device.type).backend}"


def connect_group(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    connect_s: float | None = None,
    stop: threading.Event | None = None,
) -> ProcessGroup:
    """Connect a group of processes that share no default group, over the device's own backend.

    The ranks of an accelerator's group meet over the store first. Their backend meets in its first collective, which
    blocks in the host, and which no other thread can end; so a thread runs it that is abandoned at the deadline.

    Args:
        store: prefixed for this group alone; its timeout bounds the meeting, and every collective.
        rank, size: of this process in the group.
        device: whose tensors travel.
        connect_s: for an accelerator's backend to connect, once all have met; None: as the store says (s).
        stop: once it is set, connecting is given up.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # the stub lacks it
    vendor = vendor_of(device.type)
    if vendor is CPU:
        return vendor.group(store, rank, size, timeout)
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(size)], timeout)
    within = timeout if connect_s is None else timedelta(seconds=connect_s)
    deadline = time.monotonic() + within.total_seconds()
    connected: Future[ProcessGroup] = Future()

    def connect() -> None:
        try:
            use_device(device)
            group = vendor.group(store, rank, size, timeout)
            with side_stream(device):  # else what this waits for would hold up all that the process computes
                group.allreduce([torch.zeros(1, device=device)]).wait(within)
            connected.set_result(group)
        except BaseException as error:  # noqa: BLE001 (of another thread; it is raised where it is waited for)
            connected.set_exception(error)

    threading.Thread(target=connect, name="connect", daemon=True).start()
    while not connected.done():
        wait((connected,), min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        if not connected.done() and (time.monotonic() > deadline or (stop is not None and stop.is_set())):
            raise RuntimeError(f"the group did not connect within {within.total_seconds():g} s, or was stopped")
    return connected.result()


def abort_group(group: ProcessGroup) -> None:
    """End a group of `connect_group` from any thread: waits in it, on any rank, raise RuntimeError.

    On HCCL an operation that a dead peer left unfinished goes on occupying the device; see `asyncflow.vendors`.
    """
    backend = group.name()
    next(vendor for vendor in vendors().values() if vendor.backend == backend).abort(group)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device's kernels compute in it, else float32."""
    return torch.float64 if vendor_of(device.type).has_float64 else torch.float32


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random number generators: of the host and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with what `rng_states` returned; a generator that it lacks stays as it is."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return host tensors on `device`, by one copy that the host does not wait for; others as they are.

    They go through one page-locked buffer of PyTorch's allocator, which keeps it until the copy has read it. The copy
    is in the current stream: what is computed there next sees it, while the host prepares what comes after that.
    """
    moved = [tensor for tensor in tensors if tensor.device != device]
    if device.type == "cpu" or not moved:
        return [tensor.to(device) for tensor in tensors]
    starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in moved)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(moved, starts, strict=False):
        host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = host.to(device, non_blocking=True)
    parts = iter(
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(moved, starts, strict=False)
    )
    return [next(parts) if tensor.device != device else tensor for tensor in tensors]


class CopyStream:
    """Copies from a device to host memory beside the computation: on a stream of its own; on the CPU, in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")  # starts with its first work
        self._buffers: dict[int, Tensor] = {}  # page-locked

    def run(self, copies: Iterable[Callable[[], None]]) -> "list[CopiesDone]":
        """Begin copying, one after the other.

        Args:
            copies: each issues copies out of the device. They see what the current stream was given so far.

        Returns:
            What tells the end of each.
        """
        if self._stream is None:
            return [CopiesDone(self._thread.submit(copy).result) for copy in copies]
        use_device(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ends = []
        with self._stream:
            for copy in copies:
                copy()
                ends.append(CopiesDone(partial(self._await, self._stream.record_event())))
        return ends

    def stage(self, copies: "Sequence[Staging]") -> "list[CopiesDone]":
        """Begin copying out of an accelerator by way of page-locked buffers of its own, one copy after the other.

        Each is packed on the device, which also casts, travels in one piece, and is unpacked by this object's thread
        while the next one travels. So it is fast and beside the computation whatever the target is, for every vendor.

        Args:
            copies: they see what the current stream was given so far.

        Returns:
            What tells the end of each.
        """
        assert self._stream is not None, "the CPU's copies need no staging"
        use_device(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ends: list[Future[None]] = [Future() for _ in copies]
        self._thread.submit(self._stage, copies, ends)
        return [CopiesDone(end.result) for end in ends]

    def _stage(self, copies: "Sequence[Staging]", ends: "Sequence[Future[None]]") -> None:
        assert self._stream is not None
        try:
            use_device(self._device)
            travelling: deque[tuple[torch.Event, Staging, Tensor, Future[None]]] = deque()
            for number, (copy, end) in enumerate(zip(copies, ends, strict=True)):
                if len(travelling) == _BUFFERS:
                    self._unpack(*travelling.popleft())
                host = self._buffer(number % _BUFFERS, copy.num_bytes)
                with self._stream:
                    packed = torch.empty(copy.num_bytes, dtype=torch.uint8, device=self._device)
                    copy.pack(packed)
                    host.copy_(packed, non_blocking=True)
                    travelling.append((self._stream.record_event(), copy, host, end))
            while travelling:
                self._unpack(*travelling.popleft())
        except BaseException as error:  # noqa: BLE001 (of a thread; it is raised where an end is waited for)
            for end in ends:
                if not end.done():
                    end.set_exception(error)

    def _unpack(self, arrived: torch.Event, copy: "Staging", host: Tensor, end: "Future[None]") -> None:
        arrived.synchronize()
        copy.unpack(host)
        end.set_result(None)

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        if number not in self._buffers or self._buffers[number].numel() < num_bytes:
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[number][:num_bytes]

    def _await(self, event: torch.Event) -> None:
        with on_device(self._device):  # another thread may wait, whose current device is the first
            event.synchronize()

    def close(self) -> None:
        """End the thread once it is done; idempotent."""
        self._thread.shutdown()


@dataclass(frozen=True)
class Staging:
    """A copy out of a device, see `CopyStream.stage`.

    Attributes:
        num_bytes: that travel.
        pack: writes them, uint8 [num_bytes] on the device, with work that it issues.
        unpack: reads them, uint8 [num_bytes] on the host.
    """

    num_bytes: int
    pack: Callable[[Tensor], None]
    unpack: Callable[[Tensor], None]


@dataclass(frozen=True)
class CopiesDone:
    """The end of copies.

    Attributes:
        wait: blocks until they have ended; raises what went wrong.
    """

    wait: Callable[[], object]


def pin(address: int, num_bytes: int, device: torch.device, *, writable: bool) -> Callable[[], object] | None:
    """Page-lock host memory, so that copies between it and `device` need no intermediate buffer and may overlap.

    Where the vendor has no such call, or it fails (limits of locked memory), copies are slower, and that is all. Any
    thread may call this, and what it returns: both make `device` the current one meanwhile.

    Args:
        address, num_bytes: of the memory.
        device: that copies.
        writable: whether this process may write to it.

    Returns:
        What releases it, to be called before the memory is unmapped; None: it is not locked.
    """
    if not num_bytes:
        return None
    with on_device(device):
        release = vendor_of(device.type).pin(address, num_bytes, writable=writable)
    if release is None:
        return None

    def unpin() -> None:
        with on_device(device):
            release()

    return unpin
