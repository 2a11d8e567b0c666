"""How a launcher finds the run that it is to take part in."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.clock import HostClock
from asyncflow.errors import ConfigError, RoleFailed, TransportError
from asyncflow.job import Job
from launcher.nodes.node_messages import FinishRun, Refuse
from launcher.nodes.node_run import RunSearch

OLD = Job("10.0.0.1", 1, "00", 2, (), 0, "", 3, 4.5, HostClock.from_wall_clock())
NEW = Job("10.0.0.1", 2, "11", 3, (), 0, "", 3, 4.5, HostClock.from_wall_clock())
DONE = FinishRun(0, "done")


class Answers:
    """Joins as the test says, one try after the other; notes which job each was for."""

    def __init__(self, *answers: Any, before: Callable[[Job], None] = lambda _: None) -> None:
        self._answers = list(answers)
        self._before = before
        self.jobs: list[Job] = []

    def __call__(self, job: Job, given_up: threading.Event) -> Any:
        self.jobs.append(job)
        self._before(job)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def search(run_dir: Path, timeout_s: float = 60.0, *, stopped: bool = False) -> RunSearch:
    stop = threading.Event()
    if stopped:
        stop.set()
    return RunSearch(run_dir, stopped=stop, timeout_s=timeout_s)


def test_what_lies_there_of_a_run_that_is_over_is_tried_until_another_begins(tmp_path: Path) -> None:
    OLD.save(tmp_path)
    gone = TransportError("nobody answers")
    answers = Answers(gone, DONE, before=lambda job: NEW.save(tmp_path) if job == OLD else None)
    assert search(tmp_path).find_run(answers) == DONE
    assert answers.jobs == [OLD, NEW]


def test_try_that_hangs_is_given_up_for_another_run(tmp_path: Path) -> None:
    OLD.save(tmp_path)
    hung = threading.Event()

    def join(job: Job, given_up: threading.Event) -> Any:
        if job == NEW:
            return DONE
        NEW.save(tmp_path)
        assert given_up.wait(60)
        hung.set()
        raise TransportError("given up")

    assert search(tmp_path).find_run(join) == DONE
    assert hung.wait(60)


def test_run_that_may_let_this_node_in_later_is_asked_again(tmp_path: Path) -> None:
    NEW.save(tmp_path)
    answers = Answers(Refuse("node 1 is host-1 already", True), DONE)
    assert search(tmp_path).find_run(answers) == DONE


def test_refusal_is_the_end(tmp_path: Path) -> None:
    NEW.save(tmp_path)
    with pytest.raises(ConfigError, match="node 1: 4 devices"):
        search(tmp_path).find_run(Answers(Refuse("node 1: 4 devices", False)))


def test_error_that_nobody_expected_does_not_end_the_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    NEW.save(tmp_path)
    assert search(tmp_path).find_run(Answers(ZeroDivisionError(), DONE)) == DONE
    assert "joining the run failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_no_run_in_time_is_said(tmp_path: Path) -> None:
    with pytest.raises(RoleFailed, match=f"within 0 s: there is no run in {tmp_path}; is it on a file system"):
        search(tmp_path, timeout_s=0.0).wait_for_job()


def test_last_reason_is_said_when_no_run_lets_it_in(tmp_path: Path) -> None:
    NEW.save(tmp_path)
    gone = TransportError("node 0 does not answer at 10.0.0.1:2")
    with pytest.raises(RoleFailed, match=r"within 3 s: node 0 does not answer at 10\.0\.0\.1:2"):
        search(tmp_path, timeout_s=3).find_run(Answers(*[gone] * 10_000))


@pytest.mark.parametrize("text", ["{", "[]", '{"gangs": 1}', "{}"])
def test_file_that_cannot_be_read_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(RoleFailed, match="there is no run"):
        search(tmp_path, timeout_s=0.0).wait_for_job()


def test_stop_ends_every_wait(tmp_path: Path) -> None:
    assert not search(tmp_path, stopped=True).wait_for_job()
    NEW.save(tmp_path)
    assert search(tmp_path).wait_for_job()
    assert search(tmp_path, stopped=True).find_run(Answers(*[TransportError("gone")] * 9)) is None
