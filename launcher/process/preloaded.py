"""What the fork server runs when it starts: it ties itself to the launcher, then imports what workers need.

Only `multiprocessing.forkserver` imports it, at the request of `launcher.process.fork_server`. It must not start a
thread: a forked child inherits locks, but not the threads that hold them.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import sys
import threading
import traceback
from pathlib import Path

from asyncflow.errors import ConfigError, one_line
from asyncflow.process import STOP_SIGNALS, die_with_parent, variables_set
from asyncflow.vendors import vendors
from launcher.process import worker_entry
from launcher.process.fork_server import LAUNCHER_VARIABLE, LOG_VARIABLE, error_file

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


def prepare() -> None:
    """Detach from the terminal, tie this process to the launcher, import. Errors are recorded for the launcher."""
    log_file = Path(os.environ.pop(LOG_VARIABLE))
    try:
        _prepare(log_file)
    except BaseException as error:
        said = {"error": one_line(error), "final": isinstance(error, ConfigError)}
        with contextlib.suppress(OSError):
            error_file(log_file, str(os.getpid())).write_text(json.dumps(said))
        raise


def _prepare(log_file: Path) -> None:
    # A Ctrl-C in the terminal must reach the launcher alone.
    os.setpgid(0, 0)
    # A scheduler signals every process at once, and half a gang that dies by signal cannot save: workers leave when the
    # launcher publishes a phase.
    for number in (*STOP_SIGNALS, worker_entry.STACKS_SIGNAL):  # children inherit this until they install handlers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher started us with them blocked
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    die_with_parent(int(os.environ.pop(LAUNCHER_VARIABLE)))
    os.environ.pop("PYTHONSAFEPATH", None)  # our path is already set; users' subprocesses choose for themselves
    worker_entry.remember_fork_server()
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
    check_forkable()
    gc.collect()
    gc.freeze()  # so that no child's collector touches, and thereby copies, the shared pages
    gc.enable()


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


def check_forkable() -> None:
    """Raise ConfigError for what a forked child inherits but cannot use: threads, devices, single-role libraries."""
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
    if found:
        raise ConfigError(
            f"this process cannot be forked from: {', '.join(found)}; leave out what Python runs as it starts "
            f"(sitecustomize, .pth files, a profiler), or the library that does so when it is imported"
        )


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
    except Exception:  # noqa: BLE001 (third-party code; an optional library must not kill the fork server)
        sys.stderr.write(f"preload: {name} cannot be imported\n{traceback.format_exc()}")


prepare()
