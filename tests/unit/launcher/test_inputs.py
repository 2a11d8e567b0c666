"""Functions and rows of a program as files of a run."""

import asyncio
import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from asyncflow.errors import ConfigError
from launcher.inputs import ship_functions, write_rows

PROGRAM = """
import math
import re
from collections import Counter as Bag
from dataclasses import dataclass
from pathlib import Path

import helper
from helper import double

POINTS = {"right": 1.0, "wrong": [0, None]}
NUMBER = re.compile(r"[0-9]+", re.IGNORECASE)
HERE = Path("/somewhere")


class Base:
    bonus = POINTS["right"]


@dataclass
class Reply:
    text: str = "none"


class Env(Base):
    async def reset(self, row):
        return Reply(str(HERE) + helper.NAME)


def traced(function):
    return function


def last_number(text: str) -> str:
    found = NUMBER.findall(text)
    return found[-1] if found else ""


@traced
def score(prompt, response, ground_truth, *, factor=POINTS["right"]):
    POINTS_HERE = Bag(response)  # a local name
    del POINTS_HERE
    return factor * double(math.floor(last_number(response) == ground_truth)) / 2


class Table:
    pass


table = Table()


def uses_table(prompt, response, ground_truth):
    return lookup(response)


def lookup(text):
    return table


def make(weight):
    def weighted(prompt, response, ground_truth):
        return weight * (response == ground_truth)

    return weighted


weighted = make(0.5)
"""


def run(tmp_path: Path, last_lines: str, program: str = PROGRAM) -> str:
    """Run a program as its user does; returns what it prints."""
    (tmp_path / "program.py").write_text(program + last_lines)
    (tmp_path / "helper.py").write_text("NAME = 'me'\ndef double(x): return 2 * x\n")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(tmp_path: Path, source: str) -> Any:
    """Import what was shipped, as a worker does, which has nothing of the program."""
    (tmp_path / "shipped.py").write_text(source)
    spec = importlib.util.spec_from_file_location("shipped", tmp_path / "shipped.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)


@pytest.mark.usefixtures("_own_path")
def test_a_function_goes_with_all_that_it_uses(tmp_path: Path) -> None:
    source = run(
        tmp_path,
        "from launcher.inputs import ship_functions\nprint(ship_functions({'reward': score, 'rollout': Env})[0])\n",
    )
    module = load(tmp_path, source)
    assert module.score("", "it is 12", "12") == 1.0
    assert module.score("", "none", "12") == 0.0
    assert module.Env.bonus == 1.0
    assert asyncio.run(module.Env().reset({})).text == "/somewhereme"
    assert "Table" not in source and "weighted" not in source, "and with nothing else"
    assert f"sys.path.append({str(tmp_path)!r})" in source, "where the program's own modules are"


@pytest.mark.usefixtures("_own_path")
def test_a_closure_goes_with_its_values(tmp_path: Path) -> None:
    source = run(
        tmp_path, "from launcher.inputs import ship_functions\nprint(ship_functions({'reward': weighted})[0])\n"
    )
    assert load(tmp_path, source).weighted("", "a", "a") == 0.5


def test_what_no_other_process_can_have_is_named(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        "from launcher.inputs import ship_functions\n"
        "try: ship_functions({'reward': uses_table})\n"
        "except Exception as error: print(error)\n",
    )
    assert said == (
        "reward: uses_table uses lookup uses table: a Table of this program, which the run's processes do not have; "
        "make it inside of uses_table, or put it into a module (a .py file) and import it from there\n"
    )


def test_a_function_of_a_module_is_imported_from_there() -> None:
    source, names = ship_functions({"reward": re.fullmatch})
    assert "from re import fullmatch as fullmatch" in source
    assert names == {"reward": "asyncflow_inputs:fullmatch"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda prompt, response, ground_truth: 1.0, "reward: a lambda has no source of its own"),
        (logging.getLogger("x").info, "reward: a method has no source of its own"),
        (3, "reward: 3 is no function"),
    ],
)
def test_what_has_no_source_is_refused(given: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        ship_functions({"reward": given})


def test_a_function_typed_into_the_prompt_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "def f(prompt, response, ground_truth): return 1.0\n"
         "from launcher.inputs import ship_functions\nship_functions({'reward': f})"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert "reward: f: its source is not to be had; put it into a module" in done.stderr


def test_rows_are_dicts_of_a_list_or_a_data_frame(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    write_rows(rows, tmp_path / "list")
    write_rows(pandas.DataFrame(rows), tmp_path / "frame")
    write_rows(iter(rows), tmp_path / "iterator")
    assert len({(tmp_path / name).read_text() for name in ("list", "frame", "iterator")}) == 1
