"""Read a YAML file whose top is a mapping, refuse duplicate keys, and remember the line of every key. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncflow.errors import ConfigError


@dataclass(frozen=True)
class YamlFile:
    """A parsed file.

    Attributes:
        path: the file.
        values: its content.
        root: the node tree, which knows lines; None: the settings come from no file.
    """

    path: Path
    values: dict[Any, Any]
    root: yaml.Node | None

    def line_of(self, keys: Sequence[str | int]) -> int | None:
        """Return the line (from 1) of the value under `keys`, or None when the file does not set it."""
        node = self.root
        line = None
        for key in keys:
            if node is None:
                return None
            found = _child(node, key)
            if found is None:
                return None
            line, node = found
        return line


def read_yaml(path: Path) -> YamlFile:
    """Parse `path`.

    Raises:
        ConfigError: unreadable, not YAML (with file:line), empty, not a mapping at the top, or a key given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"CONFIG: cannot read {path}: {error.strerror}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"CONFIG: {path} is not UTF-8 text ({error.reason}); give a YAML file") from error
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _refuse_duplicates(root, path)
        values = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{_where(path, error.problem_mark)}: YAML syntax: {_problem(error)}; fix it") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply for a configuration; write it flat") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: YAML syntax: {' '.join(str(error).split())}; fix it") from error
    finally:
        if loader is not None:
            loader.dispose()
    if root is None:
        raise ConfigError(f"CONFIG: {path} is empty; start from a recipe such as configs/quickstart.yaml")
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: the top is a {kind}; it must be a mapping, `key: value`")
    return YamlFile(path, values, root)


def parse_value(text: str, option: str) -> Any:
    """Parse one value of the command line as YAML; `option` names it in the error."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = _problem(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"{option}: the value {text!r} is not YAML ({problem}); quote it") from error


def _child(node: yaml.Node, key: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == str(key):
                return key_node.start_mark.line + 1, value_node
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark.line + 1, node.value[key]
    return None


def _refuse_duplicates(root: yaml.Node, path: Path) -> None:
    pending, visited = [root], {id(root)}
    while pending:
        node = pending.pop()
        children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            _refuse_duplicate_keys(node, path)
            children = [value for _, value in node.value]
        fresh = [child for child in children if id(child) not in visited]
        visited.update(id(child) for child in fresh)
        pending.extend(fresh)


def _refuse_duplicate_keys(node: yaml.MappingNode, path: Path) -> None:
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in first_lines:
            raise ConfigError(
                f"{path}:{line}: {key.value}: given twice (first in line {first_lines[key.value]}); keep one"
            )
        first_lines[key.value] = line


def _where(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _problem(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join(", ".join(parts).split()) or "cannot be parsed"
