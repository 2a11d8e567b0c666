"""Programs that this machine lacks in one way or another."""

import sys
from pathlib import Path

import pytest

from tests.support.machine import obstacle

REMEDY = "apt-get install what-it-needs"
LOADER = "mooncake_master: error while loading shared libraries: libibverbs.so.1: cannot open shared object file"


def program(directory: Path, body: str) -> str:
    """Write a shell script."""
    path = directory / "server"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_program_that_runs_is_no_obstacle(tmp_path: Path) -> None:
    assert obstacle(sys.executable, "--version", remedy=REMEDY) == ""
    assert obstacle(program(tmp_path, "exit 1"), remedy=REMEDY) == ""  # it ran; `--help` of gflags ends so


def test_program_that_is_not_there_is_named_with_its_remedy(tmp_path: Path) -> None:
    reason = obstacle(str(tmp_path / "server"), remedy=REMEDY)
    assert reason == f"{tmp_path}/server is not here (No such file or directory): {REMEDY}"


@pytest.mark.parametrize("code", [126, 127])
def test_program_whose_libraries_are_missing_is_named_with_what_the_loader_says(tmp_path: Path, code: int) -> None:
    server = program(tmp_path, f"echo '{LOADER}' >&2; exit {code}")
    assert obstacle(server, "--version", remedy=REMEDY) == f"{server} cannot run here ({LOADER}): {REMEDY}"
