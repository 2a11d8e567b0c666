"""The file of a feed: numbers of rows, what a crash leaves, what a file system refuses."""

import errno
import os
from pathlib import Path

import pytest

from asyncflow.errors import ConfigError, QueueFull
from workers.data.feed_file import Fed, FeedFile

ROWS = [{"prompt": f"{k}+1=", "answer": str(k + 1)} for k in range(5)]


def test_rows_keep_their_numbers_for_a_later_reader(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    file = FeedFile(path, appends=True)
    assert [file.put("math", ROWS[:2]), file.put("co-de", ROWS[2:3]), file.put("math", ROWS[3:])] == [2, 1, 4]
    file.end("math")
    for one in (file, FeedFile(path)):
        assert (one.fed, [one.read_row(k) for k in range(5)]) == (Fed(5, ended=True), ROWS)
        assert [one.last_sequence(name) for name in ("math", "co-de", "none")] == [4, 1, 0]
        one.close()


def test_line_that_a_crash_cut_is_gone_and_its_row_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    file = FeedFile(path, appends=True)
    file.put("math", ROWS[:3])
    file.close()
    os.truncate(path, path.stat().st_size - 4)  # in the middle of the third row of the put
    again = FeedFile(path, appends=True)
    assert again.num_known("math", 1, ROWS[:4]) == 2
    again.put("math", ROWS[2:4])
    assert [again.read_row(k) for k in range(4)] == ROWS[:4]
    again.close()


def test_numbers_that_were_left_out_and_rows_after_the_end_are_refused(tmp_path: Path) -> None:
    file = FeedFile(tmp_path / "feed.jsonl", appends=True)
    file.put("math", ROWS[:2])
    with pytest.raises(ConfigError, match="feeder math: row 4 does not follow row 2; continue with row 3"):
        file.num_known("math", 4, ROWS[:1])
    file.end("code")
    assert file.num_known("math", 1, ROWS[:2]) == 2, "a repeated put whose answer was lost"
    with pytest.raises(ConfigError, match="1 rows after the feed's end"):
        file.num_known("math", 2, ROWS[1:3])
    file.close()


def test_put_that_repeats_a_number_with_another_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    file = FeedFile(path, appends=True)
    file.put("math", ROWS[:1])
    file.put("code", ROWS[3:])
    file.put("math", ROWS[1:3])
    for one in (file, FeedFile(path)):
        assert [one.num_known("math", 2, ROWS[1:]), one.num_known("code", 1, ROWS[3:])] == [2, 2]
        with pytest.raises(
            ConfigError, match="feeder math: row 2 was already put with other content; continue with row 4"
        ):
            one.num_known("math", 1, [ROWS[0], ROWS[3], ROWS[2]])
        one.close()


def test_who_has_a_name_is_kept_beside_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    file = FeedFile(path, appends=True)
    file.take_ownership("math", "first")
    file.put("math", ROWS[:2])
    file.take_ownership("math", "second")
    file.put("math", ROWS[2:3])
    file.end("math")
    file.take_ownership("code", "third")
    for one in (file, FeedFile(path)):
        assert [one.owner(name) for name in ("math", "code", "none")] == ["second", "third", ""]
        assert (one.fed, [one.read_row(k) for k in range(3)]) == (Fed(3, ended=True), ROWS[:3])
        one.close()


def test_full_disk_refuses_a_put_whole_and_takes_it_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "feed.jsonl"
    file = FeedFile(path, appends=True)
    file.put("math", ROWS[:1])
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(QueueFull, match=r"feed\.jsonl: No space left"):
        patch.setattr("workers.data.feed_file.os.fsync", _no_space)
        file.put("math", ROWS[1:])
    assert (path.read_bytes(), file.fed, file.last_sequence("math")) == (before, Fed(1, ended=False), 1)
    file.put("math", ROWS[1:])
    assert [file.read_row(k) for k in range(5)] == ROWS
    file.close()


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    path.write_text('{"feeder":"a","sequence":1,"row":{}}\nmud\n')
    with pytest.raises(ConfigError, match=r"feed\.jsonl:2: not a line of a feed .*; restore it"):
        FeedFile(path)


def test_watcher_is_told_what_is_there_and_of_all_that_comes(tmp_path: Path) -> None:
    file = FeedFile(tmp_path / "feed.jsonl", appends=True)
    file.put("math", ROWS[:1])
    told: list[Fed] = []
    file.watch(told.append)
    file.put("math", ROWS[1:])
    file.end("math")
    file.end("math")
    assert told == [Fed(1, ended=False), Fed(5, ended=False), Fed(5, ended=True)]
    file.close()
