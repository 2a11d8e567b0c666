"""The pages that name every key: they must stay whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.config.key_reference import algorithms_as_markdown, all_keys, as_markdown, keys_of
from weightsync.version import Version
from workers.algorithms.parts import MicroLoss, PolicyLoss, PolicyParts, PPOClip, Teacher, ValueLoss
from workers.engines.base import StepStats
from workers.records.ledger_file import DeadLetterLine, FilteredLine, TrainedLine
from workers.records.step_totals import StepTotals, UpdateTotals, numbers
from workers.rollout.evaluate import Answer, evaluation_line
from workers.trainer.step_trainer import TrainedModel

from .test_records import finished_step, recorder

DOCS = Path(__file__).parents[2] / "docs"


def named_in(section: str) -> set[str]:
    """Return the keys that a section of docs/metrics.md has in its first column."""
    page = (DOCS / "metrics.md").read_text()
    (text,) = [part for part in page.split("\n## ") if part.startswith(f"`{section}`")]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def losses() -> list[tuple[MicroLoss, str]]:
    """Return both losses, of one token, after their call."""
    one, parts = torch.ones(1), PolicyParts((PPOClip(0.2, 0.2),))
    teacher = Teacher(one, 0.0, is_reference=False)
    policy = PolicyLoss(parts, (0.0, "k3"), torch.ones(1, dtype=torch.int32), one, one, one, teacher=teacher)
    policy(one, one)
    value = ValueLoss(one, one, one, clip=None, coef=1.0)
    value(one)
    return [(policy, "loss"), (value, "critic")]


def test_page_of_the_configuration_is_what_the_models_say() -> None:
    assert (DOCS / "configuration.md").read_text() == as_markdown(all_keys()), (
        "make it anew: asyncflow config --markdown > docs/configuration.md"
    )


def test_page_of_the_algorithms_has_the_docstrings_of_their_classes() -> None:
    assert algorithms_as_markdown() in (DOCS / "algorithms.md").read_text(), (
        "replace the list behind <!-- generated -->: asyncflow config algorithms"
    )


def test_every_key_says_what_it_means() -> None:
    assert [key.path for key in all_keys() if not key.text] == []


def test_keys_of_lists_and_algorithms_are_there() -> None:
    keys = {(key.path, key.variant): key for key in all_keys()}
    assert keys["tasks[].name", ""].default == "required"
    assert keys["algorithm.eps_clip", "gspo"].default == "0.0003"
    assert keys["algorithm.entropy_coef", "all but sft"].default == "0.0"
    assert keys["algorithm.off_policy.cap", "all but sft"].default == "2.0"
    assert keys["actor.lr", ""].type == "float (> 0)"
    assert keys["actor.lr", ""].default == "1e-06"


def test_keys_that_an_algorithm_refuses_are_not_said_to_be_its_own() -> None:
    told = {key.path.split(".")[1] for key in all_keys() if "sft" in key.variant.split() and "but" not in key.variant}
    assert told == {"loss_normalization"}


def test_keys_that_the_pages_name_exist() -> None:
    """`importing.md` names others' keys. What begins like a section may also be a file, a module or a name of `tq`."""
    keys = {key.path.replace("[]", "") for key in all_keys()}
    known = keys | {key.rpartition(".")[0] for key in keys}
    sections = {key.split(".")[0] for key in keys if "." in key}
    unknown = []
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for name in re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)+)(?=[`:= ])", page.read_text()):
            section, rest = name.split(".", 1)
            module = (DOCS.parent / section / rest.split(".")[0]).with_suffix(".py")
            if section not in sections or name in known or module.exists() or page.name == "importing.md":
                continue
            if not (
                name.endswith((".py", ".safetensors", ".json")) or module.with_suffix("").is_dir() or name == "tq.start"
            ):
                unknown.append(f"{page.name}: {name}")
    assert unknown == []


def test_figures_that_first_questions_name_exist() -> None:
    section = (DOCS / "questions.md").read_text().split("## Which figure")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 10
    assert named <= named_in("metrics.jsonl")


def test_section_is_found_and_a_wrong_one_gets_a_hint() -> None:
    assert {key.path for key in keys_of("actor.megatron")} < {key.path for key in keys_of("actor")}
    assert [key.path for key in keys_of("actor.lr")] == ["actor.lr"]
    with pytest.raises(ConfigError, match="no section or key 'actr'; did you mean 'actor'"):
        keys_of("actr")


def test_command_prints_them() -> None:
    done = CliRunner().invoke(main, ["config", "checkpoint"])
    assert done.exit_code == 0
    assert "checkpoint.interval: int (>= 0) = 20\n    Save every `interval` steps" in done.output
    assert CliRunner().invoke(main, ["config", "actr"]).exit_code == 2


def test_every_key_that_a_run_writes_is_explained(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    vars(records._context)["paused_s"] = 1.0  # a pause during the step
    step = finished_step(1)
    step.log_of_model(TrainedModel.CRITIC).add_update(UpdateTotals(), scale=1.0, stats=StepStats(1.0, 1e-3))
    for loss, of in losses():
        step.totals.add_loss(*numbers([loss.stats]), of)
    records.update_made(1, 1, 1)
    records.write(step)
    records.close()
    written = {name: set(json.loads((tmp_path / name).read_text())) for name in ("metrics.jsonl", "updates.jsonl")}
    supervised = StepTotals({"supervised": 1, "samples": 1, "loss/tokens": 1, "loss/cross_entropy": 1})
    written["metrics.jsonl"] |= set(supervised.to_metrics())
    for name, keys in written.items():
        assert keys == named_in(name) - {"NAME"}, name
    lines = (TrainedLine, FilteredLine, DeadLetterLine)
    fields = {field for line in lines for field in line.__struct_fields__} | {"filtered", "dead_letter"}
    assert fields == named_in("ledger.jsonl")
    answer = Answer("", 0, 0, 1.0, correct=True, tokens=3, truncated=False, seconds=1.0)
    assert {*vars(answer), "response", "ground_truth"} == named_in("answers/GANG.jsonl")
    line = evaluation_line([answer], version=Version(0, 1), time_s=1.0)
    assert set(line) == {name for name in named_in("evaluation.jsonl") if not name.startswith("pass_at_K")} - {"NAME"}
