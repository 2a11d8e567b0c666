"""Devices, for everything but the launcher: opening, grouping, copying. Differences between vendors:
`asyncflow.vendors`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from asyncflow.errors import ConfigError, DeviceMemoryError
from asyncflow.vendors import CPU, DeviceIpc, vendor_of, vendors

_GROWING = "expandable_segments:True"
# Page-locked buffers that staged copies use in turn.
_BUFFERS = 2
# Alignment of a buffer's parts (bytes).
_ALIGNED = 64
# What `copied_ahead` has on the device before it is used (bytes), unless one tensor is larger.
_AHEAD_BYTES = 2**28
# How often an abortable wait checks its stop (s).
_LOOK_S = 0.2


def name_device(name: str) -> torch.device:
    """Return `name` (`cpu`, `cuda:1`, `npu:0`) as a device, without using the device."""
    vendor_of(name).load()
    return torch.device(name)


def open_device(name: str) -> torch.device:
    """Make `name` (`cpu`, `cuda:1`, `npu:0`) the thread's current device; ConfigError if this PyTorch lacks it."""
    device = name_device(name)
    if device.type == "cpu":
        return device
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device(device.type):
        raise ConfigError(f"launcher.device: {name} does not exist for this PyTorch ({torch.__version__}); use cpu")
    use_device(device)
    return device


def bind_to_device(device: torch.device, system: Path = Path("/sys")) -> None:
    """Keep the calling thread, and threads and processes that it starts, to the cores near `device`.

    Memory that they touch first is then near it, too. No-op if its NUMA node is unknown, or if this process may use
    none of its cores.
    """
    address = vendor_of(device.type).pci_address(device.index or 0)
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text()) if address else -1
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except OSError:  # virtual machines and containers may hide it
        return
    ranges = [part.partition("-") for part in listed.strip().split(",") if part]
    near = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    if allowed := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def use_device(device: torch.device) -> None:
    """Make `device` the calling thread's current one; call this in every thread that touches the device.

    Every thread starts with device 0, and the first call on a device creates a context there: each process that forgets
    this takes half a gigabyte of the first rank's memory.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def wait_for_device(device: torch.device) -> None:
    """Wait until `device`, the calling thread's current one, has done what it was given; at once on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def free_cached_memory(device: torch.device) -> None:
    """Give memory that this process's allocator keeps for later back to `device`, for other processes."""
    if device.type != "cpu":
        wait_for_device(device)  # blocks that another stream still reads are kept
        torch.get_device_module(device).empty_cache()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the calling thread's current one for a `with` block."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index or 0)


@contextmanager
def side_stream(device: torch.device, stream: torch.Stream | None = None) -> Iterator[None]:
    """Give the calling thread its own stream for a `with` block; by default all threads share one. No-op on the CPU.

    Args:
        stream: to use; None: a new one. Its work starts after the work that the current stream has so far.
    """
    if device.type == "cpu":
        yield
        return
    side = stream or torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        yield


