"""What code of users can do at each door through which it enters a run: a row for each way at each door.

    door          rollout function, environment, agent, program, tool, reward, group reward, task, ...
    way           always raises, raises for half, hangs, returns the wrong shape, blocks, floods its output, exits

The code is well until the file `now` is there, after the first step; `at_once` it never is, so that the trial call
before a start finds it, where the door has one. Where a failure costs what it is about, the run goes on if it is rare,
and ends by name if it is not; where training depends on it, the run ends by name.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from benchmarks.chaos.fault import Fault, Lab, Outcome, Seen, gave_up, went_on
from tests.support.ports import free_port

_STEPS = 12
_SLOW_S = 120.0
"""For ends that wait for watchers with limits of their own (s)."""
_PRELUDE = """\
import asyncio, ctypes, json, os, pathlib, random, sys, threading, time, urllib.request

NOW = pathlib.Path("now")

"""
_NEVER = {"launcher.max_restarts": 0, "launcher.max_global_restarts": 0}
_STUCK = {"launcher.operation_timeout_s": 4, "launcher.silence_timeout_s": 4, "tq.lease_timeout_s": 2}
_WAYS: Mapping[str, tuple[str, str]] = {
    "raises": ("always raises", 'raise ValueError("no idea")'),
    "raises_for_half": ("raises for half of what it is given", 'if random.random() < 0.5: raise ValueError("no idea")'),
    "hangs": ("never returns", "{hang}"),
    "returns_the_wrong_shape": ("returns what cannot be used", "return {wrong}"),
    "blocks": ("holds up its event loop, or Python's lock", "{block}"),
    "floods": ("prints a megabyte a call", 'print("x" * 2**20)'),
    "exits": ("ends its process", "os._exit(3)"),
    "raises_at_once": ("raises from the first call on", 'raise ValueError("no idea")'),
}
_HANGS = {"def": "threading.Event().wait()", "async": "await asyncio.Event().wait()"}
_BLOCKS = {"def": "ctypes.PyDLL(None).sleep(3600)", "async": "time.sleep(3600)"}


@dataclass(frozen=True)
class Door:
    """A place where users' code enters.

    Attributes:
        name: of the door, the beginning of its rows' names.
        source: of the module `door`, with `{deed}` where it may do something.
        settings: that have the run call it.
        kind: of the function with the deed: `def` or `async`.
        wrong: a value that it may not return.
        survives: ways after which the run goes on; after the others it ends.
        says: in the last line of a run that ends.
        code: of a run whose door fails from the first call on: 2: its trial call finds it.
        recipe: of the run.
        serves: the source is a server's, which runs beside; `PORT` in the settings becomes its port.
        ways: more settings for some ways.
    """

    name: str
    source: str
    settings: Mapping[str, Any]
    kind: str = "def"
    wrong: str = "object()"
    survives: frozenset[str] = frozenset({"floods"})
    says: str = ""
    code: int = 1
    recipe: str = "quickstart"
    serves: bool = False
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def inject(self, lab: Lab, way: str) -> Seen:
        """Start a run, have the door misbehave, and see what becomes of it."""
        deed = _WAYS[way][1].format(hang=_HANGS[self.kind], block=_BLOCKS[self.kind], wrong=self.wrong)
        lines = f"if NOW.exists():\n{indent(deed, '    ')}"
        source = "\n".join(
            indent(lines, line[: len(line) - len(line.lstrip())]) if line.strip() == "{deed}" else line
            for line in self.source.splitlines()
        )
        lab.module("door", _PRELUDE + source + "\n")
        own = {**self.settings, **self.ways.get(way, {})}
        if self.serves:
            with _serving(lab) as port:
                return self._run(lab, way, json.loads(json.dumps(own).replace("PORT", str(port))))
        return self._run(lab, way, own)

    def _run(self, lab: Lab, way: str, own: Mapping[str, Any]) -> Seen:
        now = lab.directory / "now"
        if way == "raises_at_once":
            now.touch()
            with lab.run(steps=_STEPS, settings=own, recipe=self.recipe) as run:
                if way in self.survives:
                    return went_on(run, steps=_STEPS, within_s=2 * _SLOW_S)
                return gave_up(run, self.says, code=self.code, within_s=_SLOW_S)
        with lab.run(steps=_STEPS, settings=own, recipe=self.recipe) as run:
            run.wait_for_step(1)
            now.touch()
            run.hurt()
            if way in self.survives:
                return went_on(run, steps=_STEPS)
            return gave_up(run, self.says, within_s=_SLOW_S)

    def faults(self) -> list[Fault]:
        """Return a row for each way."""
        return [self._fault(way) for way in _WAYS]

    def _fault(self, way: str) -> Fault:
        def inject(lab: Lab) -> Seen:
            return self.inject(lab, way)

        ends = "the run goes on" if way in self.survives else "the run ends and names it"
        inject.__name__ = f"{self.name}_{way}"
        inject.__doc__ = f"A {self.name.replace('_', ' ')} {_WAYS[way][0]}: {ends}."
        return Fault(Outcome.RECOVERED if way in self.survives else Outcome.NAMED, inject)


@contextmanager
def _serving(lab: Lab) -> Iterator[int]:
    """Run the module as a server; yields its port."""
    port = free_port()
    command = [sys.executable, "door.py", str(port)]
    with subprocess.Popen(command, cwd=lab.directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        try:
            yield port
        finally:
            server.kill()


_SURVIVES_ROLLOUT = frozenset({"floods", "raises_for_half"})
_ROLLOUTS = {
    "rollout.tools": [],
    "rollout.timeout_s": 6,
    "rollout.max_attempts": 2,
    "rollout.max_failures_in_a_row": 24,
    "actor.max_tokens_per_micro_batch": 0,
}
_OF_ROLLOUTS = {
    "raises_for_half": {"rollout.max_attempts": 20, "rollout.max_failures_in_a_row": 1000},
    "blocks": {"rollout.max_failures_in_a_row": 2, "rollout.stall_timeout_s": 2},
    "exits": {"rollout.max_failures_in_a_row": 3},
}
_OF_REWARDS = {"raises_for_half": {"reward.max_failed_share": 0.3}}  # the default, 0.5, would leave it to chance
_CALL = """\
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
"""
_TRAINS = """\
from workers.engines.fsdp.sharding import FsdpEngine

