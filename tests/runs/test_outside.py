"""Processes outside of a run take part in it, and leave or die without harm."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import asyncflow
from asyncflow.job import Job
from launcher.config.paths import find_recipe
from tests.support.completions_server import Answer, Body, CompletionsServer, reply
from workers.settings.run import RunConfig

from . import command

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER = """
from asyncflow.settings import Settings
from workers.engines.fsdp.sharding import FsdpEngine

class Mine(FsdpEngine):
    class Config(Settings):
        seed: int = 3

    def __init__(self, setup):
        temperature = setup.run.rollout.temperature
        seed = setup.options.seed
        super().__init__(setup.model_dir, actor=setup.actor, temperature=temperature, device=setup.device, seed=seed)
"""
SMALL = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0", "--steps", "3")


def started(stack: ExitStack, example: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start an example; it is gone when the stack is."""
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / example, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def kill_when_it_says(words: str, process: "subprocess.Popen[str]") -> None:
    """Kill an example in the middle of its work, of which its first line tells."""
    assert process.stdout is not None
    assert words in process.stdout.readline()
    process.kill()


def ended_well(launched: "subprocess.Popen[str]", outside: "subprocess.Popen[str]") -> tuple[str, str, str]:
    """Wait until a run, and then the process outside, have ended with code 0; return what they wrote."""
    out, err = launched.communicate(timeout=command.DEADLINE_S)
    assert launched.returncode == 0, err
    said, _ = outside.communicate(timeout=60)
    assert outside.returncode == 0, said
    return out, err, said


def test_reward_services_outside_score_a_run_though_one_leaves_and_one_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    roles = ("--roles", "rollout:1,actor:1,reward:0")
    with command.started("--run-dir", "run", *SMALL, *roles, cwd=tmp_path) as launched, ExitStack() as stack:
        command.wait_until((run_dir / "job.json").exists, "job.json")
        job = Job.load(run_dir)
        with asyncflow.connect(f"{job.store_host}:{job.store_port}", job.secret, timeout_s=90) as run:
            lease = next(iter(run.stream("rewards", num_rows=16)))
            assert len(lease.responses) == len(lease) > 0  # it leaves with them in hand
        kill_when_it_says("scored", started(stack, "external_reward.py", str(run_dir)))
        last = started(stack, "external_reward.py", str(run_dir))
        out, err, said = ended_well(launched, last)
    command.check_ledger(run_dir, groups_per_step=8, last=3)
    metrics = command.lines(run_dir / "metrics.jsonl")
    assert any(f"outside/reward-{last.pid}/mean" in line for line in metrics)
    logs = [path.read_text() for path in run_dir.rglob("*") if path.is_file() and path.suffix in (".log", ".jsonl")]
    assert not [text for text in (*logs, out, err, said) if job.secret in text]


def scorer(path: Path) -> Answer:
    """What vLLM's server says of a prompt that a model in a directory is asked about."""
    model = AutoModelForCausalLM.from_pretrained(path)

    def answer(handler: BaseHTTPRequestHandler, body: Body) -> None:
        assert body["prompt_logprobs"] == 0 and body["temperature"] == 1
        with torch.no_grad():
            found = model(torch.tensor([body["prompt"]])).logits[0].float().log_softmax(-1)
        told = [
            {str(token): {"logprob": float(found[place, token]), "rank": 1}}
            for place, token in enumerate(body["prompt"][1:])
        ]
        reply(handler, 200, {"choices": [{"text": "", "prompt_logprobs": [None, *told]}]})

    return answer


def test_a_teacher_behind_a_server_scores_what_the_student_drew(tmp_path: Path) -> None:
    """The student itself, behind the server: it is no distance away, until it moves."""
    run_dir, model = tmp_path / "run", find_recipe("quickstart").parent / "quickstart" / "model"
    server = CompletionsServer(scorer(model))
    server.adapters[str(model)] = ""  # the names under which models are served
    roles = ("--roles", "rollout:1,actor:1,teacher:0")
    algorithm = ("--set", "algorithm={name: distill, teacher_coef: 1.0}")
    with (
        command.started("--run-dir", "run", *SMALL, *roles, *algorithm, cwd=tmp_path) as launched,
        ExitStack() as stack,
    ):
        stack.callback(server.close)
        command.wait_until((run_dir / "job.json").exists, "job.json")
        other = shutil.copytree(model, tmp_path / "other")
        (other / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace('"7"', '"~"'))
        refused = started(stack, "external_teacher.py", str(run_dir), server.url, str(other))
        said, _ = refused.communicate(timeout=command.DEADLINE_S)
        assert refused.returncode == 1 and "has other tokens than the policy, e.g. for '7'" in said, said
        kill_when_it_says("scored", started(stack, "external_teacher.py", str(run_dir), server.url, str(model)))
        last = started(stack, "external_teacher.py", str(run_dir), server.url, str(model))
        ended_well(launched, last)
    command.check_ledger(run_dir, groups_per_step=8, last=3)
    assert abs(command.lines(run_dir / "metrics.jsonl")[0]["teacher_kl"]) < 1e-6


