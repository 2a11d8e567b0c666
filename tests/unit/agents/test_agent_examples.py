"""The shipped agents, at a gateway whose model calls tools as they expect."""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.scripted_sessions import DEADLINE_S, ScriptedSessions, completion, multiplying, serving
from workers.agents.turns import ChatRequest, Reply

EXAMPLES = Path(__file__).parents[3] / "examples"
TASK = {"question": "What is 37 * 64?", "answer": "2368"}


def calling_shell(request: ChatRequest) -> Reply:
    """Run one command, look at what one cannot run, then answer."""
    num_results = sum(message["role"] == "tool" for message in request.messages)
    if num_results < 2:
        return completion("", (f"call_{num_results}", "shell", ('{"command": "echo $((37*64))"}', "{")[num_results]))
    return completion(f"It is {request.messages[2]['content'].strip()}")


@pytest.mark.parametrize(("answer", "reward"), [("2368", 1.0), ("2369", 0.0)])
def test_openai_agent_is_rewarded_for_the_right_answer(answer: str, reward: float) -> None:
    spec = importlib.util.spec_from_file_location("openai_agent", EXAMPLES / "openai_agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    async def body() -> float:
        async with serving(ScriptedSessions(multiplying)) as gateway:
            task = {**TASK, "answer": answer}
            return float(await module.agent(task, f"{gateway.base_url}/v1", gateway.open()))

    assert asyncio.run(asyncio.wait_for(body(), DEADLINE_S)) == reward


def test_shell_agent_writes_its_reward(tmp_path: Path) -> None:
    sessions = ScriptedSessions(calling_shell)

    async def body() -> int:
        async with serving(sessions) as gateway:
            environment = {
                "PATH": os.defpath,
                "ASYNCFLOW_TASK": json.dumps(TASK),
                "ASYNCFLOW_RESULT": str(tmp_path / "result.json"),
                "OPENAI_BASE_URL": f"{gateway.base_url}/v1",
                "OPENAI_API_KEY": gateway.open(),
            }
            program = EXAMPLES / "agent_command" / "shell_agent.py"
            process = await asyncio.create_subprocess_exec(sys.executable, str(program), env=environment)
            return await process.wait()

    assert asyncio.run(asyncio.wait_for(body(), DEADLINE_S)) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == {"reward": 1.0}
    results = [message["content"] for message in sessions.requests[-1].messages if message["role"] == "tool"]
    assert results[0] == "2368\n"
    assert results[1].startswith("error: ")
