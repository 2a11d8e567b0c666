"""Part `sessions`: how many rollouts of four turns one instance holds, with an engine that sleeps.

Service, user worker and engine process are real; an engine's turn takes two seconds, and between two of them a
rollout waits as long on average. A size holds when no turn failed and the slowest hundredth waits at most twice the
median.
"""

import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

SIZES = (250, 500, 1000, 2000)
TURNS = 4
TURN_S = 2.0
_TOKENS = 100
_DEADLINE_S = 120.0
_MODULE = """
import asyncio, random, time

async def rollout(task, model, context):
    chance = random.Random(task.index)
    chat = model.chat([{{"role": "user", "content": "What is next?"}}])
    await asyncio.sleep(chance.uniform(0, 2 * {turn_s}))
    for turn in range({turns}):
        began = time.monotonic()
        await chat.reply()
        context.log(f"turn_{{turn}}", time.monotonic() - began)
        await asyncio.sleep(chance.uniform(0, 2 * {turn_s}))
        chat.add({{"role": "user", "content": "the result of a tool, some words long: " + "more words " * 20}})
    return chat.sample(reward=1.0)
"""


def measure() -> dict[str, float]:
    """Return `concurrent_sessions`, the largest of some sizes that holds, and what was measured at 1,000."""
    found: dict[str, float] = {"concurrent_sessions": 0}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "four_turns.py").write_text(_MODULE.format(turn_s=TURN_S, turns=TURNS))
        sys.path.append(directory)  # user workers search there, too
        _save_tokenizer(root / "model")
        for size in SIZES:
            waits, failed, cpu_ms = _roll_out(root, size)
            median = statistics.median(waits)
            p99 = sorted(waits)[int(0.99 * len(waits))]
            text = f"median {median:.2f} s, p99 {p99:.2f} s, {failed} failed, {cpu_ms:.2f} ms of a core a turn"
            print(f"{size} sessions: {text}", file=sys.stderr, flush=True)
            if size == 1000:
                found |= {"sessions_turn_median_s": median, "sessions_turn_p99_s": p99, "sessions_turn_cpu_ms": cpu_ms}
            if failed or p99 > 2 * median:
                break
            found["concurrent_sessions"] = size
    return found


def _roll_out(root: Path, size: int) -> tuple[list[float], int, float]:
    """Return every turn's wait (s), rollouts that failed, and processor time of all processes per turn (ms)."""
    import psutil

    from workers.rollout.functions import FunctionRollouts
    from workers.rows.finished import RolloutRequest

    wake = threading.Event()
    rollouts = FunctionRollouts(_engine(size), _setup(root), max_running=size, on_failure="zero", wake=wake)
    try:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = _cpu_s(family)
        chance = random.Random(0)
        nothing = torch.tensor([1])
        rollouts.begin([RolloutRequest(k, k, chance.getrandbits(64), nothing, "{}", k, 0) for k in range(size)])
        finished: list[Any] = []
        deadline = time.monotonic() + _DEADLINE_S
        while len(finished) < size and time.monotonic() < deadline:
            wake.clear()
            finished += rollouts.step(wake)
        cpu_ms = 1e3 * (_cpu_s(family) - before) / (size * TURNS)
    finally:
        rollouts.close()
    good = [one for one in finished if len(one.metrics) == TURNS]
    return [wait for one in good for wait in one.metrics.values()] or [0.0], size - len(good), cpu_ms


def _engine(num_slots: int) -> Any:
    from workers.engines.sim.decode_times import SimLengths
    from workers.engines.sim.engine import SimGenerateEngine
    from workers.settings.sim import SimConfig

    sim = SimConfig(lengths="constant", mean_tokens=_TOKENS, decode_s_per_token=TURN_S / _TOKENS)
    lengths = SimLengths(sim, samples_per_step=num_slots, seed=0)
    return SimGenerateEngine(sim, lengths, num_slots=num_slots, max_response_tokens=_TOKENS)


def _setup(root: Path) -> Any:
    from workers.agents.wire import Setup

    return Setup(
        model_dir=str(root / "model"), renderer=None, function="four_turns:rollout", agent=None, command=[], tools=[],
        timeout_s=_DEADLINE_S, max_turns=0, max_tokens=0, max_context=0, max_response_tokens=_TOKENS, max_attempts=1,
        num_workers=1, scratch=str(root / "scratch"),
    )  # fmt: skip


def _save_tokenizer(model_dir: Path) -> None:
    from tests.support.chat_templates import tokenizer

    made = tokenizer("qwen2.5")
    made.save_pretrained(model_dir)
    config = {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": made.eos_token_id}
    (model_dir / "config.json").write_text(json.dumps(config))


def _cpu_s(family: list[Any]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in family)
