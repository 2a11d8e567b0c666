"""Finds, without importing anything, what a file uses of a package: names that it imports, and how it calls them.

Seen are `import P`, `import P.m as x`, `from P.m import N as n`, dotted access to what was imported, and calls of it,
and what is done at once with an object that a class makes. Of other objects the caller says which they are.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Use:
    """Attributes:
    name: dotted, from the package on.
    line: in the file.
    imports: it is a module or name that an import statement asks for.
    call: how it is called: number of positional arguments and keywords; None: it is not called.
    """

    name: str
    line: int
    imports: bool = False
    call: tuple[int, tuple[str, ...]] | None = None


def uses_of(package: str, source: str, objects: Mapping[str, str] = _NOTHING) -> Iterator[Use]:
    """Yield every use of a package in a file's source.

    Args:
        package: top-level name.
        source: of the file.
        objects: expressions of the file, such as `self._llm`, and the dotted class that each is of.
    """
    if package not in source and not objects:
        return
    tree = ast.parse(source)
    known = dict(objects)
    for node in ast.walk(tree):
        for alias, name, line in _imported(node, package):
            known[alias] = package if alias == package else name
            yield Use(name, line, imports=True)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        dotted = _dotted(node, known)
        if dotted is None or (id(node) in inner and id(node) not in called):
            continue
        call = called.get(id(node))
        yield Use(dotted, node.lineno, call=None if call is None else _shape(call))


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str, int]]:
    """Yield (name in the file, full name, line)."""
    if isinstance(node, ast.Import):
        for one in node.names:
            if one.name.split(".")[0] == package:
                yield one.asname or package, one.name, node.lineno
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
        for one in node.names:
            yield one.asname or one.name, f"{node.module}.{one.name}", node.lineno


def _dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Store) else known.get(node.id)  # a name that is given is no use
    if isinstance(node, ast.Attribute):
        front = _dotted(node.value, known)
        own = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""
        return known.get(own, None if front is None else f"{front}.{node.attr}")
    if isinstance(node, ast.Call):
        made = _dotted(node.func, known)
        return made if made is not None and made.rpartition(".")[2][:1].isupper() else None
    return None


def _shape(call: ast.Call) -> tuple[int, tuple[str, ...]]:
    return len(call.args), tuple(keyword.arg or "**" for keyword in call.keywords)
