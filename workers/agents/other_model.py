"""A model that rollouts ask and that is not trained: a judge, an opponent (`rollout.models`). Torch-free.

Any server with OpenAI's chat completions, of the user's or of a provider. The rollout's process asks it; a rollout
whose time is up takes its requests with it.
"""

import asyncio
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from asyncflow.extras import pip_line
from workers.agents.rendering import Message
from workers.settings.openai import read_api_key
from workers.settings.rollout import ServedModelConfig

if TYPE_CHECKING:
    import aiohttp
import contextlib
import io
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Self

from asyncflow.errors import printable
from asyncflow.process import die_with_parent, limit_resources
from asyncflow.repeated import RepeatedWarnings
from workers.agents.wire import Setup, Start
from workers.rewards.base import reward_of

_NO_ANSWER = 0
_PASSING = frozenset({_NO_ANSWER, 408, 429, *range(500, 600)})
_LONGEST_PAUSE_S = 30.0
_SHOWN = 300


@dataclass(frozen=True)
class Utterance:
    """What a model said.

    Attributes:
        message: as OpenAI's API has it.
        finish_reason: `stop`, `length` or `tool_calls`; other servers have more.
    """

    message: Message
    finish_reason: str

    @property
    def text(self) -> str:
        """The content, "" for none."""
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[Message]:
        """The calls of tools, as OpenAI's API has them."""
        return list(self.message.get("tool_calls") or ())


