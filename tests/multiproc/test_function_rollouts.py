"""Rollouts of users' functions and agents: real service and worker processes, and an engine that knows its lines."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
import torch

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, UserCodeFailed, UserCodeNotStarted
from asyncflow.timeline import Timeline
from launcher.config.paths import find_recipe
from tests.support.judge import Judge
from tests.support.run_files import lines
from workers.agents.command import run_command
from workers.agents.wire import Begin, Setup, Start
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import GenerateRequest, Generation
from workers.records.samples import token_runs
from workers.rewards.scorer import Scorer
from workers.rollout.functions import FunctionRollouts
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.settings.rewards import RewardConfig

MODEL = find_recipe("quickstart-tools").parent / "quickstart_tools" / "model"
MODULE = """
import asyncio, os, time
from configs.quickstart_tools.renderer import CalculatorRenderer
from workers.agents import Environment

async def waits(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    open(os.path.join(task["seen"], f"{task.index}-{context.attempt}"), "w").close()
    await asyncio.sleep(1000)

async def writes(task, model, context):
    (context.scratch / "file").touch()
    await asyncio.sleep(1000)

async def computes(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    return chat.sample(reward=0.5)

async def fails(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    if task.index % 2:
        raise RuntimeError("it broke")
    return chat.sample(reward=0.5)

async def fails_at_once(task, model, context):
    if task.index % 2:
        raise RuntimeError("it broke")
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    return chat.sample(reward=0.5)

async def two(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    other = model.chat([{"role": "user", "content": task["prompt"]}])
    await other.reply()
    context.log("seen", 2)
    return [chat.sample(reward=1.0), other.sample()]

async def odd(task, model, context):
    role = "tutor" if task["kind"] == "role" else "user"
    chat = model.chat([{"role": role, "content": task["prompt"]}])
    await chat.reply()
    if task["kind"] == "unicode":
        raise RuntimeError("\\ud800")
    return chat.sample(reward=float("inf"))

async def sleeps(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    await context.run(__import__("time").sleep, 1000)

other_ended = asyncio.Event()

async def crashes(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    if task.index == 0:
        await other_ended.wait()
        await model.chat([{"role": "user", "content": task["prompt"]}]).reply()
        asyncio.get_running_loop().call_soon(os._exit, 139)  # as a thread's crash: no rollout's own step
        await asyncio.sleep(1000)
    other_ended.set()
    return chat.sample(reward=1.0)

async def starts(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    with open(os.path.join(task["seen"], "child.tmp"), "w") as file:
        file.write(str(child.pid))
    os.rename(file.name, os.path.join(task["seen"], "child"))
    await child.wait()

class NoBridge(CalculatorRenderer):
    def render(self, messages, tools=None):
        return super().render(messages, tools)[len(messages) > 1:]

    def bridge(self, previous_ids, new_messages, tools=None):
        return None
class Endless(CalculatorRenderer):
    def __init__(self, tokenizer):
        __import__("threading").Event().wait()

class Stuck(CalculatorRenderer):
    def render(self, messages, tools=None):
        __import__("threading").Event().wait()

class Again(Environment):
    def reset(self, task):
        return task["prompt"]

    def step(self, reply):
        return "37*64", 0.25, False

class Stopped(Again):
    def step(self, reply):
        return next(iter([]))
async def judged(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    said = await context.models["judge"].chat([{"role": "user", "content": "how good is it?"}])
    return chat.sample(reward=float(said.text.partition("/")[0]))

async def greedy(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    if task["kind"] == "memory":
        held = await context.run(bytearray, 2**33)
    if task["kind"] == "file":
        (context.scratch / "long").write_bytes(bytes(2**21))
    return chat.sample(reward=0.5)

async def hangs(task, base_url, api_key):
    written = os.path.join(task["seen"], str(task.index))
    with open(written + ".part", "w") as file:
        file.write(f"{base_url} {api_key}")
    os.rename(written + ".part", written)
    await asyncio.sleep(1000)
async def by_number(task, model, context):
    chat = model.chat([{"role": "user", "content": str(task.index)}])
    await chat.reply()
    return chat.sample(reward=1.0)

async def stopped(task, model, context):
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    reply = await chat.reply(stop=["*6", "99"])
    context.log("calls", len(reply.tool_calls))
    context.log("seen", float(reply.text == "<call>37" and reply.finish_reason == "stop"))
    chat.add({"role": "user", "content": "37*64"})
    await chat.reply()
    return chat.sample(reward=1.0)

async def blocks(task, model, context):
    await model.chat([{"role": "user", "content": task["prompt"]}]).reply()
    time.sleep(1000)

async def starts_slowly(task, model, context):
    time.sleep(0.1)
    chat = model.chat([{"role": "user", "content": task["prompt"]}])
    await chat.reply()
    return chat.sample(reward=1.0)

async def skips_odd(task, model, context):
    if task.index % 2:
        context.skip("it is odd")
    await model.chat([{"role": "user", "content": task["prompt"]}]).reply()

async def agent(task, base_url, api_key):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": task["prompt"]}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    return {"reward": float(len(reply.choices[0].message.tool_calls)), "asked": 1}
"""


class Engine:
    """Calls the tool, then says what it heard; one token takes one `step`'s wait at most."""

    version = 3
    interruptible = True
    adopts_weights = False
    free_slots = 64

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(MODEL)
        self.truncates = False
        self.running: dict[int, GenerateRequest] = {}
        self.prompts: list[list[int]] = []

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.running |= {one.ticket: one for one in requests}
        self.prompts += [one.prompt_P.tolist() for one in requests]

    def step(self, wake: threading.Event) -> list[Generation]:
        done = [self._drawn(one) for one in self.running.values()]
        self.running.clear()
        return done

    def cancel(self, ticket: int) -> None:
        self.running.pop(ticket, None)

    def abort(self) -> None:
        self.running.clear()

    def _drawn(self, request: GenerateRequest) -> Generation:
        text = self.tokenizer.decode(request.prompt_P.tolist())
        heard = text.split("<tool>")[-1].split("<asst>")[0] if "<tool>" in text else None
        reply = f"{heard}<eos>" if heard else f"<call>{text.split('<user>')[-1].split('<asst>')[0]}<eos>"
        tokens = self.tokenizer.encode(reply, add_special_tokens=False)
        number = len(tokens)
        return Generation.of(
            request, tokens=tokens, log_probs=[-0.5] * number, versions=[3] * number, truncated=self.truncates
        )  # fmt: skip


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[FunctionRollouts, Engine]]]:
    (tmp_path / "my_rollouts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    opened: list[FunctionRollouts] = []

    def open_them(
        on_failure: str = "dead_letter",
        spans: Any = None,
        told: dict[str, Any] | None = None,
        warned: Any = None,
        **changed: Any,
    ) -> tuple[FunctionRollouts, Engine]:
        settings: dict[str, Any] = {
            "model_dir": str(MODEL), "renderer": "configs.quickstart_tools.renderer:CalculatorRenderer",
            "function": "tools", "agent": None, "command": [], "tools": ["configs.quickstart_tools.tools:multiply"],
            "timeout_s": 60.0, "max_turns": 0, "max_tokens": 0, "max_context": 48, "max_response_tokens": 8,
            "max_attempts": 3, "num_workers": 1, "scratch": str(tmp_path / "scratch"),
        }  # fmt: skip
        engine = Engine()
        rollouts: Any = FunctionRollouts
        made: FunctionRollouts = rollouts(
            engine,
            Setup(**settings | changed),
            max_running=64,
            on_failure=on_failure,
            wake=threading.Event(),
            spans=spans,
            warn=[].append if warned is None else warned.append,
            **told or {},
        )
        opened.append(made)
        return made, engine

    yield open_them
    for one in opened:
        one.close()


def request(index: int, **fields: str) -> RolloutRequest:
    task = '{"prompt": "37*64"' + "".join(f', "{name}": "{value}"' for name, value in fields.items()) + "}"
    return RolloutRequest(index, 100 + index, 7 * index, torch.tensor([1]), task, index // 2, index % 2)


def finished(rollouts: FunctionRollouts, until: Callable[[list[FinishedRollout]], bool]) -> list[FinishedRollout]:
    never, done = threading.Event(), []  # type: tuple[threading.Event, list[FinishedRollout]]
    for _ in range(2000):  # a step that has nothing to do waits half a second at most
        done += rollouts.step(never)
        if until(done):
            return done
    raise AssertionError(f"only {len(done)} rollouts finished")


def child_of_service(number: int = 0) -> psutil.Process:
    """Return the service (0), or its worker (1)."""
    (service,) = (
        one for one in psutil.Process().children() if "workers.agents.service" in " ".join(one.cmdline())
    )  # fmt: skip
    if not number:
        return service
    return next(one for one in service.children() if "workers.agents.worker" in " ".join(one.cmdline()))


@pytest.mark.gate
def test_a_tool_loop_is_one_sample_of_exactly_what_was_drawn(start: Any) -> None:
    rollouts, engine = start()
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    text = engine.tokenizer.decode(one.tokens_T.tolist())
    assert text.replace(" ", "") == "<user>37*64<asst><call>37*64<eos><tool>2368<asst>2368<eos>"
    assert one.sample_lengths == [len(one.tokens_T)]
    drawn = engine.tokenizer.decode(one.drawn.tolist()).replace(" ", "")
    assert drawn == "<call>37*64<eos>2368<eos>"
    assert len(one.log_probs_A) == len(one.versions_A) == int(one.response_mask_T.sum())
    assert (one.reward, one.response, one.turns, one.truncated) == (None, "2368", 2, False)
    assert [message["role"] for message in one.conversations[0]] == ["user", "assistant", "tool", "assistant"]
    (runs,) = token_runs(one, engine.tokenizer)
    assert [(mask, text.replace(" ", "")) for mask, text in runs] == [
        (0, "<user>37*64<asst>"), (1, "<call>37*64<eos>"), (0, "<tool>2368<asst>"), (1, "2368<eos>"),
    ]  # fmt: skip


@pytest.mark.gate
def test_a_stop_string_ends_the_call_and_what_was_drawn_beyond_it_is_nowhere(start: Any) -> None:
    rollouts, engine = start(function="my_rollouts:stopped")
    engine.truncates = True  # what an engine draws to its limit, since it does not look for strings
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    text = engine.tokenizer.decode(one.tokens_T.tolist()).replace(" ", "")
    assert text == "<user>37*64<asst><call>37*6<eos><user>37*64<asst><call>37*64<eos>"
    drawn = engine.tokenizer.decode(one.drawn.tolist()).replace(" ", "")
    assert drawn == "<call>37*6<call>37*64<eos>"  # the end mark behind the first is the template's
    assert len(one.log_probs_A) == len(one.versions_A) == len(one.drawn)
    assert one.metrics == {"calls": 0.0, "seen": 1.0} and one.sample_lengths == [len(one.tokens_T)]
    assert one.truncated  # the second reply, which no string ended
    first_turn = one.conversations[0][1]
    assert (first_turn["role"], first_turn["content"]) == ("assistant", "<call>37")


def test_turns_that_could_not_be_bridged_are_trained_as_samples_and_counted_for_the_metrics(start: Any) -> None:
    rollouts, engine = start(renderer="my_rollouts:NoBridge")
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert (len(one.sample_lengths), one.turns) == (2, 2)
    scorer = Scorer(RewardConfig(function="exact"), engine.tokenizer)
    parts = scorer.score(one, "2368").result(timeout=60).parts
    scorer.close()
    assert (parts["turns"], parts["bridge_failures"]) == (2.0, 1.0)


def test_processor_time_of_service_and_functions_is_counted_once(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:computes")
    rollouts.begin([request(0), request(1)])
    counted_s = sum(one.cpu_s for one in finished(rollouts, lambda done: len(done) == 2))
    whole = [child_of_service(number).cpu_times() for number in (0, 1)]
    assert 0.4 <= counted_s <= sum(each.user + each.system for each in whole) + 0.05


def test_several_samples_lie_in_one_row(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:two")
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert len(one.sample_lengths) == 2
    assert sum(one.sample_lengths) == len(one.tokens_T)
    assert (one.reward, one.metrics) == (1.0, {"seen": 2.0})


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.gate), 1])
def test_rollouts_begin_again_when_the_service_or_a_worker_is_killed(start: Any, tmp_path: Path, who: int) -> None:
    rollouts, _ = start(function="my_rollouts:waits", timeout_s=3.0)
    rollouts.begin([request(index, seen=str(tmp_path)) for index in range(4)])
    finished(rollouts, lambda _: len(list(tmp_path.glob("?-0"))) == 4)
    for seen in tmp_path.glob("?-0"):
        seen.unlink()
    os.kill(child_of_service(who).pid, signal.SIGKILL)
    done = finished(rollouts, lambda done: len(done) == 4)
    assert sorted(one.index for one in done) == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("?-0"))) == 4  # each was begun once more, and paid nothing
    assert all(one.truncated and len(one.log_probs_A) and not one.leaves for one in done)  # their time was up


def test_a_kill_that_repeats_is_told_to_the_user_with_what_held_the_loop(start: Any) -> None:
    warned: list[str] = []
    rollouts, _ = start(function="my_rollouts:blocks", max_attempts=2, stall_timeout_s=0.5, warned=warned)
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert one.leaves and "event loop for 0.5 s" in one.failure
    (text,) = warned  # of two kills: once may be chance
    assert "event loop for 0.5 s (rollout.stall_timeout_s) in blocks (my_rollouts.py:" in text
    assert "begin again (time 2)" in text


def test_a_process_that_is_killed_counts_as_a_failed_attempt_of_each_rollout_in_it(start: Any) -> None:
    told = {"max_failures": 1}
    rollouts, _ = start(function="my_rollouts:blocks", max_attempts=1, stall_timeout_s=0.5, told=told)
    rollouts.begin([request(index) for index in range(6)])
    with pytest.raises(UserCodeFailed, match="^1[2-5] attempts at rollouts failed in a row"):  # of 3 kills
        finished(rollouts, lambda done: len(done) == 6)


def test_the_time_of_a_rollout_that_stands_in_line_has_not_begun(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:starts_slowly", timeout_s=2.0)
    rollouts.begin([request(index) for index in range(30)])
    done = finished(rollouts, lambda done: len(done) == 30)
    assert [one.reward for one in done] == [1.0] * 30 and not any(one.truncated for one in done)


@pytest.mark.parametrize("num_bytes", [1, 100_000])
def test_a_service_that_stands_still_is_replaced_also_where_it_takes_nothing_more(
    start: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr("workers.rollout.session_service.STALL_S", 3.0)
    rollouts, _ = start()
    service = child_of_service()
    os.kill(service.pid, signal.SIGSTOP)
    rollouts.begin([request(index, more="x" * num_bytes) for index in range(8)])
    assert len(finished(rollouts, lambda done: len(done) == 8)) == 8
    service.wait(30)


def test_a_renderer_that_does_not_return_ends_the_run(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rollout.session_service.STALL_S", 2.0)
    rollouts, _ = start(renderer="my_rollouts:Stuck")
    rollouts.begin([request(0)])
    with pytest.raises(UserCodeFailed, match=r"sent nothing for 2 s, 3 times without a rollout .*\(model.renderer\)"):
        finished(rollouts, len)


def test_a_service_that_stands_still_while_it_starts_has_not_started(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rollout.session_service.START_TIMEOUT_S", 1.0)
    with pytest.raises(UserCodeNotStarted, match=r"did not start in 2 attempts: it did not serve within \d+ s; see"):
        start(renderer="my_rollouts:Endless")


def test_no_files_are_left_of_a_rollout_whose_process_or_service_was_killed(start: Any, tmp_path: Path) -> None:
    rollouts, _ = start(function="my_rollouts:writes")
    scratch = tmp_path / "scratch"
    (scratch / "old").mkdir(parents=True)

    def written() -> set[str]:
        return {path.parent.name for path in scratch.glob("*/file")}

    rollouts.begin([request(0)])
    finished(rollouts, lambda _: written() == {"0-1"})
    os.kill(child_of_service(1).pid, signal.SIGKILL)
    finished(rollouts, lambda _: written() == {"0-2"})
    os.kill(child_of_service().pid, signal.SIGKILL)
    finished(rollouts, lambda _: {path.name for path in scratch.iterdir()} == {"0-1"})
    rollouts.close()
    assert not scratch.exists()


@pytest.mark.parametrize(
    ("on_failure", "reward", "leaves"),
    [pytest.param("dead_letter", None, True, marks=pytest.mark.gate), ("zero", 0.0, False), ("absent", None, False)],
)
def test_a_rollout_that_fails_each_time_is_what_on_failure_says(
    start: Any, on_failure: str, reward: float | None, leaves: bool
) -> None:
    why: list[str] = []
    told = {"what": "rollout.function: my_rollouts:fails", "failed": why.append}
    rollouts, _ = start(function="my_rollouts:fails", on_failure=on_failure, told=told)
    rollouts.begin([request(0), request(1)])
    good, bad = sorted(finished(rollouts, lambda done: len(done) == 2), key=lambda one: one.index)
    assert good.reward == 0.5
    assert (bad.leaves, bad.failures) == (leaves, 3 if leaves else 0)
    (one,) = set(why)
    assert re.fullmatch(r"rollout.function: my_rollouts:fails: RuntimeError: it broke \(my_rollouts.py:\d+\)", one)
    assert len(why) == 3, "each attempt is told of"
    assert len(bad.log_probs_A) == 0
    if reward is not None:
        assert bad.reward == reward
    else:
        assert "it broke" in bad.failure


@pytest.mark.gate
def test_failures_in_a_row_end_the_run_with_the_last_reason_and_a_rollout_between_them_begins_the_count_anew(
    start: Any,
) -> None:
    told = {"what": "rollout.function: my_rollouts:fails", "max_failures": 4}
    rollouts, _ = start(function="my_rollouts:fails", max_attempts=2, told=told)
    for index in (1, 0, 3):
        rollouts.begin([request(index)])
        finished(rollouts, lambda done: len(done) == 1)
    rollouts.begin([request(5)])
    with pytest.raises(
        UserCodeFailed, match=r"^4 attempts at rollouts failed in a row .*my_rollouts:fails: RuntimeErr"
    ):
        finished(rollouts, lambda done: len(done) == 1)


def test_a_batch_whose_failures_are_quick_goes_on_until_its_others_come_to_their_end(start: Any) -> None:
    rollouts, engine = start(function="my_rollouts:fails_at_once", told={"max_failures": 4}, max_attempts=3)
    engine.free_slots = 0
    rollouts.begin([request(index) for index in range(8)])
    assert len(finished(rollouts, lambda done: len(done) == 4)) == 4, "12 attempts failed"
    engine.free_slots = 64
    assert [one.failure for one in finished(rollouts, lambda done: len(done) == 4)] == [""] * 4
    rollouts.begin([request(1 + 2 * index) for index in range(8)])
    with pytest.raises(UserCodeFailed, match="^[0-9]+ attempts at rollouts failed in a row"):
        for _ in range(4):
            finished(rollouts, lambda done: len(done) == 8)
            rollouts.begin([request(1 + 2 * index) for index in range(8)])


def test_a_rollout_that_has_had_its_turns_is_truncated_and_not_made_again(start: Any) -> None:
    rollouts, engine = start(max_turns=1)
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert one.truncated
    assert one.turns == len(engine.prompts) == 1


def test_an_environment_whose_turns_are_spent_is_truncated_and_keeps_what_it_earned(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:Again", max_turns=2, tools=[])
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert (one.reward, one.truncated, one.turns) == (0.25, True, 2)


def test_a_step_that_runs_out_of_what_it_iterates_over_is_a_failure(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:Stopped", max_attempts=1, tools=[])
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert one.leaves and "StopIteration" in one.failure


def test_an_agent_with_the_openai_client_is_trained_on_what_it_drew(start: Any) -> None:
    pytest.importorskip("openai")
    rollouts, engine = start(function=None, agent="my_rollouts:agent", tools=[])
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert one.reward == 1.0
    assert one.metrics == {"asked": 1.0}
    assert engine.tokenizer.decode(one.drawn.tolist()).replace(" ", "") == "<call>37*64<eos>"


def test_an_agent_of_a_restored_run_or_of_a_service_that_died_hears_that_its_session_is_gone(
    start: Any, tmp_path: Path
) -> None:
    rollouts, _ = start(function=None, agent="my_rollouts:hangs", tools=[], seal=b"seal")
    rollouts.begin([request(1, seen=str(tmp_path))])
    finished(rollouts, lambda _: (tmp_path / "1").exists())
    rollouts.abort()
    rollouts.begin([request(2, seen=str(tmp_path))])
    finished(rollouts, lambda _: (tmp_path / "2").exists())
    assert asked_by(tmp_path / "1") == 410
    assert asked_by(tmp_path / "2") == 200
    (tmp_path / "2").rename(tmp_path / "old")
    os.kill(child_of_service().pid, signal.SIGKILL)
    finished(rollouts, lambda _: (tmp_path / "2").exists())
    assert asked_by(tmp_path / "old") == 410
    assert asked_by(tmp_path / "2") == 200


def asked_by(agent: Path) -> int:
    base_url, key = agent.read_text().split()
    try:
        with urlopen(Request(f"{base_url}/models", headers={"Authorization": f"Bearer {key}"}), timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.mark.gate
def test_any_program_is_an_agent(start: Any, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, urllib.request as web\n"
        "task = json.loads(os.environ['ASYNCFLOW_TASK'])\n"
        "body = {'model': 'policy', 'messages': [{'role': 'user', 'content': task['prompt']}]}\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "json.load(web.urlopen(web.Request(url, json.dumps(body).encode(), head)))\n"
        "json.dump({'reward': 0.25}, open(os.environ['ASYNCFLOW_RESULT'], 'w'))\n"
    )
    rollouts, _ = start(function=None, command=[sys.executable, str(program)], tools=[])
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert (one.reward, one.turns) == (0.25, 1)


def test_a_program_that_heard_that_its_context_is_spent_is_truncated(start: Any) -> None:
    code = (
        "import json, os, urllib.error, urllib.request as web\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "def ask(text):\n"
        "    body = {'model': 'policy', 'messages': [{'role': 'user', 'content': text}]}\n"
        "    web.urlopen(web.Request(url, json.dumps(body).encode(), head))\n"
        "ask('37*64')\n"
        "try:\n    ask('37*64' * 9)\n    os._exit(3)\n"
        "except urllib.error.HTTPError as error:\n    assert error.code == 400\n"
        "json.dump({'reward': 0.25}, open(os.environ['ASYNCFLOW_RESULT'], 'w'))\n"
    )
    rollouts, _ = start(function=None, command=[sys.executable, "-c", code], tools=[], max_context=24)
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert (one.reward, one.turns, one.truncated) == (0.25, 1, True)


@pytest.mark.parametrize(("length", "fits"), [(2**17 - 16, True), (2**17 - 15, False), (2**22, False)])
def test_a_program_gets_a_row_of_any_length(tmp_path: Path, length: int, fits: bool) -> None:
    code = (
        "import json, os\n"
        "task = open(os.environ['ASYNCFLOW_TASK_FILE']).read()\n"
        "assert os.environ.get('ASYNCFLOW_TASK', task) == task\n"
        "found = {'reward': len(task), 'fits': int('ASYNCFLOW_TASK' in os.environ)}\n"
        "json.dump(found, open(os.environ['ASYNCFLOW_RESULT'], 'w'))"
    )
    assert run_program(code, "x" * length, tmp_path / "1") == (length, {"fits": float(fits)})


@pytest.mark.gate
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.mkfifo(path)", "at most 1048576 bytes"),
        ("os.symlink('/dev/zero', path)", "at most 1048576 bytes"),
        ("os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**34)", "at most 1048576 bytes"),
        ("os.mkdir(path)", "at most 1048576 bytes"),
        ("open(path, 'w').write('[1]')", "an object of numbers"),
        ("open(path, 'w').write('{')", "is not JSON"),
        ("""open(path, 'w').write('{"rewrad": 1}')""", "no `reward`"),
        ("""open(path, 'w').write('{"reward": "great"}')""", "the reward is 'great'"),
    ],
)
def test_a_programs_result_that_cannot_be_used_fails_it_and_holds_nothing_up(
    tmp_path: Path, code: str, words: str
) -> None:
    program = f"import os; path = os.environ['ASYNCFLOW_RESULT']; {code}"
    with pytest.raises(UserCodeFailed, match=words):
        run_program(program, "{}", tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_a_program_that_fails_is_named_with_its_last_line_and_one_that_floods_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "workers.agents.command")
    for _ in range(3):
        with pytest.raises(UserCodeFailed, match="^rollout.agent_command ended with code 1: KeyError: 'question'$"):
            run_program("print('x' * 2**22); {}['question']", "{}", tmp_path / "1")
    (told,) = caplog.messages
    assert told.endswith("KeyError: 'question'\n") and len(told) < 2**14
    with pytest.raises(UserCodeFailed, match="^rollout.agent_command ended with code 3$"):
        run_program("import sys; sys.exit(3)", "{}", tmp_path / "1")
    number = len(caplog.messages)
    for _ in range(3):
        assert run_program("print('well')", "{}", tmp_path / "1") == (None, {})
    assert caplog.messages[number:] == ["a program said\nwell\n"], "once"


def test_output_leaves_nothing_on_the_disk_and_is_not_waited_for(tmp_path: Path) -> None:
    """The program looks how long its own output's file is; a daemon of its own holds the pipe, and prints on."""
    code = (
        "import json, os, stat, subprocess, sys\n"
        "daemon = 'import os, sys, time\\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)\\n'\n"
        "daemon += 'while True: print(7, flush=True)'\n"
        "child = subprocess.Popen([sys.executable, '-c', daemon, str(os.getpid())], start_new_session=True)\n"
        "sys.stdout.write('x' * 2**24)\n"
        "json.dump({'reward': int(stat.S_ISFIFO(os.fstat(1).st_mode)), 'daemon': child.pid}, "
        "open(os.environ['ASYNCFLOW_RESULT'], 'w'))\n"
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    reward, metrics = run_program(code, "{}", tmp_path / "1")
    assert reward == 1.0 and not (tmp_path / "1").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    with contextlib.suppress(ProcessLookupError):  # it may have died of the pipe that nobody reads any more
        os.kill(int(metrics["daemon"]), signal.SIGKILL)


def run_program(program: str, task: str, scratch: Path) -> tuple[float | None, dict[str, float]]:
    """Run Python code as `rollout.agent_command`."""
    setup = Setup(
        model_dir="", renderer=None, function=None, agent=None, command=[sys.executable, "-c", program], tools=[],
        timeout_s=60, max_turns=0, max_tokens=0, max_context=0, max_response_tokens=8, max_attempts=1, num_workers=1,
        scratch="",
    )  # fmt: skip
    start = Start(1, Begin(1, task, 0, 0, 0, 1), 0, "", "", 60.0, str(scratch))
    return asyncio.run(asyncio.wait_for(run_command(setup, start), 60))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("unicode", "ud800", marks=pytest.mark.gate),
        ("inf", "inf"),
        ("role", "model.renderer cannot write .* KeyError: 'tutor'"),
    ],
)
def test_what_cannot_be_passed_on_or_trained_is_a_failure(start: Any, kind: str, words: str) -> None:
    rollouts, _ = start(function="my_rollouts:odd", max_attempts=1)
    rollouts.begin([request(0, kind=kind)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert one.leaves
    assert re.search(words, one.failure)


@pytest.mark.gate
def test_a_judge_says_the_reward_or_fails_the_rollout(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    judge = Judge()
    try:
        models = {"judge": judge.served(retries=0).model_dump()}
        rollouts, _ = start("absent", function="my_rollouts:judged", max_attempts=1, models=models)
        rollouts.begin([request(0)])
        (good,) = finished(rollouts, lambda done: len(done) == 1)
        judge.answers = [(401, b"bad key sk-secret")]
        rollouts.begin([request(1)])
        (bad,) = finished(rollouts, lambda done: len(done) == 1)
    finally:
        judge.close()
    assert (good.reward, "answered 401: bad key ***" in bad.failure) == (7.0, True)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_rollout_over_a_limit_fails_and_names_it_and_others_go_on(start: Any, kind: str) -> None:
    limits = {"max_memory_bytes": 2**32, "max_file_bytes": 2**20}
    rollouts, _ = start(function="my_rollouts:greedy", on_failure="absent", max_attempts=1, **limits)
    rollouts.begin([request(0, kind=kind), request(1, kind="none")])
    failed, other = sorted(finished(rollouts, lambda done: len(done) == 2), key=lambda one: one.index)
    assert f"rollout.max_{kind}_gb" in failed.failure
    assert (other.failure, other.reward) == ("", 0.5)


@pytest.mark.parametrize(
    ("first", "words"), [("", "ended with code 1"), ("signal.signal(signal.SIGXFSZ, signal.SIG_DFL)", "max_file_gb")]
)
def test_a_program_has_the_same_limits(start: Any, first: str, words: str) -> None:
    """Python ignores the signal that other programs die of."""
    code = f"import os, signal\n{first}\nopen(os.environ['ASYNCFLOW_RESULT'], 'wb').write(bytes(2**21))"
    limits = {"max_attempts": 1, "max_file_bytes": 2**20}
    rollouts, _ = start("absent", function=None, command=[sys.executable, "-c", code], tools=[], **limits)
    rollouts.begin([request(0)])
    (one,) = finished(rollouts, lambda done: len(done) == 1)
    assert words in one.failure


def test_a_thread_that_hangs_is_ended_with_its_process(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:sleeps", timeout_s=1.0)
    rollouts.begin([request(0)])
    finished(rollouts, lambda done: len(done) == 1)
    worker = child_of_service(1)
    worker.wait(30)


def test_a_rollout_whose_process_dies_beside_its_steps_pays_in_the_end_though_others_finish(start: Any) -> None:
    rollouts, _ = start(function="my_rollouts:crashes", max_attempts=2)
    rollouts.begin([request(0)])
    done: list[FinishedRollout] = []
    for index in range(1, 12):
        rollouts.begin([request(index)])
        done += finished(rollouts, lambda new: len(new) > 0)
        if any(one.leaves for one in done):
            break
    (bad,) = (one for one in done if one.leaves)
    assert bad.index == 0 and bad.failures == 2
    assert all(one.reward == 1.0 for one in done if one is not bad)


@pytest.mark.parametrize("program", [False, True])
def test_what_users_code_started_ends_with_a_service_that_is_killed(start: Any, tmp_path: Path, program: bool) -> None:
    if program:
        line = f"sleep 1000 & echo $! > {tmp_path}/child.tmp; mv {tmp_path}/child.tmp {tmp_path}/child; wait"
        rollouts, _ = start(function=None, command=["sh", "-c", line], tools=[])
    else:
        rollouts, _ = start(function="my_rollouts:starts")
    rollouts.begin([request(0, seen=str(tmp_path))])
    finished(rollouts, lambda _: (tmp_path / "child").exists())
    child = psutil.Process(int((tmp_path / "child").read_text()))
    os.kill(child_of_service().pid, signal.SIGKILL)
    child.wait(30)


@pytest.mark.gate
def test_a_function_that_cannot_be_imported_is_refused(start: Any) -> None:
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        start(function="nowhere:rollout")


def test_a_process_that_is_killed_while_it_imports_is_started_again(start: Any, tmp_path: Path) -> None:
    """It had not served yet, so nobody else knows of it: it is no mistake in the function."""
    (tmp_path / "killed_once.py").write_text(
        f"import os, pathlib, signal\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\nfrom my_rollouts import *\n"
    )
    rollouts, _ = start(function="killed_once:fails")
    assert (tmp_path / "seen").exists()
    rollouts.begin([request(0)])
    assert finished(rollouts, lambda done: len(done) == 1)


def test_nothing_is_left_of_it(start: Any) -> None:
    rollouts, _ = start()
    service = child_of_service()
    worker = child_of_service(1)
    rollouts.close()
    for process in (service, worker):
        process.wait(30) if process.is_running() else None
    assert subprocess.run(["kill", "-0", str(worker.pid)], capture_output=True, check=False).returncode


def test_no_more_begin_than_the_engine_has_room_for_unless_they_take_long_to_call(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, engine = start()
    engine.free_slots = 8
    rollouts.begin([request(index) for index in range(6)])  # none has called yet
    assert rollouts.free_slots == 8 + 2 - 6  # two more than its places: calls wait for those that get free next
    monkeypatch.setattr("workers.rollout.functions._FIRST_CALL_S", 0.0)
    assert rollouts.free_slots == 8 + 2


def test_calls_of_older_rollouts_go_first(start: Any) -> None:
    rollouts, engine = start(function="my_rollouts:by_number")
    engine.free_slots = 0
    rollouts.begin([request(index) for index in (2, 0, 1)])
    finished(rollouts, lambda _: rollouts.figures()["waiting"] == 3)
    engine.free_slots = 64
    finished(rollouts, lambda done: len(done) == 3)
    spoken = [engine.tokenizer.decode(ids)[len("<user>")] for ids in engine.prompts]
    assert spoken == ["0", "1", "2"]


def test_what_has_finished_does_not_wait_for_the_engine(start: Any) -> None:
    rollouts, engine = start(function="my_rollouts:skips_odd")
    waited = threading.Event()

    def never_ends(wake: threading.Event) -> list[Generation]:
        waited.set()
        wake.wait(0.05)
        return []

    engine.step = never_ends
    rollouts.begin([request(0)])
    finished(rollouts, lambda _: bool(engine.running))  # and it never ends
    rollouts.begin([request(1)])
    never, done = threading.Event(), []  # type: tuple[threading.Event, list[FinishedRollout]]
    for _ in range(2000):
        waited.clear()
        if done := rollouts.step(never):
            break
    assert done
    assert not waited.is_set()


@pytest.mark.gate
def test_what_rollouts_do_is_counted_and_recorded(start: Any, tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "rollout-0-0.jsonl", HostClock.from_wall_clock())
    rollouts, _ = start(spans=timeline)
    rollouts.begin([request(0), request(1)])
    assert rollouts.figures()["live"] == 2
    finished(rollouts, lambda done: len(done) == 2)
    figures = rollouts.figures()
    assert (figures["live"], figures["in_tools"], figures["turns"]) == (0, 0, 4)
    assert figures["in_tools_s"] > 0
    timeline.close()
    spans = lines(tmp_path / "rollout-0-0.jsonl")[:-1]
    of_first = [span for span in spans if span["id"] == 1]
    assert [span["name"] for span in of_first] == ["turn", "turn", "rollout"]
    assert of_first[2]["turns"] == 2
    assert all(of_first[2]["start"] <= span["start"] <= span["end"] <= of_first[2]["end"] for span in of_first)
