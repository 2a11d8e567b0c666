"""Distillation from several teachers beside a reference, whose processes are killed, in a run that is resumed."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import configs
from asyncflow.checkpoint_files import CheckpointMeta
from workers.data.model_files import weights_fingerprint

from . import command

QUICKSTART = Path(configs.__path__[0]) / "quickstart"
SIZE = 4
DEADLINE_S = 270
"""Of one run, also on a machine that others use."""
SHARPER = {"small": 1.5, "large": 0.5, "reference": 0.8}
"""Model -> how much larger its logits are than the policy's; the first two teach the sums of these sizes."""


def make_model(target: Path, sharper: float) -> Path:
    shutil.copytree(QUICKSTART / "model", target)
    weights = load_file(target / "model.safetensors")
    head = "lm_head.weight"
    save_file({**weights, head: weights[head] * sharper}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def source_of(prompt: str) -> str:
    return "small" if sum(map(int, prompt.rstrip("=").split("+"))) < 9 else "large"


@torch.no_grad()
def divergences(run_dir: Path, paths: Mapping[str, Path]) -> dict[int, tuple[float, float]]:
    """Return step -> mean k3 of its drawn tokens to the teacher of each row's source, and to the reference."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    # A row that was generated again is the same one: neither its random numbers nor the weights have changed.
    rows = {line["index"]: line for path in run_dir.glob("samples/rollout-*.jsonl") for line in command.lines(path)}
    texts: dict[tuple[str, str, bool], int] = {}
    place = [texts.setdefault((row["prompt"], row["response"], row["truncated"]), len(texts)) for row in rows.values()]
    tokens = torch.zeros(len(texts), 12, dtype=torch.long)  # behind the end, where no token looks
    drawn = torch.zeros(len(texts), 11, dtype=torch.bool)
    for line, (prompt, response, truncated) in enumerate(texts):
        begin = tokenizer(prompt)["input_ids"]
        whole = [*begin, *tokenizer(response)["input_ids"], *([] if truncated else [tokenizer.eos_token_id])]
        tokens[line, : len(whole)] = torch.tensor(whole)
        drawn[line, len(begin) - 1 : len(whole) - 1] = True
    found = {}
    for name, path in paths.items():
        logits = AutoModelForCausalLM.from_pretrained(path)(tokens).logits[:, :-1]
        found[name] = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    is_small = torch.tensor([source_of(prompt) == "small" for prompt, _, _ in texts])[:, None]
    teacher = torch.where(is_small, found["small"], found["large"])
    teacher_apart, apart = found["policy"] - teacher, found["policy"] - found["reference"]
    of_steps: dict[int, list[int]] = {}
    for row, line in zip(rows.values(), place, strict=True):
        of_steps.setdefault(row["step"], []).append(line)
    k3 = [torch.expm1(-each) + each for each in (teacher_apart, apart)]
    return {
        step: (float(k3[0][lines][drawn[lines]].mean()), float(k3[1][lines][drawn[lines]].mean()))
        for step, lines in of_steps.items()
    }


def test_prompts_without_answers_are_learned_from_and_nothing_is_said_of_their_rewards(tmp_path: Path) -> None:
    prompts = [{"prompt": line["prompt"]} for line in command.lines(QUICKSTART / "train.jsonl")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    teacher = make_model(tmp_path / "teacher", 0.5)
    settings = (
        "algorithm={name: distill, top_k: 8}",
        f"ref.path={teacher}",
        "data.path=prompts.jsonl",
        "actor.lr=3e-3",
    )
    given = [word for setting in (*settings, "data.ground_truth_field=null") for word in ("--set", setting)]
    done = command.run("quickstart", *given, "--steps", "4", "--run-dir", "run", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    steps = command.lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["reward_mean"], line["accuracy"], line["reward_failures"]) for line in steps] == [(None, None, 0)] * 4
    assert min(line["kl"] for line in steps) < 0.7 * steps[0]["kl"]  # it comes near, and at this rate may pass by


@pytest.mark.timeout(900)
def test_rows_have_their_own_teacher_and_reference_though_both_are_killed_and_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    """The policy does not move, so each step's divergences follow from its rows and the models' files."""
    models = {name: make_model(tmp_path / name, sharper) for name, sharper in SHARPER.items()}
    models["policy"] = QUICKSTART / "model"
    prompts = command.lines(QUICKSTART / "train.jsonl")
    for name in ("small", "large"):
        chosen = [row for row in prompts if source_of(row["prompt"]) == name]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    settings = (
        "algorithm={name: distill, teacher_coef: 1.0, kl_coef: 0.1}",
        f"teacher={{path: {models['small']}, sources: {{large: {{path: {models['large']}}}}}}}",
        f"ref.path={models['reference']}",
        "data={max_prompt_tokens: 8, mixture: [{name: small, path: small.jsonl}, {name: large, path: large.jsonl}]}",
        *("actor.lr=1e-30", "schedule.max_staleness=2", f"schedule.rollout_batch_size={SIZE}"),
        *(f"rollout.samples_per_step={SIZE}", "checkpoint.interval=0"),
    )
    given = [word for setting in settings for word in ("--set", setting)]
    placed = ("--roles", "rollout:1,actor:1,ref:1,teacher:1", "--run-dir", "run")
    run_dir = tmp_path / "run"
    recipe = ("quickstart", *given, *placed)
    with command.started(*recipe, "--steps", "100000", cwd=tmp_path) as process:
        for step, gang in ((2, "teacher-0"), (4, "ref-0")):
            command.wait_until(
                lambda step=step: command.last_step(run_dir) >= step,  # type: ignore[misc]
                f"step {step}",
                deadline_s=DEADLINE_S,
            )
            command.kill_gang(process.pid, run_dir, gang)
        came = command.last_step(run_dir)
        command.wait_until(lambda: command.last_step(run_dir) >= came + 3, "three more steps", deadline_s=DEADLINE_S)
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, err
    for role in ("teacher", "ref"):
        assert f"{role} rank 0 failed: ended by SIGKILL; it starts again" in out
    stopped = command.last_step(run_dir)
    meta = CheckpointMeta.read(run_dir / "checkpoints" / f"step_{stopped:06d}")
    assert meta.scoring_weights == {str(models[name]): weights_fingerprint(models[name]) for name in SHARPER}

    shutil.move(models["large"], tmp_path / "kept")
    make_model(models["large"], 2.0)
    last = stopped + 3
    refused = command.run("--resume", "run", "--steps", str(last), cwd=tmp_path, deadline_s=DEADLINE_S)
    assert refused.returncode == 2
    assert "teacher.sources.large.path: " in refused.stderr and "has other weights than the run began" in refused.stderr
    shutil.rmtree(models["large"])
    shutil.move(tmp_path / "kept", models["large"])
    resumed = command.run("--resume", "run", "--steps", str(last), cwd=tmp_path, deadline_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr

    command.check_ledger(run_dir, groups_per_step=SIZE, last=last)
    expected = divergences(run_dir, models)
    for line in command.lines(run_dir / "metrics.jsonl"):
        found = (line["teacher_kl"], line["kl"])
        assert found == pytest.approx(expected[line["step"]], rel=1e-5), f"step {line['step']}"