def test_generators_outside_make_every_sample_though_they_are_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    roles = ("--roles", "rollout:0,actor:1,reward:1")
    with command.started("--run-dir", "run", *SMALL, *roles, cwd=tmp_path) as launched, ExitStack() as stack:
        command.wait_until((run_dir / "job.json").exists, "job.json")
        for _ in range(2):
            kill_when_it_says("in hand", started(stack, "external_generator.py", str(run_dir)))
        last = started(stack, "external_generator.py", str(run_dir))
        ended_well(launched, last)
    command.check_ledger(run_dir, groups_per_step=8, last=3)
    for line in command.lines(run_dir / "metrics.jsonl"):
        assert line["staleness_max"] <= line["staleness_bound"]
        difference = line["rollout_log_prob_diff_mean"]  # its tokens are as likely as it says; null: none is on-policy
        assert difference is None or difference < 1e-4


def test_every_fed_row_is_trained_once_though_the_feeder_and_the_lead_controller_are_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rows = [{"prompt": f"{k // 10}+{k % 10}=", "answer": str(k // 10 + k % 10)} for k in range(22)]
    given = [json.dumps(row) + "\n" for row in rows]
    settings = ("--set", "data.path=null", "--set", "data.source=feed", "--set", "schedule.rollout_batch_size=4")
    with (
        command.started("--run-dir", "run", *settings, "--steps", "50", cwd=tmp_path) as launched,
        ExitStack() as stack,
    ):
        command.wait_until((run_dir / "job.json").exists, "job.json")
        killed = started(stack, "external_prompts.py", str(run_dir), "sums")
        assert killed.stdin is not None
        killed.stdin.writelines(given[:8])
        killed.stdin.flush()
        kill_when_it_says("fed 8 rows", killed)
        command.wait_until(lambda: command.last_step(run_dir) == 2, "the steps that 8 rows fill")
        command.kill_gang(launched.pid, run_dir, "controller-0")  # while the run waits for more
        last = started(stack, "external_prompts.py", str(run_dir), "sums")
        said, _ = last.communicate("".join(given), timeout=command.DEADLINE_S)
        assert (last.returncode, said.splitlines()) == (0, ["fed 16 rows", "fed 22 rows"])
        out, err = launched.communicate(timeout=command.DEADLINE_S)
    assert launched.returncode == 0, err
    assert "the feed ended: its last 2 rows fill no step" in out + err
    command.check_ledger(run_dir, groups_per_step=4, last=5)
    assert [line["row"] for line in command.lines(run_dir / "feed.jsonl") if "row" in line] == rows


def test_an_engine_outside_of_the_package_generates_what_is_trained(tmp_path: Path) -> None:
    own = ("--set", "rollout.engine=custom_engine:PlainEngine", "--set", f"code_directory={EXAMPLES}")
    roles = ("--roles", "rollout:1,actor:1", "--set", "rollout.engine_options.tokens_per_step=2")
    finished = command.run("--run-dir", "run", *SMALL, *roles, *own, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=3)
    for line in command.lines(tmp_path / "run" / "metrics.jsonl"):
        difference = line["rollout_log_prob_diff_mean"]  # null: none is on-policy
        assert difference is None or difference < 1e-4


def test_an_engine_outside_of_the_package_trains_saves_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "my_trainer.py").write_text(TRAINER)
    own = ("--set", "actor.engine=my_trainer:Mine", "--set", f"code_directory={tmp_path}")
    sizes = ("--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=2")
    first = command.run(
        "--run-dir", "run", *sizes, *own, "--steps", "2", "--roles", "rollout:1,actor:1,ref:1", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    second = command.run("--resume", "latest", "--run-dir", "run", "--steps", "3", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=8, last=3)
    assert RunConfig.load(tmp_path / "run").actor.engine_options == {"seed": 3}
    lines = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["lineage"]) for line in lines] == [(1, 0), (2, 0), (3, 1)]
    for line in lines:
        difference = line["rollout_log_prob_diff_mean"]  # its weights are what the generator has; null: none on-policy
        assert difference is None or difference < 1e-4
