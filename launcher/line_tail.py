"""Reads files of JSON lines while others append to them, for the progress display. Torch-free."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LineTail:
    """Returns every line once, when it is finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that were finished since the last call; all of them when the file was cut or replaced."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return []
        identity = (facts.st_dev, facts.st_ino)
        if identity != self._identity or facts.st_size < self._offset:
            self._identity, self._offset = identity, 0
        if facts.st_size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class MetricsTail:
    """The steps in `metrics.jsonl`: each step of this lineage, and of later ones, once and in order."""

    def __init__(self, path: Path, *, lineage: int) -> None:
        self._lines = LineTail(path)
        self._newest = (lineage, 0)

    def read(self) -> list[dict[str, Any]]:
        """Return the steps that were finished since the last call."""
        return [step for step in self._lines.read() if self._is_news(step)]

    def _is_news(self, step: Mapping[str, Any]) -> bool:
        version = (step.get("lineage", self._newest[0]), step["step"])
        if version <= self._newest:
            return False
        self._newest = version
        return True


class EvaluationTail:
    """The evaluations in `evaluation.jsonl`: each of this lineage once, in the order in which they ended."""

    def __init__(self, path: Path, *, lineage: int) -> None:
        self._lines = LineTail(path)
        self._lineage = lineage
        self._seen: set[tuple[int, int]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return the evaluations that ended since the last call."""
        lines = [line for line in self._lines.read() if line["lineage"] >= self._lineage]
        news = [line for line in lines if (line["lineage"], line["step"]) not in self._seen]
        self._seen.update((line["lineage"], line["step"]) for line in news)
        return news
