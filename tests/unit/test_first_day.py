"""The first-day pages: every command, variable and version on them is right, or marked as a vendor's."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from asyncflow.errors import ConfigError
from launcher.cli.commands import main
from launcher.cli.launch import launch
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.plan.cost_model import find_device

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / f"first-day-on-{device}.md" for device in ("ascend", "cuda")]
MARK = "vendor's documentation"
RECORDS = ("## What has run", "## Never run")
"""Sections about the past, not to be followed."""
SHELL = {"python3", ".", "ulimit", "git"}
LIBRARIES = {
    "torch": "torch", "torch-npu": "torch", "vLLM": "vLLM", "vllm-ascend": "vLLM", "transformers": "transformers",
    "triton-ascend": "vLLM", "megatron-core": "Megatron", "CANN": "driver", "CUDA": "driver", "Python": "Python",
}  # fmt: skip
"""Name on a page -> row of the table of versions in docs/devices.md."""


def units(page: str) -> list[str]:
    """Return what has to be checked: paragraphs, list items and programs, without those marked as a vendor's."""
    for title in RECORDS:
        page = re.sub(rf"^{title}.*?(?=^## |\Z)", "", page, flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for number, part in enumerate(re.split(r"^```\n", page, flags=re.MULTILINE)):
        if number % 2:  # a program belongs to the words before it
            found.append(f"{MARK}\n{part}" if found and MARK in " ".join(found[-1].split()) else part)
        else:
            found += [each for each in re.split(r"\n\n|\n(?=[-#|] ?)", part.strip()) if each]
    return [each for each in found if MARK not in " ".join(each.split())]


def programs(path: Path) -> list[str]:
    """Return the lines to type which are not marked."""
    page = path.read_text()
    checked = units(page)
    typed = [part for part in re.split(r"^```\n", page, flags=re.MULTILINE)[1::2] if part in checked]
    return [line for part in typed for each in part.splitlines() if (line := each.split("  #")[0].strip())]


def parse(words: list[str]) -> dict[str, object]:
    """Return what our own commands understand of these words.

    Raises:
        click.UsageError: an option or a command does not exist, or has no such value.
    """
    if words[0] == "asyncflow-launch":
        return launch.make_context("asyncflow-launch", words[1:]).params
    context = click.Context(main, info_name="asyncflow")
    command = main.get_command(context, words[1])
    assert command is not None, f"asyncflow {words[1]}"
    return command.make_context(words[1], words[2:], parent=context).params


def check(line: str) -> None:
    """Fail on a command that would be refused, or that nobody can check."""
    words = shlex.split(line.split(" > ")[0])
    if words[0] in ("asyncflow", "asyncflow-launch"):
        given = parse(words)
        name, overrides = given.get("config"), given.get("overrides", ())
        if isinstance(name, tuple):  # of a launch, with `sft` in front of it or not
            name = name[-1] if name else None
        assert name is None or isinstance(name, str)
        assert isinstance(overrides, tuple)
        quickstart = find_recipe("quickstart").parent / "quickstart"
        there = (f"model.path={quickstart / 'model'}", f"data.path={quickstart / 'train.jsonl'}")
        load_config(find_recipe(name or "quickstart"), overrides=(*overrides, *there))
        if words[1] == "plan":
            find_device(str(given["device"]))
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = {extra for word in words for group in re.findall(r"\.\[(.*)\]", word) for extra in group.split(",")}
        assert extras <= project["optional-dependencies"].keys()
        assert all((ROOT / word).is_file() for word in words if word.endswith(".txt"))
        assert not [word for word in words[2:] if not word.startswith(("-", ".", "constraints/"))], line
    else:
        assert words[0] in SHELL, f"{line}: check it here, or mark it: from the {MARK}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_would_be_accepted(path: Path) -> None:
    lines = programs(path)
    assert len([line for line in lines if line.startswith("asyncflow")]) > 10
    for line in lines:
        check(line)
    named = {word for unit in units(path.read_text()) for word in re.findall(r"`asyncflow ([\w-]+)", unit)}
    assert named <= main.commands.keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_variables_are_those_that_our_sources_know(path: Path) -> None:
    own = "".join(
        source.read_text()
        for package in ("asyncflow", "launcher", "workers", "weightsync")
        for source in sorted((ROOT / package).rglob("*.py"))
    )
    named = {
        (name, value) for unit in units(path.read_text())
        for name, value in re.findall(r"\b([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])\b(?:=(\w+))?", unit)
    } - {("RUN_DIR", "")}  # fmt: skip
    assert len(named) > 1
    assert not [name for name, _ in named if f'"{name}"' not in own]
    assert not [(name, value) for name, value in named if value and f'"{name}": "{value}"' not in own]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_versions_are_those_of_the_one_table(path: Path) -> None:
    table = (ROOT / "docs" / "devices.md").read_text().split("## Versions")[1].split("## Ascend's")[0]
    names = "|".join(sorted(LIBRARIES, key=len, reverse=True))
    said = [
        (name, version)
        for unit in units(path.read_text())
        for name, version in re.findall(rf"\b({names})[ =]+v?(\d+(?:\.\w+)+)", " ".join(unit.split()))
    ]
    assert len(said) > 3
    for name, version in said:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {LIBRARIES[name]} |")]
        assert version in row, f"{name} {version}: not in the table of docs/devices.md"


@pytest.mark.parametrize(
    "line",
    [
        "asyncflow plann CONFIG", "asyncflow doctor --deep", "asyncflow-launch quickstart --set actor.lrr=1",
        "asyncflow plan qwen --devices 8", "asyncflow plan quickstart --devices 8 --device h1000", "nvidia-smi",
        "pip install -e '.[gpu]'", "pip install torch",
    ],
)  # fmt: skip
def test_what_is_wrong_is_seen(line: str) -> None:
    with pytest.raises((AssertionError, click.ClickException, ConfigError)):
        check(line)


def test_marks_cover_their_program_alone() -> None:
    page = f"From the {MARK}:\n```\nnpu-smi\n```\nOurs:\n```\nasyncflow doctor\n```\n## Never run on it\n- `FOO_BAR`\n"
    assert units(page) == ["Ours:", "asyncflow doctor\n"]
