"""The scorer behind HTTP, with a real server: batches, attempts, and what a response costs that it cannot bear."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from asyncflow.errors import UserCodeFailed
from workers.rewards.base import Response, Score
from workers.rewards.pooled import RemoteReward, _Waiting
from workers.settings.rewards import RewardConfig

Samples = list[dict[str, str]]
Reply = Callable[[Samples], "tuple[int, Any]"]
DEADLINE_S = 60


class Scorer:
    """A server; `reply` says what it answers, `asked` what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Samples] = []
        self.reply: Reply = lambda samples: (200, {"scores": [float(one["response"]) for one in samples]})
        scorer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                scorer.asked.append(samples)
                status, body = scorer.reply(samples)
                if isinstance(body, Iterator):
                    self.send_response(status)
                    self.end_headers()
                    with contextlib.suppress(OSError):
                        for piece in body:
                            self.wfile.write(piece)
                    return
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"

    def reward(self, **settings: Any) -> RemoteReward:
        return RemoteReward(RewardConfig(function=self.url, **{"timeout_s": DEADLINE_S, "retries": 0, **settings}))

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    scorer = Scorer()
    yield scorer
    scorer.close()


def test_samples_are_posted_and_scores_come_back(scorer: Scorer) -> None:
    assert scorer.reward()(Response("2+2=", "0.5", "4")) == Score(0.5, False)
    sent = {"prompt": "2+2=", "response": "0.5", "ground_truth": "4", "task": {}, "num_tokens": 0, "truncated": False}
    assert scorer.asked == [[sent]]
    scorer.reward()(Response("2+2=", "0.5", "4", '{"level": 3}'))
    assert scorer.asked[-1][0]["task"] == {"level": 3}
    scorer.reply = lambda samples: (200, {"scores": [{"reward": 0.2, "correct": True, "error": None}], "more": 1})
    assert scorer.reward()(Response("", "", "")) == Score(0.2, True)
    scorer.reply = lambda samples: (200, {"scores": [{"reward": 1, "format": 0.5, "said": "4", "short": True}]})
    assert scorer.reward()(Response("", "", "")) == Score(1.0, True, {"format": 0.5, "short": 1.0})


def test_what_waits_goes_together_and_each_gets_its_own_score(scorer: Scorer) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def reply(samples: Samples) -> tuple[int, Any]:
        begun.release()
        assert go_on.wait(DEADLINE_S)
        return 200, {"scores": [float(one["response"]) for one in samples]}

    scorer.reply = reply
    reward = scorer.reward(batch_size=4)
    with ThreadPoolExecutor(30) as callers:
        futures = [callers.submit(reward, Response("", str(number), "")) for number in range(30)]
        for _ in range(8):  # all senders are busy; 22 samples or fewer wait
            assert begun.acquire(timeout=DEADLINE_S)
        go_on.set()
        assert [future.result(DEADLINE_S).reward for future in futures] == list(range(30))
    assert max(map(len, scorer.asked)) > 1 and all(len(samples) <= 4 for samples in scorer.asked)


@pytest.mark.parametrize(
    "poisoned", [(500, {}), (200, b"not JSON"), (200, {"scores": []}), (200, b"[" * 10**6), (400, b"")]
)
def test_one_response_that_the_scorer_cannot_bear_costs_only_itself(scorer: Scorer, poisoned: tuple[int, Any]) -> None:
    def reply(samples: Samples) -> tuple[int, Any]:
        if any(one["response"] == "poison" for one in samples):
            return poisoned
        return 200, {"scores": [1.0] * len(samples)}

    scorer.reply = reply
    batch = [_Waiting({"response": "poison" if number == 2 else "fine"}, Future()) for number in range(5)]
    scorer.reward()._score_batch(batch)
    assert len(scorer.asked[0]) == 5
    assert [number for number, one in enumerate(batch) if one.score.exception(DEADLINE_S) is not None] == [2]
    assert isinstance(batch[2].score.exception(), UserCodeFailed)


def test_passing_failures_are_tried_again_and_others_are_not(scorer: Scorer) -> None:
    scorer.reply = lambda samples: (503, {}) if len(scorer.asked) < 3 else (200, {"scores": [1]})
    assert scorer.reward(retries=2)(Response("", "", "")) == Score(1.0, True)
    assert len(scorer.asked) == 3
    scorer.reply = lambda samples: (404, {})
    with pytest.raises(UserCodeFailed, match="answered 404"):
        scorer.reward(retries=2)(Response("", "", ""))
    assert len(scorer.asked) == 4


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"error": "no idea"}, "said 'no idea'"),
        ("good", "returned 'good' instead of a number"),
        (float("inf"), "must be a number that float32 holds"),
        (None, "returned None instead of a number"),
        ("1.0", "returned '1.0' instead of a number"),
        ({"reward": 1, "correct": "false"}, "returned correct 'false' instead of true or false"),
    ],
)
def test_a_score_that_is_none_is_named(scorer: Scorer, score: object, message: str) -> None:
    scorer.reply = lambda samples: (200, {"scores": [score]})
    with pytest.raises(UserCodeFailed, match=message):
        scorer.reward()(Response("", "", ""))


def test_nobody_there_is_said_after_the_last_attempt(scorer: Scorer) -> None:
    scorer.close()
    with pytest.raises(UserCodeFailed, match="does not answer"):
        scorer.reward(retries=1)(Response("", "", ""))


def test_a_reply_that_never_ends_costs_the_deadline(scorer: Scorer) -> None:
    ended = threading.Event()

    def drip() -> Iterator[bytes]:
        while not ended.wait(0.05):
            yield b" "

    scorer.reply = lambda samples: (200, drip())
    with pytest.raises(UserCodeFailed, match="does not answer .timed out in the middle of its answer"):
        scorer.reward(timeout_s=3)(Response("", "", ""))
    ended.set()


def test_what_nobody_foresaw_reaches_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RemoteReward, "_post_samples", broken)
    reward = RemoteReward(RewardConfig(function="http://127.0.0.1:1/score"))
    for _ in range(20):  # more than there are senders
        with pytest.raises(ZeroDivisionError):
            reward(Response("", "", ""))


def test_a_scorer_that_hangs_costs_the_deadline(scorer: Scorer) -> None:
    go_on = threading.Event()

    def reply(samples: Samples) -> tuple[int, Any]:
        assert go_on.wait(DEADLINE_S)
        return 200, {"scores": [1.0]}

    scorer.reply = reply
    with pytest.raises(UserCodeFailed, match="does not answer"):
        scorer.reward(timeout_s=0.5)(Response("", "", ""))
    go_on.set()
