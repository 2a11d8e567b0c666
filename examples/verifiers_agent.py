"""A taskset of `verifiers` (v1) as an agent: its own harness runs the rollout, its own rewards score it.

    pip install verifiers uv        # in an environment of its own: it pins other clients than AsyncFlow's tests

    data:
      source: verifiers_agent:Tasks
    rollout:
      agent: verifiers_agent:agent

The harness talks to verifiers' proxy, whose evaluation client sends each request on to this rollout's session.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import verifiers.v1 as vf


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip(" .").endswith(self.data.answer))


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self) -> Iterable[Product]:
        for a in range(2, 100):
            yield Product(ProductData(prompt=f"What is {a} * 64? Reply with the number.", answer=str(a * 64)))


TASKS = list(Products(vf.TasksetConfig()))  # of a package: vf.utils.loaders.load_taskset(vf.TasksetConfig(id="..."))


class Tasks:
    """The rows: which task of the taskset."""

    def __len__(self) -> int:
        return len(TASKS)

    def task(self, seed: int, index: int) -> dict[str, Any]:
        return {"task": index}


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Return what the task's rewards add up to."""
    config = vf.AgentConfig(
        harness={"id": "null"},  # a chat, with the taskset's tools if it has any
        runtime=vf.SubprocessConfig(),
        model="policy",
        # The client takes keys from the environment, which all rollouts of a process share; the gateway reads this one.
        client=vf.EvalClientConfig(base_url=base_url, headers={"x-api-key": api_key}),
    )
    trace = await vf.Agent(config).run(TASKS[task["task"]])
    if trace.has_error:
        raise RuntimeError(f"the rollout failed: {trace.errors}")
    return trace.reward
