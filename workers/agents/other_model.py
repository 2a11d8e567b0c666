"""Models that rollouts query but do not train: a judge, an opponent (`rollout.models`). Torch-free.

Any server with OpenAI's chat completions will do. The rollout's process sends the requests, so they end with a rollout
whose time is up.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncflow.errors import ConfigError, UserCodeFailed, one_line
from workers.agents.turns import Message, Utterance
from workers.settings.openai import read_api_key
from workers.settings.rollout import ServedModelConfig

if TYPE_CHECKING:
    import aiohttp

_NO_ANSWER = 0
_PASSING = frozenset({_NO_ANSWER, 408, 429, *range(500, 600)})
_LONGEST_PAUSE_S = 30.0
_SHOWN = 300


class OtherModel:
    """One of `context.models`; used in one event loop. `settings`: a `ServedModelConfig`, as sent by another process.
    Raises ConfigError if the variable with the key is not set."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._what = f"rollout.models.{name}"
        self._config = config = ServedModelConfig.model_validate(settings)
        field, variable = f"{self._what}.api_key_variable", config.api_key_variable
        self._key = read_api_key(variable, field) if variable else ""
        if variable and not self._key:
            raise ConfigError(f"{field}: the environment has no {variable}; export it, or leave this out")
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, messages: Sequence[Message], **fields: Any) -> Utterance:
        """Have the model reply to a conversation; nothing is appended.

        `fields`: more fields of the request, e.g. `temperature=0`; they override the configured `options`. Raises
        UserCodeFailed if there is no reply, or an error, after all retries.
        """
        body = {"model": self._config.model, **self._config.options, **fields, "messages": list(messages)}
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S))
            status, said = await self._post_request(body)
            if status not in _PASSING:
                break
        if status != 200:
            how = "does not answer" if status == _NO_ANSWER else f"answered {status}"
            raise self._make_failure(f"{how}: {said}" + (f" (asked {attempt + 1} times)" if attempt else ""))
        try:
            choice = json.loads(said)["choices"][0]
            message = {name: value for name, value in choice["message"].items() if value is not None}
            return Utterance({"content": "", **message}, str(choice.get("finish_reason")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise self._make_failure(f"answered with something that is not a chat completion: {said}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post_request(self, body: Mapping[str, Any]) -> tuple[int, str]:
        """Return (status, body), or (`_NO_ANSWER`, reason)."""
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

    def _make_failure(self, how: str) -> UserCodeFailed:
        # A server may repeat the key that it refuses.
        shown = " ".join((how.replace(self._key, "***") if self._key else how).split())
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        return UserCodeFailed(f"{self._what} ({self._config.base_url}): {shown}")
