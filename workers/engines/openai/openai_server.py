"""A client of one server that speaks OpenAI's completions API: streams responses token by token, and posts other
requests.

Every error names the server and its reply; its class says whether a retry may help. Used by the `openai` engine inside
an event loop; knows nothing of runs.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec

from asyncflow.errors import EngineFailed
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, load_function
from workers.settings.openai import UPDATE_ARGUMENTS, OpenAIConfig

logger = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(logging.WARNING)  # otherwise it logs two lines per response

T = TypeVar("T")

_CONNECT_S = 10.0
_LONGEST_PAUSE_S = 60.0
_SHOWN = 300
# Reasons of complete responses; others, such as `abort`, mean that the server dropped the response.
_ENDS = ("stop", "length")


class ServerBusy(Exception):
    """A server failed in a way that may pass."""


class ServerAway(ServerBusy):
    """There is no connection to a server: it ended, or is still starting."""


class RequestRefused(EngineFailed):
    """A server does not support this request, or its form; a retry would not help."""


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _TokenLogProb(msgspec.Struct):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogProb] | None] | None = None


class _Scored(msgspec.Struct):
    choices: list[_ScoredChoice] = []


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightInfo(msgspec.Struct):
    weight_version: str


@dataclass(frozen=True)
class Completion:
    """What a server generated."""

    tokens: list[int]
    log_probs: list[float]  # one per token
    truncated: bool  # cut at `max_tokens`


class OpenAIServer:
    """A client of one server; created and used inside one event loop.

    Args:
        url: without `/v1`.
        api_key: "": send none.
        timeout_s: longest silence.
        retries: of a response.
        retry_pause_s: before the first retry; doubles with each further one.
    """

    def __init__(
        self, url: str, *, api_key: str, timeout_s: float, retries: int, retry_pause_s: float, num_connections: int
    ) -> None:
        self._url = url.rstrip("/")
        self._retries = retries
        self._retry_pause_s = retry_pause_s
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=num_connections, max_keepalive_connections=num_connections),
            trust_env=False,  # the environment's proxies are for other hosts
        )

    @property
    def url(self) -> str:
        return self._url

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists.
        Raises EngineFailed if it does not answer, or lists none."""
        listed = await self._retry_attempt(lambda: self._get_json("/v1/models", _Models), ServerBusy)
        if not listed.data:
            raise EngineFailed(f"openai.urls: {self._url} lists no models; name one in openai.model")
        return listed.data[0].id

    async def complete_prompt(
        self,
        body: Mapping[str, Any],
        progress: Callable[[], None],
        guard: Callable[[], AbstractAsyncContextManager[None]],
        *,
        is_over: Callable[[list[int], int], bool] = lambda tokens, since: False,
    ) -> Completion:
        """Return a response; retry if it breaks off.

        Args:
            body: of the request, without the fields that say how the response is returned.
            progress: called whenever tokens arrive.
            guard: entered for every attempt; raises ServerBusy on exit if the response does not count.
            is_over: (tokens so far, how many it has already seen) -> whether to end the response here. The closed
                connection tells the server.
        Raises:
            EngineFailed: the server refused, is gone, or does not return token ids.
        """
        whole = {**body, "stream": True, "return_token_ids": True, "logprobs": 0}

        async def attempt() -> Completion:
            async with guard():
                return await self._complete_once(whole, progress, is_over)

        return await self._retry_attempt(attempt, ServerBusy)

    async def score_prompt(self, model: str, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of a prompt's tokens after the first, by vLLM's `prompt_logprobs`.

        Raises:
            RequestRefused: the server does not give them.
            EngineFailed: it failed.
        """
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

        async def attempt() -> _Scored:
            response = await self._send_request("POST", "/v1/completions", body)
            return self._decode_json(response.content, _Scored, "/v1/completions")

        scored = await self._retry_attempt(attempt, ServerBusy)
        known = scored.choices[0].prompt_logprobs if scored.choices else None
        if known is None or len(known) != len(tokens):
            raise RequestRefused(f"openai: {self._url} does not return `prompt_logprobs`")
        found = [(one or {}).get(str(token)) for one, token in zip(known[1:], tokens[1:], strict=True)]
        values = [one.logprob for one in found if one is not None]
        if len(values) != len(found):
            raise RequestRefused(f"openai: {self._url} returns `prompt_logprobs` without the prompt's own tokens")
        return values

    async def when_there(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return an attempt's result; retry while there is no connection.
        Raises EngineFailed if the server stays away, or failed in another way."""
        try:
            return await self._retry_attempt(attempt, ServerAway)
        except ServerBusy as error:
            raise EngineFailed(str(error)) from error

    async def post_json(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> None:
        """Post JSON, without retries.

        Raises:
            EngineFailed: the server refused.
            ServerBusy: it failed, did not answer in time, or is away.
        """
        await self._send_request("POST", path, body, timeout_s=timeout_s)

    async def weights_mark(self) -> str:
        """Return the mark of the server's weights; vLLM's own if none was set. Raises ServerBusy."""
        return (await self._get_json("/weight_info", _WeightInfo)).weight_version

    async def close(self) -> None:
        await self._client.aclose()

    async def _retry_attempt(self, attempt: Callable[[], Awaitable[T]], passing: type[ServerBusy]) -> T:
        """Return an attempt's result; retry if it raises `passing`."""
        for pause_s in [*pauses(self._retries, self._retry_pause_s), None]:
            try:
                return await attempt()
            except passing as error:
                if pause_s is None:
                    raise EngineFailed(f"{error}; tried {self._retries + 1} times") from error
                logger.warning("%s; retrying", error)
                await asyncio.sleep(pause_s)
        raise AssertionError("the loop returns or raises")

    async def _complete_once(
        self, body: Mapping[str, Any], progress: Callable[[], None], is_over: Callable[[list[int], int], bool]
    ) -> Completion:
        tokens: list[int] = []
        log_probs: list[float] = []
        reason = None
        async with aclosing(self._stream_events("/v1/completions", body)) as received:
            async for event in received:
                num_seen = len(tokens)
                for choice in event.choices:
                    tokens += self._token_ids(choice)
                    log_probs += choice.logprobs.token_logprobs if choice.logprobs else ()
                    reason = choice.finish_reason or reason
                progress()
                # Leaving the loop closes the connection, which tells the server to stop drawing.
                if reason is None and is_over(tokens, num_seen):
                    reason = "stop"
                    break
        if reason not in _ENDS:
            raise ServerBusy(f"openai: {self._url} ended a response in the middle ({reason or 'no finish_reason'})")
        if len(log_probs) != len(tokens):
            raise EngineFailed(
                f"openai: {self._url} returned {len(log_probs)} log-probabilities for {len(tokens)} tokens"
            )
        return Completion(tokens, log_probs, truncated=reason == "length")

    def _token_ids(self, choice: _Choice) -> list[int]:
        if choice.token_ids is None:
            raise EngineFailed(
                f"openai: {self._url} does not return token ids (`return_token_ids`), which training needs; use a "
                f"server that does, such as vLLM's"
            )
        return choice.token_ids

    async def _stream_events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[_Event, None]:
        try:
            async with self._client.stream("POST", self._url + path, json=dict(body)) as response:
                if not response.is_success:
                    await response.aread()
                    self._check_response(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = self._decode_json(data.encode(), _Event, path)
                    if event.error is not None:
                        raise ServerBusy(f"openai: {self._url} failed: {_short(str(event.error))}")
                    yield event
        except httpx2.HTTPError as error:
            raise self._connection_error(path, error) from error

    async def _get_json(self, path: str, kind: type[T]) -> T:
        return self._decode_json((await self._send_request("GET", path, None)).content, kind, path)

    async def _send_request(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float | None = None
    ) -> httpx2.Response:
        timeout = httpx2.USE_CLIENT_DEFAULT if timeout_s is None else httpx2.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            response = await self._client.request(method, self._url + path, json=body, timeout=timeout)
        except httpx2.HTTPError as error:
            raise self._connection_error(path, error) from error
        self._check_response(response)
        return response

    def _decode_json(self, data: bytes, kind: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            raise EngineFailed(f"openai: {self._url}{path} answered in an unexpected form: {error}") from error
        except msgspec.DecodeError as error:
            raise ServerBusy(f"openai: {self._url}{path} sent invalid JSON: {error}") from error

    def _check_response(self, response: httpx2.Response) -> None:
        if response.is_success:
            return
        said = f"openai: {response.url} answered {response.status_code} {_short(response.text)}".rstrip()
        # Overload and server errors may pass; any other refusal is final.
        if response.status_code == HTTPStatus.TOO_MANY_REQUESTS or response.is_server_error:
            raise ServerBusy(said)
        raise RequestRefused(said)

    def _connection_error(self, path: str, error: httpx2.HTTPError) -> ServerBusy:
        if isinstance(error, httpx2.TimeoutException):
            return ServerBusy(f"openai: {self._url}{path} did not answer in time ({type(error).__name__})")
        return ServerAway(f"openai: {self._url}{path} cannot be reached ({type(error).__name__}: {error})")


def pauses(retries: int, first_s: float) -> list[float]:
    """Return the pauses (s) before each retry: each twice as long as the last, up to a minute."""
    doublings = [min(number, 30) for number in range(retries)]
    return [min(first_s * 2**number, max(first_s, _LONGEST_PAUSE_S)) for number in doublings]


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


# How servers take new weights: through vLLM's own requests, or the user's function `openai.update`. Torch-free.
#
#     take        pause, reload from a directory, set a mark, resume
#     unchanged   ask for the mark after a response: a restarted server has lost it, and takes the weights again
#
# A restarted server answers with the weights that it was started with. The mark is vLLM's version of the weights and
# is lost together with them: a server that still has it after a response had the right weights throughout.


class ServedWeights:
    """The weights of one vLLM server that allows development requests; created and used inside one event loop.

    `timeout_s` limits each request of `take_weights`.
    """

    def __init__(self, server: OpenAIServer, *, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._directory: Path | None = None
        self._mark: str | None = None
        self._taking = asyncio.Lock()

    async def take_weights(self, directory: Path) -> None:
        """Have the server read weights and drop its prompt cache; wait for a server that is away.
        Raises EngineFailed, which says what to do, if it did not take them."""
        try:
            self._mark = await self._server.when_there(lambda: self._reload_weights(directory))
        except EngineFailed as error:
            raise EngineFailed(
                f"{error}; a vLLM server with VLLM_SERVER_DEV_MODE=1 takes weights from {directory}; for others set "
                f"openai.update to a function of yours"
            ) from error
        self._directory = directory

    @asynccontextmanager
    async def ensure_unchanged(self) -> AsyncIterator[None]:
        """Ensure that a response requested inside was drawn from the weights taken last.

        Raises:
            ServerBusy: on exit, if it may not have been; the server has taken the weights again.
            EngineFailed: the server did not take them.
        """
        async with self._taking:  # do not start a response while weights are taken: it would not count
            mark = self._mark
        yield
        if mark is None or await self._server.weights_mark() == mark:
            return
        async with self._taking:
            # Several responses may notice at once; only the first one restores the weights.
            if self._mark == mark and self._directory is not None:
                logger.warning("openai: %s has lost its weights and takes them again", self._server.url)
                await self.take_weights(self._directory)
        raise ServerBusy(
            f"openai: {self._server.url} had other weights than it was given: it was restarted, or somebody else "
            f"updated it"
        )

    async def _reload_weights(self, directory: Path) -> str | None:
        """Return the mark; None: an older vLLM, which keeps none."""
        post = partial(self._server.post_json, timeout_s=self._timeout_s)
        await post("/pause?mode=abort&clear_cache=true", {})
        await post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        mark: str | None = secrets.token_hex(8)
        try:
            await post("/update_weight_version", {"new_version": mark})
        except RequestRefused:
            mark = None
        await post("/resume", {})
        return mark


def open_updates(config: OpenAIConfig) -> CallPool:
    """Return the pool that calls `openai.update`, one update at a time.
    Raises ConfigError if the function cannot be imported."""
    pool = CallPool(
        Entry("workers.engines.openai.openai_server:update", {"name": config.update}),
        what=f"openai.update: {config.update}",
        limit="openai.update_timeout_s",
        timeout_s=config.update_timeout_s,
        concurrency=1,
    )
    pool.until_ready()
    return pool


def update(name: str) -> Callee:
    """Import the function in the pool's child; it gets a `Path`, and its result is ignored."""
    function = load_function(name, field="openai.update", arguments=UPDATE_ARGUMENTS)
    return Callee(function, takes=lambda texts: [Path(texts[0])], gives=lambda value, texts: None)
