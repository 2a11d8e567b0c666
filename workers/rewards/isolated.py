"""Built-in rewards that may hang inside native code, in processes of their own: a symbolic comparison, a regular
expression. A deadline then costs one answer, and the process that missed it; nobody else waits, not even for Python's
lock.

    score thread    ask a child that is idle, or a new one --- JSON line ---> child computes
                    wait, until the deadline               <-- JSON line ---
                    too late: kill it

Children end with their parent. Torch-free.
"""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
from typing import Any

from asyncflow.awake import awake_slices
from asyncflow.errors import UserCodeFailed
from workers.rewards.base import Score
from workers.rewards.config import RewardConfig
from workers.user_function import excerpt

START_TIMEOUT_S = 120.0
"""How long a child may take to import what it needs (s)."""
_CHUNK = 2**16


class IsolatedReward:
    """A reward function of `workers.rewards.child`. Thread-safe: as many children as callers at a time."""

    def __init__(self, config: RewardConfig) -> None:
        """Args:
        config: names the function and its deadline.
        """
        self._name = config.function
        self._timeout_s = config.timeout_s
        self._settings = json.dumps({"function": config.function, "pattern": config.pattern})
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._closed = False

    def __call__(self, prompt: str, response: str, answer: str, /) -> Score:
        """Score one answer.

        Raises:
            UserCodeFailed: it took too long, or its process died.
        """
        child = self._child()
        try:
            correct = child.ask({"response": response, "answer": answer}, self._timeout_s)
        except TimeoutError:
            child.kill()
            raise UserCodeFailed(
                f"reward.function: {self._name} took longer than reward.timeout_s = {self._timeout_s:g} s on response "
                f"{excerpt(response)}"
            ) from None
        except EOFError:
            child.kill()
            raise UserCodeFailed(
                f"reward.function: {self._name}: its process ended on response {excerpt(response)}; its last words are "
                f"in this log"
            ) from None
        self._idle.put(child)
        if self._closed:
            self.close()
        return Score(float(correct), bool(correct))

    def close(self) -> None:
        """End the children that have nothing to do, now or later. Idempotent."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().kill()

    def _child(self) -> "_Child":
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            child = _Child(self._settings)
        try:
            child.wait_until_ready(START_TIMEOUT_S)
        except (TimeoutError, EOFError):
            child.kill()
            raise UserCodeFailed(f"reward.function: {self._name}: its process did not start; see this log") from None
        return child


class _Child:
    """One process."""

    def __init__(self, settings: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.rewards.child", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rest = b""

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for its first line."""
        self._line(timeout_s)

    def ask(self, question: dict[str, str], timeout_s: float) -> Any:
        """Return what it answers.

        Raises:
            TimeoutError: not in time.
            EOFError: it died.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return json.loads(self._line(timeout_s))

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was not written yet
                continue

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        slices, source = awake_slices(timeout_s), self._process.stdout.fileno()
        while b"\n" not in self._rest:
            slice_s = next(slices, None)
            if slice_s is None:
                raise TimeoutError
            if not select.select([source], [], [], slice_s)[0]:
                continue
            data = os.read(source, _CHUNK)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line
