"""A shell agent in its own program, in plain Python: any program can be trained that speaks OpenAI's API.

    rollout: {agent_command: [python, examples/agent_command/shell_agent.py]}

It finds in its environment `OPENAI_BASE_URL` and `OPENAI_API_KEY` (its session's), `ASYNCFLOW_TASK` (the data row as
JSON: `question`, `answer`) and `ASYNCFLOW_RESULT`, the file that gets `{"reward": x}`. Without a reward the rollout has
failed. Commands that the model writes run in an empty directory and with an empty environment, but as this user and
with the network: train on a machine, or in a container, that may be lost.
"""

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

TURNS = 8
COMMAND_S = 10
SHOWN_CHARACTERS = 2000
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": COMMAND}}


def main() -> None:
    """Solve the task, and say how well."""
    task = json.loads(os.environ["ASYNCFLOW_TASK"])
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(TURNS):
            message = chat(messages)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                said = shell(call["function"]["arguments"], directory)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    reward = float(str(task["answer"]) in answer.split())
    Path(os.environ["ASYNCFLOW_RESULT"]).write_text(json.dumps({"reward": reward}))


def chat(messages: list[Any]) -> dict[str, Any]:
    """Return the assistant's next message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [SHELL]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def shell(arguments: str, directory: str) -> str:
    """Run the model's command and return what it printed."""
    try:
        command = ["sh", "-c", str(json.loads(arguments)["command"])]
        ran = subprocess.run(
            command,
            cwd=directory,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
    except (ValueError, TypeError, KeyError, subprocess.TimeoutExpired) as error:
        return f"error: {error!r}"
    return ran.stdout.decode(errors="replace")[:SHOWN_CHARACTERS] or f"exit code {ran.returncode}"


if __name__ == "__main__":
    main()
