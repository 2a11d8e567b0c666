"""Commands that install an extra name one that there is."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\.\[([\w,-]+)\]['\"]")
"""'.[test]'."""


def extras_named_in(folder: str) -> dict[str, str]:
    """Return every extra that a file of a folder (or a file) names, with the file."""
    root = ROOT / folder
    files = [root] if root.is_file() else [file for file in root.rglob("*") if file.suffix in (".md", ".py", ".yaml")]
    return {
        extra: str(file.relative_to(ROOT))
        for file in files
        for names in NAMED.findall(file.read_text())
        for extra in names.split(",")
    }


@pytest.mark.parametrize("folder", ["README.md", "CONTRIBUTING.md", "docs", "configs", "launcher", "workers", "tq"])
def test_extras_that_are_named_exist(folder: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = {extra: file for extra, file in extras_named_in(folder).items() if extra not in extras}
    assert not unknown


def test_some_are_named() -> None:
    assert extras_named_in("docs")
