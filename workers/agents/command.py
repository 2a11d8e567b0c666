"""An agent that is any program: `rollout.agent_command`.

It reaches the policy through `OPENAI_BASE_URL` and `OPENAI_API_KEY`, finds its task (the data row, JSON) in the file
`ASYNCFLOW_TASK_FILE` (and in `ASYNCFLOW_TASK` if short enough), and has a directory of its own, removed at its end,
in `ASYNCFLOW_SCRATCH`. It should exit with code 0 and write `{"reward": 1.0}`, optionally with more numbers, to the
file `ASYNCFLOW_RESULT`; without that file, or with a null reward, `reward.function` scores the last reply. The end
of its output is logged at the 1st, 10th, 100th ... failure of a kind, and likewise for successful programs.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Self

from asyncflow.errors import UserCodeFailed, one_line, printable
from asyncflow.process import die_with_parent, limit_resources
from asyncflow.repeated import RepeatedWarnings
from workers.agents.wire import Setup, Start
from workers.calls.child_process import ended_how
from workers.rewards.base import reward_of

logger = logging.getLogger(__name__)

_RESULT = "result.json"
_MOST_OUTPUT_BYTES = 2**13
_MOST_SHOWN = 300
_CHUNK_BYTES = 2**16
_MOST_PIPE_BYTES = 2**20  # most bytes that a pipe can hold (Linux, `pipe-max-size`)
_warnings = RepeatedWarnings(logger)
_outputs = RepeatedWarnings(logger, logging.INFO)
_MOST_RESULT_BYTES = 2**20
_MOST_VARIABLE_BYTES = 2**17 - 1  # Linux's longest environment string (`MAX_ARG_STRLEN`): name, equals sign and value


async def run_command(setup: Setup, start: Start) -> tuple[float | list[float] | None, dict[str, float]]:
    """Run the program and return (reward, or one per turn; metrics); on cancellation, kill it and everything that it
    started. Raises UserCodeFailed if it cannot start, fails, or writes an unusable result."""
    command, scratch = setup.command, Path(start.scratch)
    task, task_file = start.rollout.task, scratch / "task.json"
    scratch.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(task_file.write_text, task)
    surroundings = {
        "OPENAI_BASE_URL": f"{start.base_url}/v1",
        "OPENAI_API_KEY": start.key,
        "ANTHROPIC_BASE_URL": start.base_url,
        "ANTHROPIC_API_KEY": start.key,
        "ASYNCFLOW_TASK_FILE": str(task_file),
        "ASYNCFLOW_SCRATCH": start.scratch,
        "ASYNCFLOW_RESULT": str(scratch / _RESULT),
    }
    if len(f"ASYNCFLOW_TASK={task}".encode()) <= _MOST_VARIABLE_BYTES:
        surroundings["ASYNCFLOW_TASK"] = task
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        limit_resources(memory_bytes=setup.max_memory_bytes, file_bytes=setup.max_file_bytes)

    with _Output() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.pipe,
                stderr=output.pipe,
                env=os.environ | surroundings,
                process_group=0,
                preexec_fn=prepare,
            )
        except OSError as error:
            raise UserCodeFailed(f"rollout.agent_command: {command[0]}: {error.strerror}") from error
        return await _follow(process, output, scratch)


async def _follow(
    process: asyncio.subprocess.Process, output: "_Output", scratch: Path
) -> tuple[float | list[float] | None, dict[str, float]]:
    try:
        code = await process.wait()
        said = output.end()
        if code:
            why = " for a file longer than rollout.max_file_gb" if code == -signal.SIGXFSZ else ""
            last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
            how = f"{ended_how(code)}{why}" + (f": {printable(last[-_MOST_SHOWN:])}" if last else "")
            _warnings.log_warning(f"rollout.agent_command {how}", said and f"; it said\n{said}")
            raise UserCodeFailed(f"rollout.agent_command {how}")
        if said:
            _outputs.log_warning("a program said", f"\n{said}")
        return await asyncio.to_thread(_result, scratch / _RESULT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and child processes that it left behind
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


class _Output:
    """A pipe that keeps only the end of a program's output, which may be endless."""

    def __enter__(self) -> Self:
        self._said = b""
        self._from, self.pipe = os.pipe()
        os.set_blocking(self._from, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._from, self._read_chunk)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._from)
        os.close(self._from)
        os.close(self.pipe)

    def _read_chunk(self) -> bool:
        """Read one chunk; return whether there was anything."""
        try:
            chunk = os.read(self._from, _CHUNK_BYTES)
        except BlockingIOError:
            chunk = b""
        self._said = (self._said + chunk)[-_MOST_OUTPUT_BYTES:]
        return bool(chunk)

    def end(self) -> str:
        """Return the end of the output of a program that has exited."""
        # Its output is in the pipe by now. Do not wait for end of file: children left behind may hold the pipe open.
        for _ in range(_MOST_PIPE_BYTES // _CHUNK_BYTES):
            if not self._read_chunk():
                break
        return self._said.decode(errors="replace")


def _result(path: Path) -> tuple[float | list[float] | None, dict[str, float]]:
    if not path.exists():
        return None, {}
    try:
        # The path may be anything, such as a pipe without a writer or an endless device.
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            text = file.read(_MOST_RESULT_BYTES + 1)
        result = json.loads(text) if 0 < len(text) <= _MOST_RESULT_BYTES else None
        if not isinstance(result, dict):
            wanted = f"a file of at most {_MOST_RESULT_BYTES} bytes with an object of numbers"
            raise UserCodeFailed(f"write {wanted}, not {text[:40]!r}")
        return reward_of(result)
    except UserCodeFailed as error:
        raise UserCodeFailed(f"rollout.agent_command: its result cannot be used: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserCodeFailed(f"rollout.agent_command: its result is not JSON: {one_line(error)}") from error
