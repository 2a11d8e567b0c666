"""No module of the five packages imports one that imports it, not even for a type checker."""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncflow", "launcher", "workers", "tq", "weightsync")


def modules() -> dict[str, Path]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(body: list[ast.stmt], known: Mapping[str, Path]) -> Iterator[str]:
    """Yield what a module imports when it is loaded, or when types are checked; imports in functions come later."""
    for each in body:
        match each:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{name.name}" if f"{module}.{name.name}" in known else module for name in names)
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.If() | ast.Try():
                yield from imported([*each.body, *each.orelse], known)


def test_there_is_none() -> None:
    known = modules()
    graph = {
        name: {each for each in imported(ast.parse(file.read_text()).body, known) if each in known and each != name}
        for name, file in known.items()
    }
    assert len(graph) > 300
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
