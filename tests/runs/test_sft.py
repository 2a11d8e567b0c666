"""Supervised fine-tuning by the installed command: killed and resumed, on two ranks, and RL from what it saved."""

import json
import subprocess
from pathlib import Path

import pytest

from . import command

SFT = ("sft", "--set", "schedule.mode=periodic", "--set", "deterministic=true", "--set", "checkpoint.interval=4")


def cross_entropies(run_dir: Path) -> list[float]:
    return [line["cross_entropy"] for line in command.lines(run_dir / "metrics.jsonl")]


def test_killed_run_goes_on_to_the_same_weights_and_rl_begins_with_them(tmp_path: Path) -> None:
    done = command.run(*SFT, "--run-dir", "whole", "--steps", "12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_verified(tmp_path / "whole", last=12)

    killed = tmp_path / "killed"
    with command.started(*SFT, "--run-dir", "killed", "--steps", "12", cwd=tmp_path) as process:
        command.wait_until(lambda: command.last_step(killed) >= 5, "step 5")
        process.kill()
    done = command.run("sft", "--resume", "killed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command.check_verified(killed, last=12)
    assert cross_entropies(killed) == cross_entropies(tmp_path / "whole")
    whole, other = (
        (tmp_path / name / "checkpoints/step_000012/hf/model.safetensors").read_bytes() for name in ("whole", "killed")
    )
    assert whole == other

    model = f"model.path={killed}/checkpoints/step_000012/hf"
    rl = ("quickstart", "--run-dir", "rl", "--steps", "2", "--roles", "rollout:1,actor:1,ref:1", "--set", model)
    done = command.run(*rl, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = command.lines(tmp_path / "rl/metrics.jsonl")[0]
    assert first["accuracy"] > 0.8, "the untrained model is right about one sum in three"


def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    for ranks in (1, 2):
        placed = ("--roles", f"actor:{ranks}", "--set", "actor.micro_batch_size=16")
        done = command.run(*SFT, "--run-dir", f"r{ranks}", "--steps", "6", *placed, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (cross_entropies(tmp_path / name) for name in ("r1", "r2"))
    assert two == pytest.approx(one, rel=1e-5)


def test_conversations_are_trained_by_the_models_template(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(5)
        for b in range(5)
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    quickstart = subprocess.run(
        ["python", "-c", "import configs; print(configs.__path__[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run(["cp", "-r", f"{quickstart}/quickstart/model", model], check=True)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content + '<eos>' if m.role == 'assistant' else m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '=' }}{% endif %}"
    )
    settings = (f"model.path={model}", "data.path=talk.jsonl", "data.completion_field=messages")
    given = [word for one in (*settings, "data.chat_template=true") for word in ("--set", one)]
    done = command.run("sft", *given, "--steps", "2", cwd=tmp_path)
    assert (done.returncode, "in another way" in done.stderr) == (2, True), "it writes no = before an answer"
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '=' + m.content + '<eos>' if m.role == 'assistant' else m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '=' }}{% endif %}"
    )
    done = command.run("sft", *given, "--run-dir", "run", "--steps", "30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = cross_entropies(tmp_path / "run")
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ("{name: distill}", "rollout:1,actor:1,ref:1"),
        ("{name: distill, top_k: 6}", "rollout:1,actor:1"),
        (
            "{name: distill, teacher_coef: 1.0, kl_coef: 0.001, top_k: 6, reward_coef: 0.1}",
            "rollout:1,actor:2,teacher:2",
        ),
    ],
)
def test_a_student_comes_near_its_teacher(tmp_path: Path, algorithm: str, roles: str) -> None:
    done = command.run("sft", "--run-dir", "teacher", "--steps", "40", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own = "teacher" in roles
    settings = (
        "--set",
        f"algorithm={algorithm}",
        "--set",
        f"{'teacher' if own else 'ref'}.path={tmp_path}/teacher/checkpoints/step_000040/hf",
        *(("--set", "teacher.engine=fsdp", "--set", "teacher.shards=2") if own else ()),
    )
    placed = ("--roles", roles, "--steps", "12", "--run-dir", "student")
    done = command.run("quickstart", *settings, *placed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = command.lines(tmp_path / "student/metrics.jsonl")
    to_teacher = "teacher_kl" if own else "kl"
    assert steps[-1][to_teacher] < 0.4 * steps[0][to_teacher]
    assert steps[-1]["accuracy"] > steps[0]["accuracy"] + 0.2
    assert "useless" not in done.stderr + done.stdout, "it is meant to move"
