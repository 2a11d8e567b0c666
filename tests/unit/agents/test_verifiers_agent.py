"""The shipped agent on a taskset of `verifiers`, at a real gateway; `.ci/full` installs the package by itself."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_sessions import ScriptedSessions, completion, serving

pytest.importorskip("verifiers.v1", reason="pip install verifiers uv, in an environment of its own")
EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers_agent.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("verifiers_agent", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_taskset_asks_the_session_and_scores_its_reply(example: Any) -> None:
    sessions = ScriptedSessions(lambda request: completion("It is 2368."))
    rows = [example.Tasks().task(0, index) for index in (35, 36)]

    async def body() -> tuple[list[float], list[str]]:
        async with serving(sessions) as gateway:
            keys = [gateway.open() for _ in rows]
            calls = [example.agent(row, f"{gateway.base_url}/v1", key) for row, key in zip(rows, keys, strict=True)]
            return list(await asyncio.gather(*calls)), keys

    rewards, keys = asyncio.run(asyncio.wait_for(body(), 280))  # uv makes the harness's environment the first time
    assert rewards == [1.0, 0.0]
    assert sorted(sessions.keys) == sorted(keys)
    asked = {
        key: request.messages[-1]["content"] for key, request in zip(sessions.keys, sessions.requests, strict=True)
    }
    assert [asked[key].split("?")[0] for key in keys] == ["What is 37 * 64", "What is 38 * 64"]
