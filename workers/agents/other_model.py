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
from workers.agents.messages import Message
from workers.settings.openai import read_api_key
from workers.settings.rollout import ServedModelConfig

if TYPE_CHECKING:
    import aiohttp

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
            raise self._failed(f"answered what is no chat completion: {said}") from error

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