def visible_alone(device: torch.device, *, number: int = 1, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a child process sees only `number` devices from `device` on; empty on the CPU."""
    variable = vendor_of(device.type).visible
    if not variable:
        return {}
    listed = [name.strip() for name in env.get(variable, "").split(",") if name.strip()]
    first = device.index or 0
    indices = range(first, first + number)
    return {variable: ",".join(listed[index] if listed else str(index) for index in indices)}


def grow_segments(kind: str) -> None:
    """Let this process's allocator grow its blocks instead of adding others; call before its device is opened.

    A trainer's micro-batches vary in size, so gaps between blocks would not be reused. The user's own setting wins.
    """
    variables = vendor_of(kind).allocator
    if variables and not any(variable in os.environ for variable in variables):
        os.environ[variables[0]] = _GROWING


def without_growing(device: torch.device, env: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the allocator's variables for a process that manages device memory itself, as vLLM does; None: unset.

    Only the vendor's own one is set: vLLM's plugin may set it, too, and a vendor may refuse two.
    """
    variables = vendor_of(device.type).allocator
    found = next((env[variable] for variable in variables if variable in env), None)
    if found is None:
        return {}
    kept = ",".join(one for one in found.split(",") if not one.strip().startswith("expandable_segments"))
    return dict.fromkeys(variables) | {variables[0]: kept}


def make_deterministic(device: torch.device) -> None:
    """Make this process's kernels give the same bits for the same inputs; call before the first kernel runs.

    If a kernel has no such variant, PyTorch raises a RuntimeError that names the operation.
    """
    for variable, value in vendor_of(device.type).determinism().items():
        os.environ.setdefault(variable, value)
    torch.use_deterministic_algorithms(True)


def group_backends(device: torch.device) -> str:
    """Return the backends of a default group: Gloo for host values, the vendor's own for `device`."""
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

    Args:
        store: prefixed for this group alone; its timeout bounds the meeting and every collective.
        connect_s: for an accelerator's backend to connect, once all ranks have met (s); None: the store's timeout.
        stop: once set, connecting is given up.

    Raises:
        RuntimeError: not all ranks came in time, or `stop` was set.
    """
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # the stub lacks it
    vendor = vendor_of(device.type)
    if vendor is CPU:
        return vendor.group(store, rank, size, timeout)
    # An accelerator's ranks meet over the store first. Its backend connects in the first collective, which blocks in
    # the host and cannot be ended by another thread: so a thread runs it that is abandoned at the deadline.
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(size)], timeout)
    within = timeout if connect_s is None else timedelta(seconds=connect_s)
    deadline = time.monotonic() + within.total_seconds()
    connected: Future[ProcessGroup] = Future()

    def connect() -> None:
        try:
            use_device(device)
            group = vendor.group(store, rank, size, timeout)
            with side_stream(device):  # or this wait would hold up all computation
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

    On HCCL an operation that a dead peer left unfinished keeps the device busy; see `asyncflow.vendors`.
    """
    backend = group.name()
    next(vendor for vendor in vendors().values() if vendor.backend == backend).abort(group)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device's kernels support it, else float32."""
    return torch.float64 if vendor_of(device.type).has_float64 else torch.float32


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Begin this process's random numbers anew; every rank and step has others."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random number generators: the host's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_states` returned; a generator that is missing there keeps its state."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return host tensors on `device`, by one copy that the host does not wait for; others as they are.

    The copy goes through one page-locked buffer, which PyTorch's allocator keeps until it has been read. It runs in the
    current stream: computation issued there next sees it, while the host prepares the next batch.
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


def copied_ahead(tensors: Sequence[Tensor], device: torch.device) -> Generator[Tensor, None, None]:
    """Yield tensors on `device`, in order; while one is used, the next ones travel on a stream of their own.

    What is yielded is the current stream's, which sees the copy. The sources must not change until the iterator is
    exhausted or closed. Page-locked ones travel beside computation and collectives, and those of several processes at
    the same time.
    """
    if device.type == "cpu":
        yield from (tensor.to(device) for tensor in tensors)
        return
    use_device(device)
    stream = torch.Stream(device=device)
    waiting, travelling = deque(tensors), deque[tuple[Tensor, torch.Event | None]]()
    num_bytes = 0
    try:
        while waiting or travelling:
            while waiting and (not travelling or num_bytes + waiting[0].nbytes <= _AHEAD_BYTES):
                source = waiting.popleft()
                num_bytes += source.nbytes
                travelling.append(_begin_copy(source, device, stream))
            there, copied = travelling.popleft()
            num_bytes -= there.nbytes
            if copied is not None:
                torch.accelerator.current_stream(device).wait_event(copied)
            yield there
    finally:
        stream.synchronize()


def _begin_copy(source: Tensor, device: torch.device, stream: torch.Stream) -> tuple[Tensor, torch.Event | None]:
    if source.device == device:
        return source, None
    # Allocated in the current stream, whose earlier work may still use this memory; its later work waits for the copy.
    there = torch.empty_like(source, device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        there.copy_(source, non_blocking=True)
        return there, stream.record_event()


class CopyStream:
    """Copies from a device to host memory beside the computation: on its own stream; on the CPU, in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")  # starts with the first copy
        self._buffers: dict[int, Tensor] = {}  # page-locked

    def start_copies(self, copies: Iterable[Callable[[], None]]) -> "list[CopiesDone]":
        """Begin copying, one after another; returns the end of each.

        Each element of `copies` issues copies out of the device. They see the work that the current stream has so far.
        """
        if self._stream is None:
            return [CopiesDone(self._thread.submit(copy).result) for copy in copies]
        use_device(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ends = []
        with self._stream:
            for copy in copies:
                copy()
                ends.append(CopiesDone(partial(self._wait_for_event, self._stream.record_event())))
        return ends

    def start_staged_copies(self, copies: "Sequence[Staging]") -> "list[CopiesDone]":
        """Begin copying out of an accelerator through page-locked buffers, one after another; returns the end of each.

        A copy is packed (and cast) on the device, travels in one piece, and is unpacked by this object's thread while
        the next one travels. This is fast whatever the target is, for every vendor. Copies see the work that the
        current stream has so far.
        """
        assert self._stream is not None, "the CPU's copies need no staging"
        use_device(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ends: list[Future[None]] = [Future() for _ in copies]
        self._thread.submit(self._copy_staged, copies, ends)
        return [CopiesDone(end.result) for end in ends]

    def _copy_staged(self, copies: "Sequence[Staging]", ends: "Sequence[Future[None]]") -> None:
        assert self._stream is not None
        try:
            use_device(self._device)
            travelling: deque[tuple[torch.Event, Staging, Tensor, Future[None]]] = deque()
            for number, (copy, end) in enumerate(zip(copies, ends, strict=True)):
                # The buffer that comes next is still in use.
                if len(travelling) == _BUFFERS:
                    self._unpack_arrived(*travelling.popleft())
                host = self._pinned_buffer(number % _BUFFERS, copy.num_bytes)
                with self._stream:
                    packed = torch.empty(copy.num_bytes, dtype=torch.uint8, device=self._device)
                    copy.pack(packed)
                    host.copy_(packed, non_blocking=True)
                    travelling.append((self._stream.record_event(), copy, host, end))
            while travelling:
                self._unpack_arrived(*travelling.popleft())
        except BaseException as error:  # noqa: BLE001 (of a thread; it is raised where an end is waited for)
            for end in ends:
                if not end.done():
                    end.set_exception(error)

    def _unpack_arrived(self, arrived: torch.Event, copy: "Staging", host: Tensor, end: "Future[None]") -> None:
        arrived.synchronize()
        copy.unpack(host)
        end.set_result(None)

    def _pinned_buffer(self, number: int, num_bytes: int) -> Tensor:
        if number not in self._buffers or self._buffers[number].numel() < num_bytes:
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[number][:num_bytes]

    def _wait_for_event(self, event: torch.Event) -> None:
        with on_device(self._device):  # the waiting thread's current device may be device 0
            event.synchronize()

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True)
class Staging:
    """A copy out of a device; see `CopyStream.start_staged_copies`."""

    num_bytes: int  # that travel
    pack: Callable[[Tensor], None]  # issues work that writes them to uint8 [num_bytes] on the device
    unpack: Callable[[Tensor], None]  # reads them from uint8 [num_bytes] on the host


@dataclass(frozen=True)
class CopiesDone:
    """The end of copies, to wait for."""

    wait: Callable[[], object]  # blocks until they have ended; raises their error


def pin(address: int, num_bytes: int, device: torch.device, *, writable: bool) -> Callable[[], object] | None:
    """Page-lock host memory, so that copies between it and `device` need no intermediate buffer and may overlap.

    Copies are merely slower if the vendor has no such call or it fails (limit of locked memory). Any thread may call
    this and the returned function, which must be called before the memory is unmapped. Returns None if nothing is
    locked.

    Args:
        writable: whether this process may write to the memory.
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


class ExportedMemory:
    """Device memory that other processes of this host can open, beside that of PyTorch's allocator. It stays until this
    process ends: another one may have it open, and then freeing it is undefined.

    Raises DeviceMemoryError if there is no room for it, or the vendor's runtime cannot share memory; none is kept.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._ipc = _device_ipc(device)
        with on_device(device):
            self._address = self._ipc.allocate(num_bytes)
            try:
                # Plain bytes, for `OpenedMemory`.
                self.handle = self._ipc.export(self._address, num_bytes)
            except DeviceMemoryError:
                self._ipc.free(self._address)
                raise

    def write(self, start: int, source: Tensor) -> None:
        """Issue a copy of a contiguous tensor on the device to a place (bytes), in the current stream."""
        self._ipc.copy(self._address + start, source.data_ptr(), source.nbytes)


class OpenedMemory:
    """What another process of this host exported from `device`, or from one that `device` can reach. Used by one
    thread, whose current device is `device`. Raises DeviceMemoryError if it cannot be opened."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._handle = handle
        self._ipc = _device_ipc(device)
        self._address = self._ipc.open(handle)

    def read(self, start: int, target: Tensor) -> None:
        """Issue a copy from a place (bytes) to a contiguous tensor on the device, in the current stream."""
        self._ipc.copy(target.data_ptr(), self._address + start, target.nbytes)

    def close(self) -> None:
        """Close it; the device has read what it was to read."""
        self._ipc.close(self._handle, self._address)


def _device_ipc(device: torch.device) -> DeviceIpc:
    ipc = vendor_of(device.type).ipc()
    if ipc is None:
        raise DeviceMemoryError(f"the runtime of {device.type} shares no memory between processes")
    return ipc
