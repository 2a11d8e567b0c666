"""What the fork server runs when it starts: it ties itself to the launcher, then imports what workers need.

Only `multiprocessing.forkserver` imports it, as `launcher.process.fork_server` tells it to. It imports and does nothing
else: no thread may start here, because a forked child inherits locks but not the threads that hold them.
"""

import gc
import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import traceback

from asyncflow.process import STOP_SIGNALS, die_with_parent
from launcher.process import worker_entry
from launcher.process.fork_server import LAUNCHER_VARIABLE, LOG_VARIABLE

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
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
OWN_PACKAGES = ("asyncflow", "tq", "weightsync", "workers")


def prepare() -> None:
    """Detach from the terminal, die with the launcher, import."""
    os.setpgid(0, 0)
    for number in (*STOP_SIGNALS, worker_entry.STACKS_SIGNAL):  # children inherit it, until they are ready for more
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher blocked them until now
    log = os.open(os.environ.pop(LOG_VARIABLE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    die_with_parent(int(os.environ.pop(LAUNCHER_VARIABLE)))
    os.environ.pop("PYTHONSAFEPATH", None)  # the server's own path is set; a user's subprocesses choose for themselves
    worker_entry.remember_fork_server()
    gc.disable()
    for name in LIBRARIES:
        _import(name)
    for package in OWN_PACKAGES:
        for name in _modules(package):
            _import(name)
    gc.collect()
    gc.freeze()  # the collector in a child does not touch, and so copy, the pages that all of them share
    gc.enable()


def _modules(package: str) -> list[str]:
    """Return the dotted names of a package and all that is below it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    names = [package]
    for module in pkgutil.iter_modules(spec.submodule_search_locations, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        names += _modules(module.name) if module.ispkg else [module.name]
    return names


def _import(name: str) -> None:
    """Import `name`. A failure is left to the worker that needs the module, which then fails with its own log."""
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 (third-party code at import; the fork server must not die of an optional one)
        sys.stderr.write(f"preload: {name} cannot be imported\n{traceback.format_exc()}")


prepare()
