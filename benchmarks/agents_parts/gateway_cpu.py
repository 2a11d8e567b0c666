"""Part `gateway_cpu_ms`: processor time of the gateway per turn, in ms.

The gateway and a session service whose turns take 100 ms run in this process; 32 agents of the `openai` client with
histories of some 2,000 tokens run in another one, which is this file with `--agents`.
"""

import asyncio
import json
import sys
import time
from typing import Any

from workers.agents.gateway import Gateway
from workers.agents.messages import Message
from workers.agents.requests import ChatRequest, Completion

_SESSIONS = 32
_TURNS = 24
_WARM_UP_TURNS = 2
_TURN_S = 0.1
_HISTORY_MESSAGES = 20
_WORDS = 100  # per message; 20 x 100 words are some 2,000 tokens
_REPLY = "the quick brown fox jumps over a lazy dog and asks for a tool; " * 4


def measure() -> dict[str, float]:
    """Return `gateway_cpu_ms`, and what it was measured with."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    sessions = _Sessions()
    gateway = Gateway(sessions)
    await gateway.start()
    try:
        keys = [gateway.open() for _ in range(_SESSIONS)]
        plan = {"url": f"{gateway.base_url}/v1", "keys": keys}
        agents = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--agents", stdin=asyncio.subprocess.PIPE
        )
        await agents.communicate(json.dumps(plan).encode())
        ended_s = time.process_time()
    finally:
        await gateway.stop()
    if agents.returncode or sessions.began_s is None:
        raise RuntimeError(f"the agents ended with exit code {agents.returncode}")
    num_turns = sessions.num_turns - sessions.num_warm_up
    return {
        "gateway_cpu_ms": 1e3 * (ended_s - sessions.began_s) / num_turns,
        "gateway_turns": num_turns,
        "gateway_request_bytes": len(json.dumps(_history())),
    }


class _Sessions:
    """Turns of 100 ms; the time counts from the end of the warm-up."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.num_warm_up = _SESSIONS * _WARM_UP_TURNS
        self.began_s: float | None = None

    async def complete(self, key: str, request: ChatRequest) -> Completion:
        if self.num_turns == self.num_warm_up:
            self.began_s = time.process_time()
        self.num_turns += 1
        await asyncio.sleep(_TURN_S)
        function = {"name": "tool", "arguments": '{"a": 1}'}
        call = {"id": f"call_{self.num_turns}", "type": "function", "function": function}
        message: Message = {"role": "assistant", "content": _REPLY, "tool_calls": [call]}
        return Completion(message, "tool_calls", 2000, 64, [1] * 64, [-1.0] * 64)

    def count(self, key: str, request: ChatRequest) -> int:
        return 2000


def _history() -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": f"{place} word" * _WORDS} for place in range(_HISTORY_MESSAGES)]


async def _run_agents() -> None:
    import openai

    plan, history = json.load(sys.stdin), _history()

    async def run(key: str) -> None:
        async with openai.AsyncOpenAI(base_url=plan["url"], api_key=key) as client:
            messages = history
            for _ in range(_TURNS + _WARM_UP_TURNS):
                completion = await client.chat.completions.create(model="policy", messages=messages)
                reply = completion.choices[0].message
                assert reply.tool_calls
                result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "1"}
                messages = [*history, reply, result]

    await asyncio.gather(*map(run, plan["keys"]))


if __name__ == "__main__":
    if "--agents" in sys.argv:
        asyncio.run(_run_agents())
    else:
        print(json.dumps(measure(), indent=1))
