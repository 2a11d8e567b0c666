"""Files of lines that a run appends to: whole lines, also on a disk that was full for a while; each is read once."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.json_lines import JsonLines, LineReader, VersionTail


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


def write(path: Path, *lines: dict[str, int]) -> None:
    """Write a file in the place of an earlier one, as a resume does."""
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(line) + "\n" for line in lines))
    beside.replace(path)


def test_reader_returns_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = LineReader(path)
    assert reader.read() == []
    for text, new in (
        ('{"step": 1}\n{"st', [{"step": 1}]),
        ('ep": 2}', [{"step": 2}]),
        ("", []),
        ('\n{"step": 3}\n', [{"step": 3}]),
    ):
        with path.open("a") as file:
            file.write(text)
        assert reader.read() == new
    path.write_text('{"step": 1}\n')
    assert reader.read() == [{"step": 1}], "a truncated file is read from its beginning"


def test_reader_names_the_wrong_line_also_after_earlier_reads(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    reader = LineReader(path)
    reader.read()
    with path.open("a") as file:
        file.write('[2]\n{"step"\n{"step": 4}\n{"step": 5')
    found = reader.read_lines()
    assert found.lines == ((4, {"step": 4}),)
    assert [number for number, _ in found.wrong] == [2, 3]
    assert found.torn
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: .*repair the line"):
        LineReader(path).read()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        LineReader(tmp_path).read()


def test_a_file_that_the_machine_cannot_open_now_is_no_fault_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1})
    reader = LineReader(path)
    with monkeypatch.context() as without_handles:
        without_handles.setattr(Path, "open", _refuse)
        with pytest.raises(AsyncFlowError, match="cannot be read: Too many open files$") as raised:
            reader.read()
    assert not raised.value.final
    assert reader.read() == [{"step": 1}]


def _refuse(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_evaluations_of_this_start_are_read_once_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.jsonl"
    tail = VersionTail(path, lineage=1)
    found = [{"step": step, "lineage": lineage} for step, lineage in ((0, 0), (20, 1), (10, 1))]
    write(path, *found)
    assert tail.read() == found[1:]
    assert tail.read() == []


def test_tails_follow_a_run_that_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [{"step": step, "lineage": 0} for step in (1, 2, 3)]
    write(path, *before)
    older, newer = VersionTail(path, lineage=0), VersionTail(path, lineage=1)
    assert (older.read(), newer.read()) == (before, [])
    again = {"step": 3, "lineage": 1}
    write(path, *before[:2], again)
    assert older.read() == newer.read() == [again]
