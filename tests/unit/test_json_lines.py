"""Files of lines that a run appends to: whole lines, also on a disk that was full for a while."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from asyncflow.json_lines import JsonLines


class FullDisk:
    """Takes `room` bytes, then refuses, until there is room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        self._write = os.write
        monkeypatch.setattr("asyncflow.json_lines.os.write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = self._write(descriptor, data[: self.room])
        self.room -= size
        return size


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_infinities_become_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write([{"loss": math.nan, "step": 1, "lr": 0.5}])
    lines.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "step": 1, "lr": 0.5}


def test_lines_are_appended_to_what_was_there(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.write([{"step": step}])
        lines.close()
        lines.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.mark.parametrize("room", [0, 1, 12, 13, 20])
def test_lines_that_a_full_disk_refused_or_tore_are_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk, path = FullDisk(monkeypatch), tmp_path / "ledger.jsonl"
    lines = JsonLines(path)
    disk.room = room
    for step in (10, 11, 12):
        lines.write([{"step": step}])
    with pytest.raises(OSError, match="No space left"):
        lines.sync()
    disk.room = 10**9
    lines.write([{"step": 13}])
    lines.sync()
    assert steps(path) == [10, 11, 12, 13]
    lines.close()
