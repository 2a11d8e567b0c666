"""A child process that answers JSON lines: request on its stdin, answer on its stdout. For other interpreters."""

import json
import os
import selectors
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_END_TIMEOUT_S = 30.0


class JsonProcess:
    """One process; a context manager that ends it by its id."""

    def __init__(self, command: Sequence[str], *, directory: Path, log: Path, start_timeout_s: float = 180.0) -> None:
        """Start it and wait for its first line.

        Args:
            command: argv.
            directory: where it runs.
            log: takes its stderr.
            start_timeout_s: for the first line.
        """
        self._log = log
        self._name = " ".join(command)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=directory, env=environment
            )
        self.hello = self._hear(start_timeout_s)

    def ask(self, request: dict[str, Any], *, timeout_s: float = 120.0) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear(timeout_s)

    def close(self) -> None:
        """Let it leave by itself, else kill it. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "JsonProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self._process.kill()
                raise SystemExit(f"{self._name}: silent for {timeout_s:g} s; see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with {self._process.wait()}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer
