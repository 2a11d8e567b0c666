"""The gateway's keys, retries, forks, cancelled turns and streams, by plain HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.support.scripted_sessions import DEADLINE_S, ScriptedSessions, completion, serving
from workers.agents.gateway import Gateway
from workers.agents.turns import ChatRequest, Reply

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
RETRY = {"x-stainless-retry-count": "1"}
Body = Callable[["Agent", ScriptedSessions, Gateway], Awaitable[None]]


class Agent:
    """Asks for chat completions with one key."""

    def __init__(self, http: aiohttp.ClientSession, gateway: Gateway) -> None:
        self.http = http
        self.url = gateway.base_url
        self.key = gateway.open()

    async def ask(self, body: Any = HELLO, *, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    def asking(self, **headers: str) -> "asyncio.Task[tuple[int, Any]]":
        """Ask in the background."""
        return asyncio.create_task(self.ask(**headers))


def run(body: Body, **settings: Any) -> None:
    """Run a test's body; turns are told apart by their texts: 1, 2, ..."""

    async def connected() -> None:
        sessions = ScriptedSessions(lambda _: completion(str(len(sessions.requests))))
        async with serving(sessions, **settings) as gateway, aiohttp.ClientSession() as http:
            await body(Agent(http, gateway), sessions, gateway)

    asyncio.run(asyncio.wait_for(connected(), DEADLINE_S))


def text(answer: tuple[int, Any]) -> str:
    """Return what an answer says."""
    status, body = answer
    assert status == 200, body
    said = body["choices"][0]["message"]["content"]
    assert isinstance(said, str)
    return said


def test_key_reaches_its_own_session_until_it_is_closed() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        first, second = agent.key, gateway.open()
        assert first != second
        await agent.ask()
        agent.key = second
        await agent.ask()
        assert sessions.keys == [first, second]
        gateway.close(second)
        gateway.close(second)
        for key in ("", "unknown", f"{second[:-1]}x", "sk-\xe9"):
            agent.key = key
            status, answer = await agent.ask()
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        agent.key = second
        status, answer = await agent.ask()
        assert (status, answer["error"]["code"]) == (410, "session_gone")
        assert len(sessions.requests) == 2

    run(body)


def test_gateway_in_the_place_of_another_one_knows_its_keys() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        await gateway.stop()
        async with serving(sessions, seal=b"seal", port=gateway.port) as next_one:
            assert (await agent.ask())[0] == 410
            agent.key = next_one.open()
            assert (await agent.ask())[0] == 200
            async with serving(sessions, seal=b"other", port=next_one.port) as beside:
                assert beside.port != next_one.port
                agent.url = beside.base_url
                assert (await agent.ask())[0] == 401

    run(body, seal=b"seal")


def test_same_body_after_its_answer_is_a_fork() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        answers = [await agent.ask(), await agent.ask()]
        assert [text(answer) for answer in answers] == ["1", "2"]
        assert answers[0][1]["id"] != answers[1][1]["id"]

    run(body)


def test_retry_gets_the_first_answer() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        first = await agent.ask()
        assert await agent.ask(**RETRY) == first
        other = {"messages": [{"role": "user", "content": "other"}]}
        assert text(await agent.ask(other, **RETRY)) == "2"  # its first attempt never came here

    run(body)


def test_idempotency_key_names_one_turn() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        one, two = {"Idempotency-Key": "one"}, {"Idempotency-Key": "two"}
        assert [text(await agent.ask(**key)) for key in (one, two, one)] == ["1", "2", "1"]
        assert len(sessions.requests) == 2
        status, answer = await agent.ask({**HELLO, "max_tokens": 5}, **one)
        assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")

    run(body)


def test_same_body_that_is_unanswered_waits_for_the_one_answer() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        sessions.open.clear()
        asked = [agent.asking(), agent.asking(), agent.asking(**{"Idempotency-Key": "another turn"})]
        await sessions.begun.acquire()
        await sessions.begun.acquire()
        sessions.open.set()
        first, second, third = await asyncio.gather(*asked)
        assert first == second
        assert third[1]["id"] != first[1]["id"]
        assert len(sessions.requests) == 2

    run(body)


def test_sessions_share_no_answers() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        await agent.ask()
        agent.key = gateway.open()
        assert text(await agent.ask(**RETRY)) == "2"

    run(body)


def test_answers_are_kept_for_retries_but_not_for_ever() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        bodies = [{**HELLO, "max_tokens": number + 1} for number in range(50)]
        for each in bodies:
            await agent.ask(each)
        assert text(await agent.ask(bodies[40], **RETRY)) == "41"
        assert text(await agent.ask(bodies[0], **RETRY)) == "51"

    run(body)


def test_failed_turn_is_drawn_again_by_its_retry() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        def fail(_: ChatRequest) -> Reply:
            raise ConnectionError("engine away")

        draw, sessions.draw = sessions.draw, fail
        async with agent.http.post(
            f"{agent.url}/v1/chat/completions", json=HELLO, headers={"Authorization": f"Bearer {agent.key}"}
        ) as answer:
            assert answer.status == 500
        sessions.draw = draw
        assert text(await agent.ask(**RETRY)) == "2"

    run(body)


def test_turn_of_a_client_that_left_is_cancelled_when_no_retry_comes() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        sessions.open.clear()
        leaving = agent.asking()
        await sessions.begun.acquire()
        leaving.cancel()
        await sessions.cancelled.acquire()
        sessions.open.set()
        assert text(await agent.ask(**RETRY)) == "2"

    run(body, retry_wait_s=0.0)


def test_retry_of_a_client_that_left_gets_the_turn_that_went_on() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        sessions.open.clear()
        leaving = agent.asking()
        await sessions.begun.acquire()
        leaving.cancel()
        retry = agent.asking(**RETRY)
        sessions.open.set()
        assert text(await retry) == "1"
        assert len(sessions.requests) == 1

    run(body)


def test_closing_a_session_cancels_its_turn() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        sessions.open.clear()
        asked = agent.asking()
        await sessions.begun.acquire()
        gateway.close(agent.key)
        await sessions.cancelled.acquire()
        assert (await asked)[0] == 410

    run(body)


def test_stream_that_waits_is_kept_alive_by_comments() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        sessions.open.clear()
        headers = {"Authorization": f"Bearer {agent.key}"}
        url = f"{agent.url}/v1/chat/completions"
        async with agent.http.post(url, json={**HELLO, "stream": True}, headers=headers) as answer:
            assert answer.content_type == "text/event-stream"
            for _ in range(2):
                assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            sessions.open.set()
            rest = await answer.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"content":"1"' in rest

    run(body, keep_alive_s=0.001)


@pytest.mark.parametrize(
    ("data", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[" * 100_000, 400, "JSON"),
        (b'{"messages": "\xff"}', 400, "JSON"),
        (b"[]", 400, "object"),
        (b"{}", 400, "messages"),
        (b" " * 200_000, 413, "Large"),
    ],
    ids=["cut", "nested", "no-utf8", "list", "empty", "large"],
)
def test_body_that_is_no_request_is_refused(data: bytes, status: int, word: str) -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        refused, answer = await agent.ask(data)
        assert refused == status
        assert word in answer["error"]["message"]

    run(body, max_body_bytes=150_000)


def test_unknown_path_is_no_server_error() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        status, answer = await agent.ask(path="/v1/embeddings")
        assert (status, answer["error"]["type"]) == (404, "not_found_error")

    run(body)


def test_it_listens_on_loopback_alone() -> None:
    async def body(agent: Agent, sessions: ScriptedSessions, gateway: Gateway) -> None:
        assert gateway.base_url.startswith("http://127.0.0.1:")

    run(body)
