"""The environment of `smollm2-tools-cpu.yaml`: a question, and a calculator that the policy calls in plain text.

    user       What is 37*64?
    assistant  <calc>37*64</calc>             turn 1
    user       The calculator says 2368.
    assistant  The answer is 2368.            turn 2, scored by `reward.function`

SmolLM2's chat template has no words for tools: the system message describes this one, and a reply is searched for it.
"""

import re

from workers.agents import Environment, Reply, Task
from workers.agents.api import Step
from workers.agents.turns import Message

SYSTEM = "Never multiply yourself. Write <calc>12*34</calc> to call the calculator. When you know its result, say it."
CALL = re.compile(r"<calc>\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*</calc>")


class Calculator(Environment):
    """One product."""

    def reset(self, task: Task) -> list[Message]:
        """Show one product that was calculated, then ask for the task's."""
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What is 21*43?"},
            {"role": "assistant", "content": "<calc>21*43</calc>"},
            {"role": "user", "content": "The calculator says 903."},
            {"role": "assistant", "content": "The answer is 903."},
            {"role": "user", "content": f"What is {task['prompt']}?"},
        ]

    def step(self, reply: Reply) -> Step:
        """Calculate; a reply without a call is the last one."""
        call = CALL.search(reply.text)
        if call is None:
            return "", None, True
        return f"The calculator says {int(call[1]) * int(call[2])}.", None, False
