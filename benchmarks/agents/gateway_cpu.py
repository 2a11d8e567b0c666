"""Part `gateway_cpu_ms`: processor time of the gateway per turn, in ms.

The session service with its gateway runs in this process: HTTP, chat template, tree and record. What it asks for is
drawn in 100 ms. 32 agents of the `openai` client with histories of some 2,000 tokens run in another process, which is
this file with `--agents`.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workers.agents.service import Service
from workers.agents.wire import Begin, Draw, Drawn, FromService, ServiceReady, Setup, ToService

_ROOT = Path(__file__).resolve().parents[2]
_SESSIONS = 32
_TURNS = 24
_WARM_UP_TURNS = 2
_TURN_S = 0.1
_HISTORY_MESSAGES = 21
_WORDS = 20  # per message: 2,450 tokens in all of the small tokenizer here
_REPLY = 'the quick brown fox asks for a tool <tool_call>{"name": "tool", "arguments": {"a": 1}}</tool_call><|im_end|>'


def measure() -> dict[str, float]:
    """Return `gateway_cpu_ms`, and what it was measured with."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    from tests.support.chat_templates import tokenizer

    with tempfile.TemporaryDirectory() as directory:
        tokenizer("qwen2.5").save_pretrained(directory)
        end = tokenizer("qwen2.5").eos_token_id
        Path(directory, "config.json").write_text(json.dumps({"architectures": ["Qwen2"], "eos_token_id": end}))
        prompt = tokenizer("qwen2.5").apply_chat_template(_history(), add_generation_prompt=True)["input_ids"]
        engine: Any = _Engine(tokenizer("qwen2.5").encode(_REPLY, add_special_tokens=False))
        setup = Setup(
            model_dir=directory, renderer=None, function=None, agent="none:agent", command=[], tools=[],
            timeout_s=3600, max_turns=0, max_tokens=0, max_context=0, max_response_tokens=512, max_attempts=1,
            num_workers=0, scratch=directory + "/scratch",
        )  # fmt: skip
        service = Service(engine, setup)
        serving = asyncio.create_task(service.serve_engine())
        port = await engine.port
        while len(service._keys) < _SESSIONS:  # its agents are elsewhere, and no worker tells them their keys
            await asyncio.sleep(0)
        plan = {"url": f"http://127.0.0.1:{port}/v1", "keys": list(service._keys)}
        agents = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.agents.gateway_cpu", "--agents"),
            stdin=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        await agents.communicate(json.dumps(plan).encode())
        ended_s = time.process_time()
        serving.cancel()
    if agents.returncode or engine.began_s is None:
        raise RuntimeError(f"the agents ended with exit code {agents.returncode}")
    num_turns = engine.num_turns - _SESSIONS * _WARM_UP_TURNS
    return {
        "gateway_cpu_ms": 1e3 * (ended_s - engine.began_s) / num_turns,
        "gateway_turns": num_turns,
        "gateway_prompt_tokens": len(prompt),
        "gateway_request_bytes": len(json.dumps(_history())),
    }


class _Engine:
    """The other end of the service's channel: begins the rollouts, and draws one reply in 100 ms each; the time counts
    from the end of the warm-up."""

    def __init__(self, reply: list[int]) -> None:
        self.num_turns = 0
        self.began_s: float | None = None
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._said: asyncio.Queue[ToService] = asyncio.Queue()
        for ticket in range(_SESSIONS):
            self._said.put_nowait(Begin(ticket, "{}", ticket, ticket, 0, ticket))

    async def receive(self) -> ToService:
        return await self._said.get()

    def send(self, message: FromService) -> None:
        match message:
            case ServiceReady(port=port):
                self.port.set_result(port)
            case Draw(call=call):
                if self.num_turns == _SESSIONS * _WARM_UP_TURNS:
                    self.began_s = time.process_time()
                self.num_turns += 1
                number = len(self._reply)
                drawn = Drawn(call, self._reply, [-1.0] * number, [0] * number, truncated=False)
                asyncio.get_running_loop().call_later(_TURN_S, self._said.put_nowait, drawn)


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
