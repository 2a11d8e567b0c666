"""A whole run with the `openai` engine, against a server whose responses are drawn from all tokens alike."""

import math
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.support.completions_server import Body, CompletionsServer, reply, stream

from . import command

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
SMALL = (
    "--set", "schedule.rollout_batch_size=4", "--set", "schedule.n_samples_per_prompt=4",
    "--set", "rollout.batch_size=8",
    "--set", "actor.micro_batch_size=8",
)  # fmt: skip


def any_tokens(handler: BaseHTTPRequestHandler, body: Body) -> None:
    """Draw every token with the same probability, which is what the log-probabilities say; score no prompt."""
    if "prompt_logprobs" in body:
        reply(handler, 400, {"error": {"message": "prompt_logprobs is not supported"}})
        return
    size = AutoConfig.from_pretrained(MODEL).vocab_size
    draw, tokens = random.Random(body["seed"]), list[int]()
    while len(tokens) < body["max_tokens"] and not set(tokens) & set(body["stop_token_ids"]):
        tokens.append(draw.randrange(size))
    ended = tokens[-1] in body["stop_token_ids"]
    stream([tokens], reason="stop" if ended else "length", log_prob=-math.log(size))(handler, body)


@pytest.fixture(name="server")
def _server() -> Iterator[CompletionsServer]:
    server = CompletionsServer(any_tokens)
    yield server
    server.close()


def test_responses_of_a_server_are_trained_and_it_takes_every_version(
    server: CompletionsServer, tmp_path: Path
) -> None:
    served = ("--set", f"openai.urls=[{server.url}]", "--set", f"openai.weights_dir={tmp_path / 'served'}")
    roles = ("--roles", "rollout:1,actor:1", "--set", "rollout.engine=openai")
    finished = command.run("--run-dir", "run", "--steps", "3", *roles, *served, *SMALL, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    command.check_ledger(tmp_path / "run", groups_per_step=4, last=3)
    assert len(server.bodies) >= 3 * 16
    assert server.mark != "default"
    told = [path.partition("?")[0] for path in server.paths if path.startswith(("/pause", "/resume"))]
    assert told[:4] == ["/pause", "/resume"] * 2
    assert any((tmp_path / "served").glob("load_*/model.safetensors"))
