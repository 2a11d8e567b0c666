"""A fork server: ties itself to the launcher, imports what workers need, then forks a worker for every order.

`launcher.process.fork_server` starts it and has the messages. It must not start a thread: a forked child inherits
locks, but not the threads that hold them. Where an import starts one all the same, or opens a device, the process
replaces itself by one that imports nothing and spawns every worker.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from asyncflow.errors import ConfigError, one_line
from asyncflow.process import STOP_SIGNALS, die_with_parent, variables_set
from asyncflow.vendors import vendors
from launcher.process import worker_entry
from launcher.process.fork_server import error_file

LIBRARIES = (
    "torch",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first optimizer step imports it
    "torch.profiler",  # the first backward imports it
    "fsspec.core",  # the first checkpoint imports it
    "numpy.ctypeslib",
    "safetensors.torch",
    "msgspec",
    "xxhash",
    "jinja2.sandbox",
)
MODELS = (
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
OWN_PACKAGES = ("asyncflow", "tq", "weightsync", "workers")
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Otherwise torch imports every installed backend with itself, torch_npu among them."""
_NEVER = ("workers.engines.vllm.vllm_worker",)
"""Only vLLM's own worker may import it: it imports vllm, which costs every role seconds and gigabytes."""


_SPAWNING = "from launcher.process.preloaded import spawn_for_launcher; spawn_for_launcher()"
_WORKER = "from launcher.process.worker_entry import enter_spawned; enter_spawned()"
_LONGEST_ORDER = 1 << 20


def serve_launcher() -> NoReturn:
    """Import and serve until the launcher is gone. Errors before that are recorded for the launcher.

    Arguments of the process: the socket's descriptor, the launcher's process id, its log.
    """
    descriptor, launcher, log_file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    try:
        _leave_stop_signals(launcher)
        began = time.monotonic()
        _import_all()
        import_s = time.monotonic() - began
        if obstacle := find_obstacle():
            _keep_only(descriptor)
            # Not served from here: what was imported takes memory, maybe a device's, for the whole run.
            os.execv(
                sys.executable,
                [sys.executable, "-P", "-c", _SPAWNING, str(descriptor), str(launcher), obstacle, str(import_s)],
            )
        gc.collect()
        gc.freeze()  # so that no child's collector touches, and thereby copies, the shared pages
        gc.enable()
    except BaseException as error:
        with contextlib.suppress(OSError):
            error_file(log_file, str(os.getpid())).write_text(json.dumps({"error": one_line(error)}))
        raise
    WorkerStarter(descriptor).serve()