class OtherModel:
    """One of `context.models`; used in one event loop."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Read its key; nothing is asked yet.

        Args:
            name: among `rollout.models`.
            settings: a `ServedModelConfig`, as another process sends it.

        Raises:
            ConfigError: the key's variable is not set, or the HTTP client is not installed.
        """
        self._what = f"rollout.models.{name}"
        self._config = config = ServedModelConfig.model_validate(settings)
        field, variable = f"{self._what}.api_key_variable", config.api_key_variable
        self._key = read_api_key(variable, field) if variable else ""
        if variable and not self._key:
            raise ConfigError(f"{field}: the environment has no {variable}; export it, or leave this out")
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(f"{self._what} needs aiohttp, which is not installed; {pip_line('agents')}")
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, messages: Sequence[Message], **fields: Any) -> Utterance:
        """Have it reply to a conversation; nothing is appended.

        Args:
            messages: of the conversation.
            fields: more of the request, e.g. `temperature=0`; they go before the configuration's `options`.

        Raises:
            UserCodeFailed: it does not answer, or with an error, after as many retries as it is allowed.
        """
        body = {"model": self._config.model, **self._config.options, **fields, "messages": list(messages)}
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S))
            status, said = await self._ask(body)
            if status not in _PASSING:
                break
        if status != 200:
            how = "does not answer" if status == _NO_ANSWER else f"answered {status}"
            raise self._failed(f"{how}: {said}" + (f" (asked {attempt + 1} times)" if attempt else ""))
        try:
            choice = json.loads(said)["choices"][0]
            message = {name: value for name, value in choice["message"].items() if value is not None}
            return Utterance({"content": "", **message}, str(choice.get("finish_reason")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise self._failed(f"answered what is not a chat completion: {said}") from error

    async def close(self) -> None:
        """Close its connections; idempotent."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, body: Mapping[str, Any]) -> tuple[int, str]:
        """Return status and body; or `_NO_ANSWER`, and why."""
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = aiohttp.ClientTimeout(self._config.timeout_s)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=True)
        url = f"{self._config.base_url.rstrip('/')}/chat/completions"
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                return answer.status, await answer.text(errors="replace")
        except TimeoutError:
            return _NO_ANSWER, f"it took longer than timeout_s = {self._config.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return _NO_ANSWER, one_line(error)

    def _failed(self, how: str) -> UserCodeFailed:
        """Return the error; a server may repeat the key that it refuses."""
        shown = " ".join((how.replace(self._key, "***") if self._key else how).split())
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        return UserCodeFailed(f"{self._what} ({self._config.base_url}): {shown}")


# An agent that is any program: `rollout.agent_command`. Torch-free.
#
# It finds the policy by `OPENAI_BASE_URL` and `OPENAI_API_KEY`, its task (the data row, JSON) in the file
# `ASYNCFLOW_TASK_FILE`, in `ASYNCFLOW_TASK` too if that can hold it, and a directory of its own, removed at its end,
# in `ASYNCFLOW_SCRATCH`. It ends with code 0 and writes `{"reward": 1.0}`, maybe with more numbers, into the file
# `ASYNCFLOW_RESULT`; without one, or with null for the reward, `reward.function` scores the last reply. The end of
# what it prints goes into the log: at the 1st, 10th, 100th ... failure of a kind, and of those that did well the 1st,
# 10th, 100th ...

logger = logging.getLogger(__name__)

_RESULT = "result.json"
_MOST_OUTPUT_BYTES = 2**13
_MOST_SHOWN = 300
_CHUNK_BYTES = 2**16
_MOST_PIPE_BYTES = 2**20
"""What a pipe may hold (Linux, `pipe-max-size`)."""
_warnings = RepeatedWarnings(logger)
_outputs = RepeatedWarnings(logger, logging.INFO)
_MOST_RESULT_BYTES = 2**20
_MOST_VARIABLE_BYTES = 2**17 - 1
"""Linux takes no longer string of the environment (`MAX_ARG_STRLEN`): name, equals sign and value."""


async def run_command(setup: Setup, start: Start) -> tuple[float | None, dict[str, float]]:
    """Run the program; cancelled, it is killed with all that it started.

    Returns:
        Reward and metrics.

    Raises:
        UserCodeFailed: it cannot be started, fails, or writes no result that can be used.
    """
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
) -> tuple[float | None, dict[str, float]]:
    """Wait for the program's end; see `run_command`."""
    try:
        code = await process.wait()
        said = output.end()
        if code:
            why = " for a file longer than rollout.max_file_gb" if code == -signal.SIGXFSZ else ""
            last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
            how = f"{ended_how(code)}{why}" + (f": {printable(last[-_MOST_SHOWN:])}" if last else "")
            _warnings.warn(f"rollout.agent_command {how}", said and f"; it said\n{said}")
            raise UserCodeFailed(f"rollout.agent_command {how}")
        if said:
            _outputs.warn("a program said", f"\n{said}")
        return await asyncio.to_thread(_result, scratch / _RESULT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def ended_how(code: int) -> str:
    """Return how a process ended, from its exit code."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


class _Output:
    """A pipe for what a program prints, of which the end is kept: a program may print without an end."""

    def __enter__(self) -> Self:
        self._said = b""
        self._from, self.pipe = os.pipe()
        os.set_blocking(self._from, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._from, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._from)
        os.close(self._from)
        os.close(self.pipe)

    def _read(self) -> bool:
        """Take what is there, at most what the pipe holds; return whether there was anything."""
        try:
            chunk = os.read(self._from, _CHUNK_BYTES)
        except BlockingIOError:
            chunk = b""
        self._said = (self._said + chunk)[-_MOST_OUTPUT_BYTES:]
        return bool(chunk)

    def end(self) -> str:
        """Return the last that a program printed which has ended: all of that is in the pipe. What it left behind may
        hold the pipe open and print on, so no end is waited for."""
        for _ in range(_MOST_PIPE_BYTES // _CHUNK_BYTES):
            if not self._read():
                break
        return self._said.decode(errors="replace")


def _result(path: Path) -> tuple[float | None, dict[str, float]]:
    """Return what the program wrote, which may be anything: a pipe without a writer, say, or a disk's content."""
    if not path.exists():
        return None, {}
    try:
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
        raise UserCodeFailed(f"rollout.agent_command: its result is no JSON: {one_line(error)}") from error