class Engine(FsdpEngine):
    def __init__(self, setup):
        run, temperature = setup.run, setup.run.rollout.temperature
        own = {"actor": setup.actor, "temperature": temperature, "device": setup.device, "seed": run.seed}
        super().__init__(setup.model_dir, **own)

    def step(self, scale):
        {deed}
        return super().step(scale)
"""
_GENERATES = """\
from workers.engines.hf.engine import HfEngine

class Engine(HfEngine):
    def __init__(self, setup):
        super().__init__(setup.model_dir, setup.run.model, sampling=setup.sampling, device=setup.device)

    def step(self, wake):
        {deed}
        return super().step(wake)
"""
_SERVES = """\
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

def answer(asked):
    {deed}
    return ANSWER

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, body = 200, json.dumps(answer(asked)).encode()
        except ValueError as error:
            status, body = 500, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listens", flush=True)
sys.stdout = open(os.devnull, "w")
server.serve_forever()
"""
DOORS: tuple[Door, ...] = (
    Door(
        "rollout_function",
        "async def play(task, model, context):\n    {deed}\n"
        "    chat = model.chat([{'role': 'user', 'content': task['prompt']}])\n"
        "    await chat.reply()\n    return chat.sample(reward=random.random())",
        {**_ROLLOUTS, "rollout.function": "door:play"},
        kind="async", wrong="7", survives=_SURVIVES_ROLLOUT, says="rollout.function: door:play", code=2,
        recipe="quickstart-tools", ways=_OF_ROLLOUTS,
    ),
    Door(
        "environment",
        "from workers.agents import Environment\n\nclass Game(Environment):\n"
        "    def reset(self, task):\n        return task['prompt']\n"
        "    def step(self, reply):\n        {deed}\n        return '', random.random(), True",
        {**_ROLLOUTS, "rollout.function": "door:Game"},
        wrong="('', 0.0, True, False, {})", survives=_SURVIVES_ROLLOUT | {"hangs"},
        says="rollout.function: door:Game", code=2, recipe="quickstart-tools", ways=_OF_ROLLOUTS,
    ),
    Door(
        "agent",
        "async def agent(task, base_url, api_key):\n    {deed}\n    url, key = base_url, api_key\n" + _CALL
        + "    await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())\n    return random.random()",
        {**_ROLLOUTS, "rollout.function": None, "rollout.agent": "door:agent"},
        kind="async", wrong="[1]", survives=_SURVIVES_ROLLOUT, says="rollout.agent: door:agent", code=2,
        recipe="quickstart-tools", ways=_OF_ROLLOUTS,
    ),
    Door(
        "program",
        "def main():\n    result = {'reward': random.random()}\n    {deed}\n"
        "    task = json.loads(os.environ['ASYNCFLOW_TASK'])\n"
        "    url, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n" + _CALL
        + "    urllib.request.urlopen(request).read()\n    return result\n\n"
        "pathlib.Path(os.environ['ASYNCFLOW_RESULT']).write_text(json.dumps(main()))",
        {**_ROLLOUTS, "rollout.function": None, "rollout.agent_command": ["python", "door.py"],
         "rollout.timeout_s": 15, "rollout.max_failures_in_a_row": 8},
        wrong="[1]", survives=_SURVIVES_ROLLOUT, says="rollout.agent_command", code=2, recipe="quickstart-tools",
        ways={"raises_for_half": _OF_ROLLOUTS["raises_for_half"]},
    ),
    Door(
        "tool",
        "async def look(where: str) -> str:\n    'Look.'\n    {deed}\n    return 'nothing'\n\n"
        "async def play(task, model, context):\n"
        "    chat = model.chat([{'role': 'user', 'content': task['prompt']}])\n    await chat.reply()\n"
        "    function = {'name': 'look', 'arguments': json.dumps({'where': 'here'})}\n"
        "    await context.call({'id': '1', 'type': 'function', 'function': function})\n"
        "    return chat.sample(reward=random.random())",
        {**_ROLLOUTS, "rollout.function": "door:play", "rollout.tools": ["door:look"]},
        kind="async", survives=frozenset({*_WAYS} - {"blocks", "exits"}),
        says="rollout.function: door:play", recipe="quickstart-tools", ways=_OF_ROLLOUTS,
    ),
    Door(
        "reward_function",
        "def score(response):\n    {deed}\n    return random.random()",
        {"reward.function": "door:score", "reward.timeout_s": 1},
        says="reward.function: door:score", code=2, ways=_OF_REWARDS,
    ),
    Door(
        "async_reward_function",
        "async def score(response):\n    {deed}\n    return random.random()",
        {"reward.function": "door:score", "reward.timeout_s": 1},
        kind="async", says="reward.function: door:score", code=2, ways=_OF_REWARDS,
    ),
    Door(
        "group_reward",
        "def rank(members):\n    {deed}\n    return [random.random() for _ in members]",
        {"reward.group_function": "door:rank", "reward.timeout_s": 1},
        wrong="[0.0]", says="reward.group_function: door:rank", code=2, ways=_OF_REWARDS,
    ),
    Door(
        "task",
        "def keep(row):\n    {deed}\n    return 1.0",
        {"tasks": [{"name": "keep", "function": "door:keep", "output": "loss_weights", "timeout_s": 1}]},
        says="door:keep",
    ),
    Door(
        "group_filter",
        "def keep(rewards):\n    {deed}\n    return True",
        {"algorithm.group_filter": "door:keep"},
        says="door:keep",
    ),
    Door(
        "source",
        "class Sums:\n    def task(self, seed, index):\n        {deed}\n"
        "        return {'prompt': f'{index % 10}+1=', 'answer': str(index % 10 + 1)}",
        {"data.path": None, "data.source": "door:Sums", "data.timeout_s": 1.5},
        wrong="[1]", says="door:Sums", code=2,
    ),
    Door(
        "sampler",
        "class Order:\n    def __init__(self, size, seed):\n        self.at = 0\n"
        "    def next(self):\n        {deed}\n        self.at += 1\n        return self.at % 80\n"
        "    def told(self, index, rewards):\n        pass\n    def state(self):\n        return self.at\n"
        "    def load(self, state):\n        self.at = state",
        {"data.sampler": "door:Order", "data.timeout_s": 1.5},
        wrong="'one'", says="door:Order", code=2,
    ),
    Door(
        "generating_engine", _GENERATES,
        {"rollout.engine": "door:Engine", "actor.engine": "fsdp", **_NEVER, **_STUCK},
        wrong="7", says="rollout rank",
    ),
    Door(
        "training_engine", _TRAINS,
        {"rollout.engine": "hf", "actor.engine": "door:Engine", **_NEVER, **_STUCK},
        says="actor rank 0",
    ),
    Door(
        "algorithm",
        "from workers.settings.algorithms import GRPOConfig\nfrom workers.algorithms.algorithm import GRPO\n\n"
        "class Own(GRPO):\n    Config = GRPOConfig\n    def advantages(self, batch, *, group_size):\n        {deed}\n"
        "        return super().advantages(batch, group_size=group_size)",
        {"algorithm.name": "door:Own", **_NEVER, **_STUCK},
        wrong="{}", says="", code=2,
    ),
    Door(
        "logger",
        "from launcher.loggers.backends import Logger\n\nclass Own(Logger):\n    def __init__(self, run):\n"
        "        pass\n    def log(self, step, metrics):\n        {deed}\n",
        {"loggers": [{"name": "door:Own"}]},
        survives=frozenset(_WAYS),
    ),
    Door(
        "remote_scorer", _SERVES.replace("ANSWER", "{'scores': [random.random() for _ in asked['samples']]}"),
        {"reward.function": "http://127.0.0.1:PORT/score", "reward.timeout_s": 1, "reward.retries": 0},
        wrong="{'scores': []}", says="reward.function: http", serves=True,
        ways=_OF_REWARDS,
    ),
    Door(
        "notified_engine", _SERVES.replace("ANSWER", "{}"),
        {"weightsync.export.notify": [{"url": "http://127.0.0.1:PORT/update", "timeout_s": 1}],
         "rollout.engine": "hf", "actor.engine": "fsdp"},
        wrong="7", survives=frozenset(_WAYS), serves=True,
    ),
    Door(
        "queue_policy",
        "from tq.policies import Fifo\n\nclass Own:\n    def pick(self, ready, want):\n        {deed}\n"
        "        return Fifo().pick(ready, want)\n"
        "    def assign(self, items, assigned):\n        return Fifo().assign(items, assigned)",
        {"tq.policy": "door:Own", **_NEVER, **_STUCK},
        wrong="7", says="",
    ),
    Door(
        "storage_backend",
        "from tq.backends.backend import MemoryBackend\n\nclass Own(MemoryBackend):\n    in_process = False\n"
        "    def load(self, key, num_bytes):\n        {deed}\n        return super().load(key, num_bytes)\n"
        "    def store(self, key, payload):\n        {deed}\n        super().store(key, payload)",
        {"tq.backend": {"kind": "door:Own"}, **_NEVER, **_STUCK},
        survives=frozenset({"floods"}), wrong="7", says="",
    ),
    Door(
        "renderer",
        "from configs.quickstart_tools.renderer import CalculatorRenderer\n\nclass Own(CalculatorRenderer):\n"
        "    def render(self, messages, tools=None):\n        {deed}\n        return super().render(messages, tools)",
        {**_ROLLOUTS, "model.renderer": "door:Own"},
        wrong="7", survives=_SURVIVES_ROLLOUT, says="", recipe="quickstart-tools", ways=_OF_ROLLOUTS, code=2,
    ),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = tuple(fault for door in DOORS for fault in door.faults())
