"""Reads out of Python source what a class, function or attribute takes, without running it."""

import ast
from collections.abc import Iterator


def parameters(source: str, path: str) -> list[str] | None:
    """Return the parameters of `Class`, `function`, `Class.method` or `Class.attribute` in a file, without `self`.

    A class has those of its `__init__`, or its annotated fields (a dataclass, a Struct, a TypedDict, a model), with
    those of its bases in the same file. An attribute has none. None: there is no such name.
    """
    tree = ast.parse(source)
    node: ast.AST | None = tree
    for name in path.split("."):
        node = next((member for found, member in _members(node, tree) if found == name), None) if node else None
    if isinstance(node, ast.ClassDef):
        init = next((member for found, member in _members(node, tree) if found == "__init__"), None)
        return _arguments(init) if isinstance(init, ast.FunctionDef) else list(dict.fromkeys(_fields(node, tree)))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _arguments(node)
    return None if node is None else []


def dictionary_keys(source: str, variable: str) -> set[str]:
    """Return the plain keys of the dictionaries that a file writes down for a variable."""
    keys: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _is_field(node) else []
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            value = node.value
            known = value.keys if isinstance(value, ast.Dict) else ()
            keys |= {key.value for key in known if isinstance(key, ast.Constant)}
    return keys


def _members(node: ast.AST, tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a module or class defines, then what its bases in the same file do."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name, child
        for target in child.targets if isinstance(child, ast.Assign) else [child.target] if _is_field(child) else ():
            if isinstance(target, ast.Name):
                yield target.id, child
        if isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef):  # self.name = ...
            for inner in ast.walk(child):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr, inner
    for base in _bases(node, tree):
        yield from _members(base, tree)


def _fields(node: ast.ClassDef, tree: ast.Module) -> Iterator[str]:
    for base in _bases(node, tree):
        yield from _fields(base, tree)
    for child in node.body:
        if _is_field(child) and isinstance(child.target, ast.Name) and "ClassVar" not in ast.unparse(child.annotation):
            yield child.target.id


def _bases(node: ast.AST, tree: ast.Module) -> Iterator[ast.ClassDef]:
    names = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    yield from (child for child in tree.body if isinstance(child, ast.ClassDef) and child.name in names)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [f"*{one.arg}" for one in (given.vararg,) if one] + [f"**{one.arg}" for one in (given.kwarg,) if one]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign)
