"""Functions and rows of a program as files of a run."""

import asyncio
import importlib.util
import linecache
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
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
        (3, "reward: 3 is not a function"),
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
    assert "reward: f: its source is not available; put it into a module" in done.stderr


def test_rows_are_dicts_of_a_list_or_a_data_frame(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    write_rows(rows, tmp_path / "list")
    write_rows(pandas.DataFrame(rows), tmp_path / "frame")
    write_rows(iter(rows), tmp_path / "iterator")
    assert len({(tmp_path / name).read_text() for name in ("list", "frame", "iterator")}) == 1


SHIP = """
from launcher.inputs import ship_functions
try: print(ship_functions({'reward': score})[0])
except Exception as error: print(type(error).__name__, error)
"""


Program = Callable[[str], str]


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Ship `score` of a program, as if this process ran it; return the text."""

    def ship(program: str) -> str:
        main = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        main.__file__ = str(tmp_path / "program.py")
        (tmp_path / "program.py").write_text(program)
        exec(compile(program, main.__file__, "exec", dont_inherit=True), vars(main))
        return ship_functions({"reward": vars(main)["score"]})[0]

    yield ship
    linecache.clearcache()


@pytest.fixture
def shipped(tmp_path: Path, ship: Program) -> Callable[[str], Any]:
    """Ship `score` of a program; return the module that a worker has."""
    return lambda program: load(tmp_path, ship(program))


def test_what_the_program_calls_as_a_builtin_goes_along(shipped: Callable[[str], Any]) -> None:
    module = shipped(
        "def sum(text): return 7.0\nmax = 3\n"
        "def score(prompt, response, ground_truth): return sum(response) + max + len(__name__)\n",
    )
    assert module.score("", "", "") == 10.0 + len("shipped")


def test_a_submodule_is_imported(tmp_path: Path) -> None:
    source = run(
        tmp_path,
        SHIP,
        "import xml\nimport xml.etree.ElementTree\nimport urllib.request as get\n"
        "def score(p, r, g): return float(xml.etree.ElementTree.fromstring(r).tag == g) + bool(get.urlopen)\n",
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{source}\nprint(score('', '<a/>', 'a'))"], capture_output=True, text=True
    )
    assert done.stdout == "2.0\n", done.stderr


def test_texts_over_several_lines_stay_as_they_are(shipped: Callable[[str], Any]) -> None:
    module = shipped(
        'if True:\n    def score(prompt, response, ground_truth):\n        return """\n    a\n        b"""\n',
    )
    assert module.score("", "", "") == "\n    a\n        b"


def test_a_class_made_inside_a_function_goes_with_the_values_around_it(shipped: Callable[[str], Any]) -> None:
    program = """
def make(weight):
    class score:
        def __call__(self, prompt, response, ground_truth):
            return weight
    return score
score = make(0.25)
"""
    assert shipped(program).score()("", "", "") == 0.25


def test_a_local_name_as_a_default_goes_as_its_value(shipped: Callable[[str], Any]) -> None:
    program = """
def make(weight):
    def score(prompt, response, ground_truth, weight=weight):
        return weight
    return score
score = make(0.25)
"""
    assert shipped(program).score("", "", "") == 0.25


def test_constants_without_a_literal(shipped: Callable[[str], Any]) -> None:
    module = shipped("LOW = float('-inf')\ndef score(p, r, g): return LOW\n")
    assert module.score("", "", "") == float("-inf")


CLASSES = """
import enum, functools, typing
from collections import namedtuple
from dataclasses import dataclass, field
class Kind(enum.Enum):
    A = 1
class Point(typing.NamedTuple):
    x: int = 1
@dataclass(slots=True)
class Slots:
    x: int = 2
    y: list = field(default_factory=list)
@dataclass
class Data:
    kind: Kind = None
    y: list = field(default_factory=list)
    if True:
        z = 1
    z = 3
class Base(typing.Generic[typing.TypeVar("T")]):
    LIMITS = {"low": 1}
    LOW = LIMITS["low"]
    __hidden = 4
    names = {"b", "a"}
    @functools.cached_property
    def cached(self): return self.__hidden
    @functools.lru_cache
    def kept(self): return 5
    @staticmethod
    def fixed(): return 6
    def __inner(self, limit=LOW): return limit
    def inner(self): return self.__inner()
def score(p, r, g):
    base = Base()
    return [Kind.A.value, Point().x, Slots().x, Data().z, base.cached, base.kept(), base.fixed(), base.inner()]
score("", "", "")
"""


def test_classes_of_many_kinds_go(shipped: Callable[[str], Any]) -> None:
    assert shipped(CLASSES).score("", "", "") == [1, 1, 2, 3, 4, 5, 6, 1]


SCORE = "def score(prompt, response, ground_truth): return {0}\n"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (SCORE.format("__file__"), "score uses __file__, which differs in the run's processes"),
        (
            "W = 1\ndef score(p, r, g, w=W): return w\nW = 2\n",
            "score: the default 'W' was 1 at its definition and has changed",
        ),
        (
            "def score(p, r, g, *, w=1): return w\nscore.__kwdefaults__ = {'w': 2}\n",
            "score: the default '1' was 2 at its definition",
        ),
        ("class A:\n    w = 1\nA.w = 2\n" + SCORE.format("A.w"), "score uses A: 'w' is no longer what its line"),
        (
            "class A:\n    w = []\nA.w.append(2)\n" + SCORE.format("A.w"),
            "score uses A: 'w' is no longer what its line",
        ),
        ("class A:\n    pass\nA.w = 2\n" + SCORE.format("A.w"), "score uses A: 'w' was set after the class"),
        (
            "class A:\n    def f(self): return 1\ndef g(self): return 2\nA.f = g\n" + SCORE.format("A().f()"),
            "score uses A: its source has changed since it was defined",
        ),
        (SCORE.format("score.table") + "score.table = 3\n", "score: it has an attribute of its own, 'table'"),
        (
            "import functools\n@functools.lru_cache\ndef f(r): return r\n" + SCORE.format("f(response)"),
            "score uses f: a _lru_cache_wrapper of this program",
        ),
        ("Rows = list[dict]\n" + SCORE.format("Rows"), "score uses Rows: a GenericAlias of this program"),
        (
            "import enum\nclass K(enum.IntEnum):\n    A = 1\nA = K.A\n" + SCORE.format("A"),
            "score uses A: a K of this program",
        ),
        (
            "def make():\n    n = 0\n    def score(p, r, g):\n        nonlocal n\n        n += 1\n        return n\n"
            "    return score\nscore = make()\n",
            "score: no binding for nonlocal 'n' found",
        ),
        (
            "def make():\n    class B: pass\n    class A(B):\n        def f(self): return 1\n    return A\nA = make()\n"
            + SCORE.format("A().f()"),
            "score uses A uses B, which its definition needs and which no longer exists",
        ),
        (
            "def f(n): return n and f(n - 1)\ng = f\ndef f(n): return 7\n"
            "def make(f):\n    def score(p, r, q): return f(1)\n    return score\nscore = make(g)\n",
            "score uses f uses f: two different objects are called 'f'",
        ),
    ],
)
def test_what_would_be_another_one_elsewhere_is_refused(ship: Program, program: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("reward: " + says)) as caught:
        ship(program)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "now", ["def score(p, r, g): return 2.0\n", "def score(p, r, g): return 1\n", "# no more\n", ""]
)
def test_a_source_that_has_changed_since_is_refused(tmp_path: Path, now: str) -> None:
    """The file is read before, too: what was read once says nothing of what it is now."""
    file = tmp_path / "cells.py"
    file.write_text("def score(p, r, g): return 1.0\n")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert "1.0" in ship_functions({"reward": names["score"]})[0]
    file.write_text(now)
    with pytest.raises(ConfigError, match="reward: score: its source (has changed since|is not available)"):
        ship_functions({"reward": names["score"]})
    file.write_text("def score(p, r, g): return 1.0\n")
    assert "1.0" in ship_functions({"reward": names["score"]})[0]
    linecache.clearcache()


@pytest.mark.parametrize("how", ["insert(0, place)", "append(place)"])
def test_modules_of_places_that_the_program_added_are_found(tmp_path: Path, how: str) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine_alone.py").write_text("def double(x): return 2 * x\n")
    source = run(
        tmp_path,
        SHIP,
        f"import sys\nplace = {str(tmp_path / 'more')!r}\nsys.path.{how}\nimport mine_alone\nimport json, math\n"
        "def score(p, r, g): return mine_alone.double(math.floor(json.loads(r)))\n",
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{source}\nprint(score('', '2', ''))"], capture_output=True, text=True
    )
    assert done.stdout == "4\n", done.stderr
    assert source.count("sys.path.append(") == 1, "and no place where workers look anyway"


def test_a_module_that_another_one_would_hide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pluggy.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "site" / "pluggy").mkdir(parents=True)
    (tmp_path / "site" / "pluggy" / "__init__.py").touch()
    said = run(
        tmp_path,
        SHIP,
        f"import os, pluggy\nos.environ['PYTHONPATH'] = {str(tmp_path / 'site')!r}\n"
        "def score(p, r, g): return pluggy.double(1)\n",
    )
    assert f"reward: score uses pluggy: the module 'pluggy' of {tmp_path} has the name of" in said


class Polars:
    """As far as rows are concerned."""

    columns = ("prompt",)

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_dict(self, *, as_series: bool = True) -> Any:
        raise AssertionError("is of columns")

    def to_dicts(self) -> list[dict[str, Any]]:
        return self._rows


def test_rows_of_a_polars_frame(tmp_path: Path) -> None:
    write_rows(Polars([{"prompt": "1+1="}]), tmp_path / "rows")
    assert (tmp_path / "rows").read_text() == '{"prompt": "1+1="}\n'


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            pandas.DataFrame({"a": ["x"] * 3, "b": [1, 2, None]}),
            "data: field 'b' of row 3 is empty (NaN); fill it or drop",
        ),
        (pandas.DataFrame({"b": [pandas.NaT]}), "data: field 'b' of row 1 is empty (NaN)"),
        ([{"a": "x"}, {"a": "x\ud83dy"}], r"data: row 2, field 'a': '\ud83d' is half of a character"),
        ([{"a": float("inf")}], "data: row 1, field 'a': Out of range float values"),
    ],
)
def test_a_value_that_a_line_cannot_hold_is_named(tmp_path: Path, rows: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        write_rows(rows, tmp_path / "rows")
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()
