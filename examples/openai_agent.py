"""An agent of 40 lines on the `openai` client: the same code in training and in deployment.

rollout.agent: openai_agent:agent                           training: it gets the gateway's URL and a session's key
OPENAI_API_KEY=... python examples/openai_agent.py MODEL    deployment: any server of this API (OPENAI_BASE_URL)
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()
"""Read once: that takes 40 ms, and hundreds of rollouts begin in one process."""
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
MULTIPLY: Any = {"type": "function", "function": {"name": "multiply", "description": "a * b", "parameters": NUMBERS}}


async def agent(task: Mapping[str, Any], base_url: str | None, api_key: str, model: str = "policy") -> float:
    """Return the reward: 1 if the last message ends with the task's answer."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    connections = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections) as client:
        for _ in range(4):
            completion = await client.chat.completions.create(model=model, messages=messages, tools=[MULTIPLY])
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float((message.content or "").strip(" .").endswith(task["answer"]))
            for call in message.tool_calls:
                try:
                    numbers = json.loads(call.function.arguments)
                    result = str(int(numbers["a"]) * int(numbers["b"]))
                except (ValueError, TypeError, KeyError) as error:  # the model reads what is wrong with its call
                    result = f"error: {error!r}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


if __name__ == "__main__":
    example = {"question": "What is 37 * 64?", "answer": "2368"}
    print(asyncio.run(agent(example, None, os.environ["OPENAI_API_KEY"], sys.argv[1])))  # noqa: T201
