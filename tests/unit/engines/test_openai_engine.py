"""The `openai` engine against a server of a few lines that fails as real ones do."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncflow.errors import ConfigError, EngineFailed, PlanError, UserCodeFailed
from tests.support.completions_server import Answer, CompletionsServer, error, events, in_turn, reply, stream
from workers.engines.base import GenerateRequest, Generation, generate
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.stop_strings import StopTokenizer
from workers.settings.openai import OpenAIConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

EOS = 1


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    fake = CompletionsServer(stream([[5, 6], [EOS]]))
    yield fake
    fake.close()


@pytest.fixture
def make_engine(model_dir: Path, server: CompletionsServer, tmp_path: Path) -> Iterator[Callable[..., OpenAIEngine]]:
    made: list[OpenAIEngine] = []

    def make(sampling: dict[str, Any] | None = None, **settings: Any) -> OpenAIEngine:
        given = {"urls": (server.url,), "weights_dir": str(tmp_path / "served"), "retry_pause_s": 0.0} | settings
        engine = OpenAIEngine(
            model_dir,
            ModelConfig(path=str(model_dir)),
            OpenAIConfig.model_validate(given),
            sampling=SamplingConfig.model_validate({"max_response_tokens": 8, "batch_size": 4} | (sampling or {})),
        )
        made.append(engine)
        engine.load_weights(load_file(model_dir / "model.safetensors"))
        return engine

    yield make
    for engine in made:
        engine.close()


def responses(engine: OpenAIEngine, number: int = 1) -> list[Generation]:
    requests = [GenerateRequest(k, torch.tensor([3, 4]), seed=2**64 - 1 - k, ticket=k) for k in range(number)]
    return sorted(generate(engine, requests), key=lambda each: each.ticket)


def test_response_has_tokens_log_probs_and_version(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    engine = make_engine()
    engine.version = 3
    found = responses(engine, 6)
    assert [each.index for each in found] == list(range(6))
    for each in found:
        assert each.response_R.tolist() == [5, 6, EOS] and each.log_probs_R.tolist() == [-0.5] * 3
        assert each.versions_R.tolist() == [3, 3, 3] and not each.truncated
    body = server.bodies[0]
    assert (body["model"], body["prompt"], body["stop_token_ids"]) == ("served", [3, 4], [EOS])
    assert all(0 <= body["seed"] < 2**63 for body in server.bodies)
    assert len({body["seed"] for body in server.bodies}) == 6
    # else a model's generation_config.json would change what is drawn
    names = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [body[name] for name in names] == [0.0, 1.0, 0.0, 0.0]


def test_limit_and_stop_tokens_of_a_request_reach_the_server(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    server.answer = stream([[5], [9]])
    request = GenerateRequest(0, torch.tensor([3, 4]), seed=1, max_tokens=2, stop_ids=(9, EOS))
    engine = make_engine()
    (found,) = generate(engine, [request])
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["stop_token_ids"]) == (2, [EOS, 9])
    assert found.response_R.tolist() == [5, 9] and not found.truncated
    server.answer = stream([[5, 6, 7]], reason="length")
    with pytest.raises(EngineFailed, match="returned 3 tokens, where 1 to 2 were requested"):
        list(generate(engine, [request]))


def test_cancelled_response_closes_its_connection_and_leaves_the_others(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    begun, gone = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["prompt"] != [7]:
            stream([[5, EOS]])(handler, body)
            return
        begun.set()
        with suppress(ConnectionError):
            handler.connection.recv(1)  # returns when the client closes it
        gone.set()

    server.answer = answer
    engine = make_engine()
    engine.submit([GenerateRequest(k, torch.tensor([prompt]), 0, ticket=k) for k, prompt in enumerate((7, 3))])
    assert begun.wait(60)
    engine.cancel(0)
    assert gone.wait(60)
    assert [each.ticket for each in generate(engine, [])] == [1]
    assert (engine.num_running, engine.free_slots) == (0, 4)


def test_a_completed_stop_string_closes_the_connection_and_the_caller_cuts_what_came_with_it(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    gone = threading.Event()

    class Digits:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(map(str, tokens))

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(digit) for digit in text]

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        stream([[5, 6], [7, 8, 9]], reason=None)(handler, body)
        with suppress(ConnectionError):
            handler.connection.recv(1)  # returns when the client closes it
        gone.set()

    server.answer = answer
    engine = make_engine()
    stop = StopTokenizer(Digits).make_stop_strings(["67"])
    (found,) = generate(engine, [GenerateRequest(0, torch.tensor([3, 4]), 0, stop=stop)])
    assert gone.wait(60)
    assert found.response_R.tolist() == [5, 6, 7, 8, 9] and not found.truncated
    cut, stopped = found.until(stop)
    assert (cut.response_R.tolist(), cut.log_probs_R.tolist(), cut.versions_R.tolist()) == (
        [5, 6, 7],
        [-0.5] * 3,
        [0] * 3,
    )
    assert stopped is not None and (stopped.text, stopped.shown_ids) == ("67", [5])


def scores(*log_probs: float, tokens: tuple[int, ...] = (4, 5)) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    """Return what answers with a prompt's log-probabilities, as vLLM's server does."""
    known = [None, *({str(token): {"logprob": value}} for token, value in zip(tokens, log_probs, strict=True))]
    return lambda handler, _: reply(handler, 200, {"choices": [{"text": "", "prompt_logprobs": known}]})


def test_every_server_scores_a_prompt(make_engine: Callable[..., OpenAIEngine], server: CompletionsServer) -> None:
    other = CompletionsServer(scores(-1.5, -2.5))
    server.answer = scores(-1.0, -2.0)
    engine = make_engine(urls=(server.url, other.url))
    found = engine.prompt_log_probs(torch.tensor([3, 4, 5]))
    other.close()
    assert found is not None and found.tolist() == [[-1.0, -2.0], [-1.5, -2.5]]
    (body,) = server.bodies
    assert (body["prompt"], body["max_tokens"], body["prompt_logprobs"]) == ([3, 4, 5], 1, 0)


def test_a_server_that_scores_no_prompts_is_told_of_and_no_failure(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    without = lambda handler, _: reply(handler, 200, {"choices": [{"text": ""}]})  # noqa: E731
    others = scores(-1.0, -2.0, tokens=(7, 8))
    for answer in (error(400, "prompt_logprobs"), without, others):
        server.answer = answer
        assert engine.prompt_log_probs(torch.tensor([3, 4, 5])) is None
    told = [record.message for record in caplog.records if "are not compared" in record.message]
    assert len(told) == 1 and "answered 400" in told[0]
    tempered = make_engine({"temperature": 0.5}, logprobs_mode="processed")
    assert tempered.prompt_log_probs(torch.tensor([3, 4, 5])) is None


def test_all_calls_of_a_rollout_go_to_one_server(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    other = CompletionsServer(server.answer)
    try:
        engine = make_engine(urls=(server.url, other.url))
        for turn in range(2):  # the prompt's first token names the rollout
            calls = [(2, 2), (3, 3), (5, 5), (4, 4)][:: -1 if turn else 1]
            list(generate(engine, [GenerateRequest(k, torch.tensor([p]), 0, ticket=k) for k, p in calls]))
    finally:
        other.close()
    heard = [sorted(body["prompt"][0] for body in one.bodies) for one in (server, other)]
    assert heard == [[2, 2, 4, 4], [3, 3, 5, 5]]


def test_cut_response_is_flagged(make_engine: Callable[..., OpenAIEngine], server: CompletionsServer) -> None:
    server.answer = stream([[5] * 8], reason="length")
    (found,) = responses(make_engine())
    assert found.truncated and len(found.response_R) == 8


def test_weights_are_written_and_the_server_told(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, model_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    weights = load_file(model_dir / "model.safetensors")
    for _ in range(3):
        engine.load_weights({name: weight + 1 for name, weight in weights.items()})
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["load_000003", "load_000004"]
    written = load_file(tmp_path / "served" / "load_000004" / "model.safetensors")
    assert all(written[name].equal(weight + 1) for name, weight in weights.items())
    assert (tmp_path / "served" / "load_000004" / "config.json").is_file()
    told = [path.partition("?")[0] for path in server.paths[-4:]]
    assert told == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
    with pytest.raises(PlanError, match="missing"):
        engine.load_weights({})
    (tmp_path / "served" / "load_of_mine").mkdir()
    make_engine()  # starts again in place: what servers were told before is not written over
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == [
        "load_000004", "load_000005", "load_of_mine",
    ]  # fmt: skip


def test_server_that_cannot_take_weights_is_named_with_what_to_do(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    server.closed.set()
    with pytest.raises(EngineFailed, match=r"/pause.* answered 404.*VLLM_SERVER_DEV_MODE=1.*openai.update"):
        make_engine()


@pytest.mark.parametrize(
    "trouble",
    [
        error(503),
        error(429),
        stream([[5]], reason=None),
        stream([[5]], reason="abort"),
        lambda handler, body: handler.connection.close(),
        events('{"choices": [{"tok'),
        events('{"error": {"message": "cache lost"}}'),
    ],
    ids=["unavailable", "too many", "breaks off", "is aborted", "hangs up", "cut JSON", "error in the stream"],
)
def test_response_is_asked_for_again_when_it_may_help(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, trouble: Answer
) -> None:
    server.answer = in_turn(trouble, trouble, stream([[7, EOS]]))
    (found,) = responses(make_engine())
    assert found.response_R.tolist() == [7, EOS] and len(server.bodies) == 3


def test_server_that_was_started_again_gets_its_weights_back_and_the_response_does_not_count(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, tmp_path: Path
) -> None:
    def start_again(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        server.mark = "default"
        stream([[9, EOS]])(handler, body)

    engine = make_engine()
    engine.load_weights(load_file(Path(engine._model_dir) / "model.safetensors"))
    server.answer = in_turn(start_again, stream([[7, EOS]]))
    server.paths.clear()
    (found,) = responses(engine)
    assert found.response_R.tolist() == [7, EOS]
    told = [path.partition("?")[0] for path in server.paths if "/v1" not in path and path != "/weight_info"]
    assert told == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]


def test_responses_wait_for_a_server_that_takes_its_weights_again(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    asked = itertools.count()

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        number = next(asked)
        if number == 0:
            server.mark = "default"
        if number == 1 and server.paused.wait(60):
            reply(handler, 503, {})
        else:
            stream([[7, EOS]])(handler, body)

    engine = make_engine(retries=1)
    server.paused.clear()
    server.answer, server.slow_s = answer, 0.3
    # asked for while the server reads weights, the second attempt would be for nothing, and there is no third
    assert [each.response_R.tolist() for each in responses(engine, 2)] == [[7, EOS]] * 2


def test_server_that_notes_no_version_of_weights_is_believed(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_update.py").write_text(
        "def update(directory):\n    (directory.parent / 'taken').write_text(directory.name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    engine = make_engine(update="my_update:update")
    assert [path.read_text() for path in tmp_path.rglob("taken")] == ["load_000001"]
    assert responses(engine)[0].response_R.tolist() == [5, 6, EOS]
    assert "/weight_info" not in server.paths


def test_server_that_is_away_gets_its_weights_when_it_is_back(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    server.away.set()
    engine = make_engine()
    assert responses(engine)[0].response_R.tolist() == [5, 6, EOS]


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_users_function_that_raises_fails_the_swap(
    make_engine: Callable[..., OpenAIEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "my_update.py").write_text(
        "def plain(directory):\n    raise OSError('cluster is down')\n"
        "async def later(directory):\n    plain(directory)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeFailed, match=rf"update: my_update:{kind} raised OSError: cluster is down on the weig"):
        make_engine(update=f"my_update:{kind}")


def test_key_is_sent_without_white_space_and_never_shown(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    make_engine()
    assert server.keys == ["Bearer sk-secret"]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds is not a key") as refused:
        make_engine()
    assert "secret" not in str(refused.value)


def test_server_that_stays_away_fails_after_the_last_attempt(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    server.answer = error(500, "out of memory")
    engine = make_engine(retries=1)
    with pytest.raises(EngineFailed, match=r"answered 500 .*out of memory.*; tried 2 times"):
        responses(engine)
    assert len(server.bodies) == 2


def test_silent_server_fails_by_its_deadline(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    release = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        release.wait(60)

    server.answer = hang
    engine = make_engine(retries=0, timeout_s=3)
    with pytest.raises(EngineFailed, match="did not answer in time"):
        responses(engine)
    release.set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (error(400, "prompt too long"), "400 .*prompt too long"),
        (error(401, "no key"), "401 .*no key"),
        (error(404, "no such model"), "404 .*no such model"),
        (error(307), "307"),
        (stream([[5]], ids=False), "does not return token ids"),
        (events('{"choices": [{"token_ids": [1], "finish_reason": "stop"}]}'), "0 log-probabilities for 1 tokens"),
        (events('{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}'), "got `null`"),
        (events('{"choices": null}'), r"/v1/completions answered in an unexpected form.*choices"),
        (events("5"), "answered in an unexpected form"),
        (stream([[]]), "returned 0 tokens, where 1 to 8"),
        (stream([[5] * 9], reason="length"), "returned 9 tokens, where 1 to 8"),
        (stream([[99, EOS]]), "returned token 99, but the model has 13 tokens"),
        (stream([[5, 6]]), "ended a response with token 6, which is not an end token"),
        (stream([[5, EOS, 6]], reason="length"), "continued after an end token"),
    ],
)
def test_what_would_go_wrong_again_is_not_repeated(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer, answer: Answer, reason: str
) -> None:
    server.answer = answer
    engine = make_engine()
    with pytest.raises(EngineFailed, match=reason):
        responses(engine)
    assert len(server.bodies) == 1


def test_abort_forgets_responses_and_leaves_the_engine_usable(
    make_engine: Callable[..., OpenAIEngine], server: CompletionsServer
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.set()
        release.wait(60)

    server.answer = hang
    engine = make_engine()
    engine.submit([GenerateRequest(0, torch.tensor([3]), seed=0)])
    assert asked.wait(60)
    engine.abort()
    assert engine.num_running == 0 and engine.free_slots == 4
    release.set()
    server.answer = stream([[EOS]])
    assert [each.response_R.tolist() for each in responses(engine, 2)] == [[EOS], [EOS]]


@pytest.mark.parametrize(
    ("sampling", "settings", "reason"),
    [
        ({"temperature": 0.8}, {}, "rollout.temperature: 0.8 .*processed_logprobs"),
        ({"top_p": 0.9}, {"logprobs_mode": "processed"}, "rollout.top_p"),
    ],
)
def test_settings_that_give_other_log_probs_are_refused(
    make_engine: Callable[..., OpenAIEngine], sampling: dict[str, float], settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(sampling, **settings)
