"""A feeder and the service that it feeds: exactly once, whichever dies; what cannot be trained on is refused."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from asyncflow.errors import ConfigError, TransportError
from asyncflow.process import ServiceThreads
from asyncflow.transport.meeting import Credentials
from asyncflow.transport.server import Connection
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from workers.admission.feed_service import FeedService
from workers.data.feed_file import FeedFile
from workers.data.prompt_dataset import FedPrompts, PromptTokens
from workers.outside.feed_client import PromptFeed

ROWS = [{"prompt": f"{k}+1=", "answer": str(k + 1)} for k in range(9)]


class Feed:
    """The lead's part of a run, which can be killed and started again."""

    def __init__(self, path: Path, tokens: PromptTokens) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self.credentials = Credentials(store, b"secret", timeout_s=30.0)
        self.over = threading.Event()
        self._path, self._tokens = path, tokens
        self.start()

    def start(self) -> None:
        self.prompts = FedPrompts(FeedFile(self._path, appends=True), self._tokens)
        self.service = FeedService(self.credentials, self.prompts, threads=ServiceThreads("controller-0"))

    def stop(self) -> None:
        self.service.close()
        self.prompts.close()

    def client(self, name: str = "sums") -> PromptFeed:
        return PromptFeed(self.credentials, name, over=self.over)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.prompts.rows.read_row(number) for number in range(self.prompts.rows.fed.num_rows)]


@pytest.fixture(name="tokens", scope="module")
def _tokens() -> PromptTokens:
    config = load_config(find_recipe("quickstart"), overrides=["data.path=null", "data.source=feed"])
    return PromptTokens(config.data, model_dir=Path(config.model.path), own_rollout=False)


@pytest.fixture(name="feed")
def _feed(tmp_path: Path, tokens: PromptTokens) -> Iterator[Feed]:
    feed = Feed(tmp_path / "feed.jsonl", tokens)
    yield feed
    feed.over.set()
    feed.stop()


def test_returning_feeder_is_told_its_last_row_and_the_one_before_it_is_refused(feed: Feed) -> None:
    first = feed.client()
    assert (first.last_sequence, first.put(ROWS[:4])) == (0, 4)
    other = feed.client("others")
    assert other.put(ROWS[4:5]) == 1
    second = feed.client()
    assert second.put(ROWS[second.last_sequence :]) == 9
    with pytest.raises(ConfigError, match="feeder sums: another process has this name now"):
        first.put(ROWS[:1])
    assert feed.rows == [*ROWS[:4], ROWS[4], *ROWS[4:]]
    prompt = feed.prompts.prompt_of_group(2)
    assert (prompt.text, prompt.ground_truth, prompt.epoch, prompt.position) == ("2+1=", "3", 0, 2)
    for one in (first, other, second):
        one.close()


def test_feeder_that_lost_its_name_is_refused_after_a_restart_too_and_the_one_that_has_it_is_not(feed: Feed) -> None:
    old = feed.client()
    assert old.put(ROWS[:2]) == 2
    new = feed.client()
    assert new.put(ROWS[2:5]) == 5
    feed.stop()
    feed.start()
    for _ in range(2):
        with pytest.raises(ConfigError, match="feeder sums: another process has this name now"):
            old.put(ROWS[5:8])
    assert new.put(ROWS[5:]) == 9
    assert feed.rows == ROWS
    for one in (old, new):
        one.close()


def test_put_whose_answer_was_lost_is_sent_again_and_taken_once(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    client, call, lost = feed.client(), Connection.call_service, list[Any]()

    def call_and_lose_the_first_answer(self: Connection, message: Any, **how: Any) -> Any:
        reply = call(self, message, **how)
        if not lost:
            lost.append(message)
            feed.stop()
            feed.start()
            raise TransportError("the controller died")
        return reply

    monkeypatch.setattr(Connection, "call_service", call_and_lose_the_first_answer)
    assert client.put(ROWS[:5]) == 5
    assert client.put(ROWS[5:]) == 9
    assert feed.rows == ROWS
    client.close()


def test_feeder_that_does_not_know_what_became_of_a_put_asks(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    client, call = feed.client(), Connection.call_service

    def call_and_lose_the_answer(self: Connection, message: Any, **how: Any) -> Any:
        call(self, message, timeout_s=30.0)
        raise TransportError("the controller died")

    with monkeypatch.context() as patch, pytest.raises(TransportError, match="feed sums: no answer within 30 s"):
        patch.setattr(Connection, "call_service", call_and_lose_the_answer)
        patch.setattr("workers.outside.feed_client.time", SimpleNamespace(monotonic=itertools.count(0, 60).__next__))
        client.put(ROWS[:5])
    assert client.last_sequence == 5
    assert client.put(ROWS[5:]) == 9
    assert feed.rows == ROWS
    client.close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS[:2], {"question": "1+1=", "answer": "2"}], "row 3 of the put: no field 'prompt'; found: answer, quest"),
        (
            [{"prompt": "11111111+1=", "answer": "2"}],
            "row 1 of the put: the prompt has .*max_prompt_tokens = 8; raise",
        ),
        ([{"prompt": "1+1=", "answer": object()}], "feed sums: a row is not a JSON object"),
        ([["1+1=", "2"]], "feed sums: a row is not a JSON object"),
        ([{**ROWS[0], "image": b"\x00"}], r"feed sums: a row is not a JSON object: b'\\x00' is not a JSON value"),
        ([{**ROWS[0], "scores": [1.0, float("inf")]}], "a row is not a JSON object: inf is not a JSON value"),
        ([{**ROWS[0], "levels": {5: "hard"}}], "a row is not a JSON object: key 5 is not a text"),
    ],
)
def test_put_with_a_bad_row_is_refused_by_one_line_and_nothing_of_it_is_stored(
    feed: Feed, rows: Sequence[Mapping[str, Any]], message: str
) -> None:
    client = feed.client()
    with pytest.raises(ConfigError, match=message) as caught:
        client.put(rows)
    assert "\n" not in str(caught.value)
    assert feed.rows == []
    assert client.put(ROWS[:1]) == 1
    client.close()


def test_feed_that_was_closed_puts_nothing(feed: Feed) -> None:
    client = feed.client()
    assert client.put(iter(ROWS[:1])) == 1  # type: ignore[arg-type]  # what is read once will do
    client.close()
    with pytest.raises(TransportError, match="feed sums: it is closed"):
        client.put(ROWS[1:2])
    assert feed.rows == ROWS[:1]


def test_feed_that_has_ended_takes_no_rows_and_a_run_that_is_over_says_so(feed: Feed) -> None:
    client = feed.client()
    client.put(ROWS[:2])
    client.end()
    with pytest.raises(ConfigError, match="feeder sums: 1 rows after the feed's end; start a new run for them"):
        client.put(ROWS[2:3])
    assert feed.prompts.place(1) == (0, 1)
    assert feed.prompts.place(3) == (1, 1), "what replaces a group begins again"
    feed.service.close()
    feed.over.set()
    with pytest.raises(TransportError, match="feed sums: the run is over"):
        client.put(ROWS[2:3])
    client.close()