def _keep_only(descriptor: int) -> None:
    """Let only this one and the standard streams survive an exec: a device that a library opened must not stay open."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.set_inheritable(number, number <= 2 or number == descriptor)


def spawn_for_launcher() -> NoReturn:
    """Serve without imports: every worker is a new process. Arguments: as above, then why, and what a start costs."""
    descriptor, launcher, obstacle, import_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    os.set_inheritable(descriptor, False)
    _leave_stop_signals(launcher)
    WorkerStarter(descriptor, obstacle, import_s).serve()


class WorkerStarter:
    """Starts workers and reports their ends. `obstacle`: why it must spawn them; "": it forks."""

    def __init__(self, descriptor: int, obstacle: str = "", import_s: float = 0.0) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._how = {"obstacle": obstacle, "import_s": import_s}
        self._reports: dict[int, int] = {}  # process id -> its pipe's end

    def serve(self) -> NoReturn:
        child_ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for source in (self._socket.fileno(), child_ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if child_ended in ready:
                    os.read(child_ended, 1 << 10)
                    self._report_ends()
                if self._socket.fileno() in ready:
                    data, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST_ORDER, 1)
                    if not data:
                        os._exit(0)
                    self._start_worker(json.loads(data), descriptors[0], [selector.fileno(), child_ended, wake])

    def _start_worker(self, order: dict[str, Any], report: int, own: list[int]) -> None:
        os.set_inheritable(report, False)
        try:
            if self._how["obstacle"]:
                pid = _spawn_worker(order, report)
            elif not (pid := os.fork()):
                self._become_worker(order, report, own)
        except OSError as error:
            _write_report(report, {"error": error.strerror})
            os.close(report)
            return
        self._reports[pid] = report
        _write_report(report, {"pid": pid, **self._how})

    def _become_worker(self, order: dict[str, Any], report: int, own: list[int]) -> NoReturn:
        code = 1
        try:
            server = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._socket.close()
            for descriptor in (*own, *self._reports.values()):
                os.close(descriptor)
            os.environ.update(order["variables"])
            worker_entry.enter(server, report, *order["arguments"])
            code = 0
        except BaseException:  # noqa: BLE001 (what leaves a worker's function must not go on as a fork server)
            traceback.print_exc()
        finally:
            os._exit(code)

    def _report_ends(self) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (report := self._reports.pop(pid, None)) is not None:
                _write_report(report, {"code": os.waitstatus_to_exitcode(status)})
                os.close(report)


def _spawn_worker(order: dict[str, Any], report: int) -> int:
    command = [sys.executable, "-P", "-c", _WORKER, str(os.getpid()), str(report), *order["arguments"]]
    os.set_inheritable(report, True)
    try:
        return os.posix_spawn(sys.executable, command, {**os.environ, **order["variables"]}, setsigdef=[signal.SIGCHLD])
    finally:
        os.set_inheritable(report, False)


def _write_report(report: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher's thread gave up
        os.write(report, json.dumps(message).encode() + b"\n")


def _leave_stop_signals(launcher: int) -> None:
    # A scheduler signals every process at once, and half a gang that dies by signal cannot save: workers leave when the
    # launcher publishes a phase.
    for number in (*STOP_SIGNALS, worker_entry.STACKS_SIGNAL):  # children inherit this until they install handlers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher started us with them blocked
    die_with_parent(launcher)


def _import_all() -> None:
    gc.disable()
    with variables_set(_NO_AUTOLOAD):
        for name in LIBRARIES:
            _import(name)
    # If torch_npu is installed, transformers imports it (`is_torch_npu_available`), and workers' modules import
    # transformers. torch_npu must not be imported before a fork, so leave these to the workers.
    has_npu = importlib.util.find_spec("torch_npu") is not None
    for name in () if has_npu else MODELS:
        _import(name)
    for package in OWN_PACKAGES[:-1] if has_npu else OWN_PACKAGES:
        for name in _modules(package):
            _import(name)


def _modules(package: str) -> list[str]:
    """Return the dotted names of a package and all of its submodules."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    names = [package]
    for module in pkgutil.iter_modules(spec.submodule_search_locations, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        names += _modules(module.name) if module.ispkg else [module.name]
    return [name for name in names if name not in _NEVER]


def find_obstacle() -> str:
    """Return what a forked child would inherit but could not use: threads, devices, single-role libraries; "": none."""
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    found = [f"{num_threads} threads ({_other_threads()})"] if num_threads > 1 else []
    prefixes = tuple(f"/dev/{vendor.files}" for vendor in vendors().values() if vendor.files)
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            path = str(descriptor.readlink())
            found += [f"{path} open"] if path.startswith(prefixes) else []
    found += [f"{name} imported" for name in ("vllm", "torch_npu") if name in sys.modules]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("CUDA initialised")
    return ", ".join(found)


def _other_threads() -> str:
    """Return the names of the other threads; native ones by the kernel's name."""
    ours = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        if number != threading.get_native_id():
            with contextlib.suppress(OSError):  # it has ended
                names.append(ours.get(number) or (task / "comm").read_text().strip())
    return ", ".join(sorted(names))


def _import(name: str) -> None:
    # A failure is left to the worker that needs the module: it then fails with its own log.
    try:
        importlib.import_module(name)
    except ConfigError:  # the library of an extra is not installed
        return
    except Exception:  # noqa: BLE001 (third-party code; an optional library must not kill the fork server)
        sys.stderr.write(f"preload: {name} cannot be imported\n{traceback.format_exc()}")
