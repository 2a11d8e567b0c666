"""A scorer behind HTTP: responses are posted in batches as they finish, `reward.function: http://host:port/score`.

    -> {"samples": [{"prompt": "...", "response": "...", "ground_truth": "...", "task": {the data row},
                     "num_tokens": 17, "truncated": false}, ...]}
    <- {"scores": [1.0, {"reward": 0.5, "correct": false}, {"error": "no idea"}, ...]}         in the same order

A request takes what waits, up to `reward.batch_size`, so batches grow by themselves when the scorer is busy. One that
fails (no connection, a deadline, status 408, 429 or 5xx) is sent again, `reward.retries` times, after 0.5, 1, 2 ... s.
If the reply to a batch is an error, or nonsense, its responses are sent one by one, so that one that the scorer cannot
bear costs only itself. What is still without a score then has no reward, so no weight, and is warned of. Torch-free.
"""

import http.client
import json
import queue
import reprlib
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from asyncflow.errors import ConfigError, UserCodeFailed
from workers.rewards.base import NO_FIELDS, NOTHING_DRAWN, DrawnResponse, Score, as_score
from workers.settings.rewards import RewardConfig

_SENDERS = 8
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_MOST_BYTES = 2**26
_PIECE_BYTES = 2**16
_NO_PARTS = frozenset({"reward", "score", "error"})
_PASSING = frozenset({408, 429, *range(500, 600)})


@dataclass(frozen=True)
class _Waiting:
    sample: dict[str, Any]
    score: "Future[Score]"


class _BatchRefused(UserCodeFailed):
    """The scorer answered, and not with scores."""


class RemoteReward:
    """Posts responses to a scorer. Thread-safe: callers wait for their own."""

    def __init__(self, config: RewardConfig) -> None:
        """Args:
        config: names the URL, the deadline of a request, how many responses it takes, and how often it is sent again.
        """
        check_url(config.function)
        self._config = config
        self._what = f"reward.function: {config.function}"
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._pause = threading.Event()  # never set: pauses are waits, not sleeps of a lock's holder
        for number in range(_SENDERS):
            threading.Thread(target=self._send_for_ever, name=f"remote-reward-{number}", daemon=True).start()

    def __call__(
        self,
        prompt: str,
        response: str,
        ground_truth: str,
        task: str = NO_FIELDS,
        drawn: DrawnResponse = NOTHING_DRAWN,
        /,
    ) -> Score:
        """Score one response.

        Raises:
            UserCodeFailed: the scorer gave no score for it.
        """
        fields = {"prompt": prompt, "response": response, "ground_truth": ground_truth, "task": json.loads(task)}
        fields |= {"num_tokens": drawn.num_tokens, "truncated": drawn.truncated}
        one = _Waiting(fields, Future())
        self._waiting.put(one)
        return one.score.result()

    def _send_for_ever(self) -> None:
        while True:
            batch = [self._waiting.get()]
            try:
                while len(batch) < self._config.batch_size:
                    batch.append(self._waiting.get_nowait())
            except queue.Empty:
                pass
            self._score(batch)

    def _score(self, batch: list[_Waiting]) -> None:
        try:
            scores = self._scores([one.sample for one in batch])
        except _BatchRefused as error:
            if len(batch) == 1:
                batch[0].score.set_exception(error)
                return
            for one in batch:
                self._score([one])
        except Exception as error:  # noqa: BLE001  the boundary of a thread: the caller that waits for a score raises it
            for one in batch:
                one.score.set_exception(error)
        else:
            for one, value in zip(batch, scores, strict=True):
                self._settle(one, value)

    def _settle(self, one: _Waiting, value: Any) -> None:
        try:
            one.score.set_result(self._as_score(value, one.sample["response"]))
        except UserCodeFailed as error:
            one.score.set_exception(error)

    def _as_score(self, value: Any, response: str) -> Score:
        if isinstance(value, dict) and value.get("error") is not None:
            raise UserCodeFailed(f"{self._what} said {reprlib.repr(value['error'])}")
        if isinstance(value, dict) and "reward" in value:
            if not isinstance(correct := value.get("correct", False), bool):
                raise UserCodeFailed(f"{self._what} returned correct {reprlib.repr(correct)} instead of true or false")
            value = {"score": value["reward"]} | {name: part for name, part in value.items() if name not in _NO_PARTS}
        return as_score(value, what=self._what, response=response)

    def _scores(self, samples: list[dict[str, Any]]) -> list[Any]:
        """Return a value per response, after as many attempts as it takes and is allowed.

        Raises:
            _BatchRefused: the scorer's reply is an error, or none of the protocol.
            UserCodeFailed: it cannot be reached.
        """
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            try:
                return self._post(samples)
            except urllib.error.HTTPError as error:
                failure: UserCodeFailed = _BatchRefused(f"{self._what} answered {error.code} {error.reason}")
                error.close()
                if error.code not in _PASSING:
                    raise failure from None
            except (OSError, http.client.HTTPException) as error:
                failure = UserCodeFailed(f"{self._what} does not answer ({error}); look whether it runs")
            if attempt < self._config.retries:
                self._pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise failure

    def _post(self, samples: list[dict[str, Any]]) -> list[Any]:
        request = urllib.request.Request(
            self._config.function,
            data=json.dumps({"samples": samples}).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
        )
        deadline = time.monotonic() + self._config.timeout_s
        with urllib.request.urlopen(request, timeout=self._config.timeout_s) as reply:
            data = _read(reply, deadline)
        try:
            scores = json.loads(data)["scores"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _BatchRefused(f"{self._what} did not answer with an object that has scores") from None
        if not isinstance(scores, list) or len(scores) != len(samples):
            raise _BatchRefused(f"{self._what} answered {len(samples)} samples with other than {len(samples)} scores")
        return scores


def _read(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body, but for what is beyond the largest; the socket's own deadline is one for each of its pieces.

    Raises:
        TimeoutError: it is not all there in time.
    """
    data = bytearray()
    while len(data) < _MOST_BYTES and (piece := reply.read1(_PIECE_BYTES)):
        data += piece
        if time.monotonic() > deadline:
            raise TimeoutError("timed out in the middle of its answer")
    return bytes(data)


def is_url(name: str) -> bool:
    """Return whether a reward's name is one of a remote scorer."""
    return name.startswith(("http://", "https://"))


def check_url(name: str) -> None:
    """Check the URL of a scorer.

    Raises:
        ConfigError: it names no host, or no port that can be, or has what a request cannot carry.
    """
    try:
        parts = urlsplit(name)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")  # as the look-up of its address will
    except ValueError:
        usable = False
    if usable and (parts.username is not None or parts.fragment or not (name.isascii() and name.isprintable())):
        raise ConfigError(
            f"reward.function: {name!r} has what a request cannot carry: a user, a fragment, or characters other than "
            f"printable ASCII; leave those out, or write them as %XX"
        )
    usable = usable and " " not in name
    if not usable:
        raise ConfigError(f"reward.function: {name!r} is no URL of a scorer; write http://HOST:PORT/PATH")
