"""Where a string ends a response: on tokenizers that cut as they like, and in engines that draw token by token or block
by block."""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

from asyncflow.errors import BadRequest
from launcher.config.paths import find_recipe
from tests.support.chat_templates import TEMPLATES, tokenizer
from workers.data.tokenizer import load_tokenizer
from workers.engines.base import GenerateRequest, Generation, generate
from workers.engines.hf.engine import HfEngine
from workers.engines.sim.decode_times import SimLengths
from workers.engines.sim.engine import SimGenerateEngine
from workers.engines.stop_strings import Stopped, StopStrings, StopTokenizer
from workers.engines.vllm.engine import VllmEngine
from workers.rollout.rollouts import SingleTurn
from workers.rows.finished import RolloutRequest
from workers.settings.rollout import RolloutConfig, SamplingConfig, unusable_stop
from workers.settings.run import ModelConfig
from workers.settings.sim import SimConfig

CPU = torch.device("cpu")
NEVER = threading.Event()


class Letters:
    """A tokenizer whose token n is the n-th letter; from 26 on, that letter, a line break and another one."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        letters = [chr(97 + token % 26) for token in tokens]
        return "".join(a if token < 26 else f"{a}\n{a}" for token, a in zip(tokens, letters, strict=True))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 97 for letter in text]


def letters(*stop: str) -> StopStrings:
    found = StopTokenizer(Letters).make_stop_strings(stop)
    assert found is not None
    return found


def of_family(family: str, *stop: str) -> StopStrings:
    found = StopTokenizer(lambda: tokenizer(family)).make_stop_strings(stop)
    assert found is not None
    return found


def text_of(family: str, tokens: Sequence[int]) -> str:
    decoded = tokenizer(family).decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(decoded)


def test_a_string_across_two_tokens_ends_with_the_one_that_completes_it() -> None:
    assert letters("bc").stopped([0, 1, 2, 3]) == Stopped("bc", 3, [0])


def test_a_string_inside_a_token_keeps_the_token_and_shows_what_is_before() -> None:
    assert letters("\n").stopped([0, 27, 3]) == Stopped("\n", 2, [0, 1])


def test_the_string_that_is_complete_first_ends_it_and_of_two_in_one_token_the_one_that_begins_first() -> None:
    assert letters("d", "bc").stopped([0, 1, 2, 3]) == Stopped("bc", 3, [0])
    assert letters("b", "\n").stopped([0, 27]) == Stopped("b", 2, [0])


def test_a_string_that_is_not_there_ends_nothing() -> None:
    assert letters("cb").stopped([0, 1, 2, 3]) is None
    assert StopTokenizer(Letters).make_stop_strings(()) is None


def test_a_string_inside_a_tool_call_ends_it_there() -> None:
    call = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call> Observation: none'
    tokens = tokenizer("qwen3").encode(call, add_special_tokens=False)
    for stop, shown in (("command", call.partition("command")[0]), ("</tool_call>", call.partition("</tool_call>")[0])):
        stopped = of_family("qwen3", stop).stopped(tokens)
        assert stopped is not None
        assert text_of("qwen3", stopped.shown_ids) == shown
        assert text_of("qwen3", tokens[: stopped.num_tokens - 1]).count(stop) == 0


def test_half_a_character_hides_no_string() -> None:
    tokens = tokenizer("qwen3").encode("né😀\nno", add_special_tokens=False)
    stopped = of_family("qwen3", "😀\n").stopped(tokens)
    assert stopped is not None
    assert text_of("qwen3", stopped.shown_ids) == "né"


@pytest.mark.parametrize("family", TEMPLATES)
@given(data=st.data())
def test_asked_token_by_token_or_block_by_block_it_is_the_first_prefix_that_holds_a_string(
    family: str, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer(family)) - 1), min_size=1, max_size=40))
    text = text_of(family, tokens)
    begin = data.draw(st.integers(0, len(text)))
    stop = text[begin : begin + data.draw(st.integers(1, 9))] or "zq"
    if unusable_stop(stop):
        return
    strings = of_family(family, stop)
    first = next((n for n in range(1, len(tokens) + 1) if stop in text_of(family, tokens[:n])), None)
    stopped = strings.stopped(tokens)
    assert (None if stopped is None else stopped.num_tokens) == first
    if stopped is not None and first is not None:
        shown = text_of(family, stopped.shown_ids)
        assert text_of(family, tokens[:first]).partition(stop)[0] == shown
    size, asked = data.draw(st.sampled_from([1, 3, 8])), []
    for end in [*range(size, len(tokens), size), len(tokens)]:
        asked.append(strings.are_in(tokens[:end], since=max(0, end - size)))
        assert asked[-1] == (first is not None and first <= end)
        if asked[-1]:
            break


@pytest.mark.parametrize(
    ("text", "usable"), [("\n", True), ("é", True), ("", False), ("\ufffd", False), ("\ud800", False), (7, False)]
)
def test_what_no_text_can_hold_is_refused(text: object, usable: bool) -> None:
    assert (not unusable_stop(text)) == usable


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": ["\n", ""]}, "'' must be a text that is not empty"),
        ({"stop": ["\n"], "function": "tools"}, "it is for one response to each prompt, and function has calls"),
    ],
)
def test_stop_strings_of_a_run_that_cannot_be_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate({"max_response_tokens": 8, **settings})
    assert RolloutConfig.model_validate({"max_response_tokens": 8, "stop": ["\n"]}).stop == ("\n",)


def of_letters(index: int, stop: StopStrings | None) -> GenerateRequest:
    return GenerateRequest(index, torch.tensor([2, 3]), seed=100 + index, ticket=index, stop=stop)


def test_the_hf_engine_draws_no_further_than_the_string(model_dir: Path) -> None:
    settings = SamplingConfig.model_validate({"max_response_tokens": 32, "batch_size": 8})
    engine = HfEngine(model_dir, ModelConfig(path=str(model_dir)), sampling=settings, device=CPU)
    engine.load_weights(load_file(model_dir / "model.safetensors"))
    whole = max(generate(engine, [of_letters(index, None) for index in range(8)]), key=lambda one: len(one.response_R))
    tokens = whole.response_R.tolist()
    assert len(tokens) > 6
    stop = letters(Letters().decode(tokens[3:5]))
    expected = cast(Stopped, stop.stopped(tokens)).num_tokens
    (ended,) = generate(engine, [of_letters(whole.index, stop)])
    assert ended.response_R.tolist() == tokens[:expected]
    torch.testing.assert_close(ended.log_probs_R, whole.log_probs_R[:expected], rtol=0, atol=1e-5)
    assert not ended.truncated and engine.free_slots == 8


class BlockEngine:
    """Draws all of a response at once, and knows no strings."""

    num_running, free_slots = 0, 4

    def __init__(self, tokens: list[int], *, truncated: bool) -> None:
        self.tokens = tokens
        self.truncated = truncated
        self.requests: list[GenerateRequest] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.requests += requests

    def step(self, wake: threading.Event) -> list[Generation]:
        number = len(self.tokens)
        log_probs, versions = [-float(k) for k in range(number)], list(range(number))
        return [
            Generation.of(one, tokens=self.tokens, log_probs=log_probs, versions=versions, truncated=self.truncated)
            for one in self.requests
        ]


@pytest.mark.parametrize("truncated", [False, True])
def test_a_rollout_of_one_turn_loses_what_was_drawn_beyond_the_string_and_is_not_truncated(truncated: bool) -> None:
    engine: Any = BlockEngine([0, 1, 2, 3, 4], truncated=truncated)
    rollouts = SingleTurn(engine, letters("bc"))
    rollouts.begin([RolloutRequest(0, 7, 1, torch.tensor([9, 9]))])
    (one,) = rollouts.step(NEVER)
    assert one.tokens_T.tolist() == [9, 9, 0, 1, 2]
    assert one.response_mask_T.tolist() == [0, 0, 1, 1, 1] and one.sample_lengths == [5]
    assert (one.log_probs_A.tolist(), one.versions_A.tolist()) == ([0, -1, -2], [0, 1, 2])
    assert not one.truncated


def test_the_sim_engine_refuses_a_string() -> None:
    lengths = SimLengths(SimConfig(), samples_per_step=4, seed=1)
    engine = SimGenerateEngine(SimConfig(), lengths, num_slots=2, max_response_tokens=8)
    with pytest.raises(BadRequest, match="sim engine draws no text"):
        engine.submit([of_letters(0, letters("a"))])
    assert engine.num_running == 0


class Vllm:
    """Streams cumulative outputs, two tokens each, as `AsyncLLM` does; tells the weights at the end alone.

    Attributes:
        sent: tokens of the last output.
        dropped: the request was given up before its end.
    """

    def __init__(self, tokens: list[int], engine: VllmEngine, swap_after: int = 100) -> None:
        self.tokens, self.engine, self.swap_after = tokens, engine, swap_after
        self.sent, self.dropped = 0, False

    async def generate(
        self, prompt: object, parameters: object, name: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        try:
            for end in range(2, len(self.tokens) + 1, 2):
                self.sent = end
                if end > self.swap_after:
                    self.engine._begun_load = 2
                over = end == len(self.tokens)
                spans = [SimpleNamespace(version="1", start=0, end=2), SimpleNamespace(version="2", start=2, end=end)]
                completion = SimpleNamespace(
                    token_ids=self.tokens[:end],
                    logprobs=SimpleNamespace(logprobs=[-float(k) for k in range(end)]),
                    finish_reason="length" if over else None,
                    weight_versions=spans if over else None,
                )
                yield SimpleNamespace(outputs=[completion])
        except GeneratorExit:
            self.dropped = True
            raise


def vllm_response(monkeypatch: pytest.MonkeyPatch, stop: StopStrings | None, swap_after: int = 100) -> tuple[Any, Vllm]:
    names = ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for error in ("EngineDeadError", "EngineGenerateError"):
        monkeypatch.setattr(sys.modules[names[-1]], error, type(error, (Exception,), {}), raising=False)
    engine = VllmEngine.__new__(VllmEngine)
    made: Any = engine
    made._begun_load, made._num_aborts, made._tasks = 1, 0, SimpleNamespace(note_progress=lambda: None)
    made._tells_versions, made._no_swap, made._lora = True, asyncio.Event(), None
    made._sampling, made._num_top = SimpleNamespace(keeps_mask=False), 0
    made._no_swap.set()
    made._parameters = lambda request, before: None
    made._llm = Vllm([0, 1, 2, 3, 4, 5, 6, 7], engine, swap_after)
    return asyncio.run(engine._generate(of_letters(0, stop))), made._llm


def test_vllm_is_told_to_drop_the_rest_behind_the_block_that_completes_the_string(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    response, vllm = vllm_response(monkeypatch, letters("bc"))
    assert (response.response_R.tolist(), response.log_probs_R.tolist()) == ([0, 1, 2, 3], [0, -1, -2, -3])
    assert (response.truncated, response.versions_R.tolist()) == (False, [1] * 4)
    assert (vllm.sent, vllm.dropped) == (4, True)


def test_vllm_is_left_to_its_end_where_it_has_not_said_which_weights_drew_what(monkeypatch: pytest.MonkeyPatch) -> None:
    response, vllm = vllm_response(monkeypatch, letters("bc"), swap_after=2)
    assert (response.versions_R.tolist(), vllm.sent, vllm.dropped) == ([1] * 2 + [2] * 6, 8, False)
    assert len(response.response_R) == 8  # the caller cuts them


def test_vllm_without_strings_is_left_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    response, vllm = vllm_response(monkeypatch, None)
    assert (len(response.response_R), response.truncated, vllm.dropped) == (8, True, False)


def test_the_quickstarts_tokenizer_finds_strings_of_its_letters() -> None:
    model = find_recipe("quickstart-tools").parent / "quickstart_tools" / "model"
    strings = StopTokenizer(lambda: load_tokenizer(model)).make_stop_strings(["*6"])
    ids = load_tokenizer(model).encode("<call>37*64<eos>", add_special_tokens=False)
    assert strings is not None and strings.stopped(ids) == Stopped("*6", 5, ids[:3])
