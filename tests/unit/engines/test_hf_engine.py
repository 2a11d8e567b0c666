"""Generation: log-probabilities, independence of the batch, ends of responses, weights."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncflow.errors import ConfigError, PlanError
from workers.engines.base import GenerateRequest, Generation, WakePart, generate
from workers.engines.hf.engine import HfEngine
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig

CPU = torch.device("cpu")


def weights_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def make_engine(path: Path, **rollout: object) -> HfEngine:
    settings = {"max_response_tokens": 8, "batch_size": 64} | rollout
    engine = HfEngine(path, ModelConfig(path=str(path)), sampling=SamplingConfig.model_validate(settings), device=CPU)
    engine.load_weights(weights_of(path))
    return engine


def make_requests(num: int, *, first: int = 0) -> list[GenerateRequest]:
    """Groups of two responses; prompts of one to four tokens."""
    prompts = [torch.arange(2, 3 + group % 4) + group % 5 for group in range(num)]
    return [GenerateRequest(first + i, prompts[i // 2], seed=100 + i) for i in range(num)]


def by_index(responses: list[Generation]) -> list[Generation]:
    return sorted(responses, key=lambda response: response.index)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_log_probs_equal_those_of_a_full_forward(make_model_dir: Callable[..., Path], family: str) -> None:
    path = make_model_dir(family)
    requests = make_requests(24)
    model = AutoModelForCausalLM.from_pretrained(path)
    responses = by_index(list(generate(make_engine(path, temperature=0.8), requests)))
    assert [response.index for response in responses] == list(range(24))
    for request, response in zip(requests, responses, strict=True):
        tokens = torch.cat([request.prompt_P, response.response_R])
        with torch.no_grad():
            logits = model(tokens.unsqueeze(0)).logits[0, request.prompt_P.numel() - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, response.response_R[:, None]).squeeze(-1)
        assert response.log_probs_R.dtype == torch.float32
        torch.testing.assert_close(response.log_probs_R, expected, rtol=0, atol=2e-5)


def test_responses_end_at_eos_or_are_flagged(model_dir: Path) -> None:
    responses = list(generate(make_engine(model_dir), make_requests(40)))
    assert {response.truncated for response in responses} == {True, False}
    for response in responses:
        assert 1 not in response.response_R[:-1]
        assert (response.response_R[-1] == 1) != response.truncated
        assert not response.truncated or len(response.response_R) == 8
        assert not response.response_R.is_inference() and not response.log_probs_R.is_inference()


def test_short_responses_come_first(model_dir: Path) -> None:
    lengths = [len(response.response_R) for response in generate(make_engine(model_dir), make_requests(40))]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_abort_ends_generation_between_tokens(model_dir: Path) -> None:
    engine, never = make_engine(model_dir), threading.Event()
    engine.submit(make_requests(40))
    assert engine.num_running == 40 and engine.free_slots == 24
    while not (responses := engine.step(never)):
        pass
    assert 0 < engine.num_running == 40 - len(responses)
    engine.abort()
    assert engine.num_running == 0 and engine.free_slots == 64
    assert len(list(generate(engine, make_requests(3)))) == 3


def test_tokens_say_which_weights_drew_them(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    engine.version = 7
    for response in generate(engine, make_requests(3)):
        assert response.versions_R.dtype == torch.int32
        assert response.versions_R.tolist() == [7] * len(response.response_R)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}])
def test_response_does_not_depend_on_its_batch(model_dir: Path, sampling: dict[str, float]) -> None:
    requests = make_requests(24)
    engine = make_engine(model_dir, **sampling)
    together = by_index(list(generate(engine, requests)))
    in_fives = by_index(list(generate(make_engine(model_dir, batch_size=5, **sampling), requests)))
    alone = [next(generate(engine, [request])) for request in requests]
    for responses in (in_fives, alone):
        for left, right in zip(together, responses, strict=True):
            assert left.response_R.equal(right.response_R)
            torch.testing.assert_close(left.log_probs_R, right.log_probs_R, rtol=0, atol=2e-5)


def test_greedy_responses_are_those_of_transformers_for_every_seed(model_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    requests = make_requests(24)
    reseeded = [GenerateRequest(each.index, each.prompt_P, seed=each.seed + 1000) for each in requests]
    engine = make_engine(model_dir, temperature=0.0)
    first, second = (by_index(list(generate(engine, batch))) for batch in (requests, reseeded))
    for request, one, other in zip(requests, first, second, strict=True):
        assert one.response_R.equal(other.response_R)
        expected = model.generate(request.prompt_P[None], do_sample=False, max_new_tokens=8)[0, len(request.prompt_P) :]
        assert one.response_R.equal(expected)


def test_new_weights_change_responses_in_place(make_model_dir: Callable[..., Path]) -> None:
    old, new = make_model_dir(seed=0), make_model_dir(seed=1)
    engine = make_engine(old)
    before = by_index(list(generate(engine, make_requests(8))))
    engine.load_weights(weights_of(new))
    after = by_index(list(generate(engine, make_requests(8))))
    fresh = by_index(list(generate(make_engine(new), make_requests(8))))
    assert any(not a.response_R.equal(b.response_R) for a, b in zip(before, after, strict=True))
    for left, right in zip(after, fresh, strict=True):
        assert left.response_R.equal(right.response_R) and left.log_probs_R.equal(right.log_probs_R)


def test_weights_are_cast_to_the_configured_type(model_dir: Path) -> None:
    config = ModelConfig(path=str(model_dir), dtype="bfloat16")
    engine = HfEngine(model_dir, config, sampling=SamplingConfig(max_response_tokens=4), device=CPU)
    engine.load_weights(weights_of(model_dir))
    responses = list(generate(engine, make_requests(4)))
    assert len(responses) == 4 and all(response.log_probs_R.dtype == torch.float32 for response in responses)


def test_tied_weights_are_asked_for_once(make_model_dir: Callable[..., Path]) -> None:
    engine = make_engine(make_model_dir("llama", tie_word_embeddings=True))
    needs = engine.weight_needs()
    assert "lm_head.weight" not in needs and needs["model.embed_tokens.weight"].shape == (13, 32)
    assert list(generate(engine, make_requests(2)))


def test_weights_that_do_not_fit_are_named(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    before = next(generate(engine, make_requests(1)))
    weights = weights_of(model_dir)
    missing = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(PlanError, match=r"missing model\.norm\.weight, unknown none"):
        engine.load_weights(missing)
    with pytest.raises(PlanError, match=r"unknown extra"):
        engine.load_weights(weights | {"extra": torch.zeros(1)})
    with pytest.raises(PlanError, match=r"model\.norm\.weight.*\(3,\).*\(32,\)"):
        engine.load_weights(
            {name: torch.zeros_like(t) for name, t in weights.items()} | {"model.norm.weight": torch.zeros(3)}
        )
    assert next(generate(engine, make_requests(1))).log_probs_R.equal(before.log_probs_R)


def test_all_end_tokens_of_generation_config_count(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    responses = list(generate(make_engine(model_dir), make_requests(40)))
    assert {int(response.response_R[-1]) for response in responses if not response.truncated} == {1, 4}


def test_model_without_end_token_is_refused(make_model_dir: Callable[..., Path]) -> None:
    path = make_model_dir("llama", eos_token_id=None)
    with pytest.raises(ConfigError, match="eos_token_id"):
        make_engine(path)


def test_prompt_of_a_group_is_computed_once_even_if_its_responses_begin_one_after_another(model_dir: Path) -> None:
    engine = make_engine(model_dir, batch_size=2, max_response_tokens=3)
    computed: list[int] = []
    forward = engine._model.forward

    def counting(*, input_ids: Tensor, **rest: Any) -> Any:
        computed.append(input_ids.numel())
        return forward(input_ids=input_ids, **rest)

    engine._model.forward = counting
    prompt = torch.arange(2, 12)
    responses = list(generate(engine, [GenerateRequest(row, prompt, seed=row, ticket=row) for row in range(8)]))
    # every token but each response's last is fed once, and the prompt once
    assert sum(computed) == 10 + sum(len(response.response_R) - 1 for response in responses)


def test_responses_of_very_different_lengths_are_not_padded_to_each_other(model_dir: Path) -> None:
    engine = make_engine(model_dir)
    engine.submit([GenerateRequest(row, torch.full((length,), 3), seed=row) for row, length in enumerate((1, 2, 50))])
    engine.step(threading.Event())
    lanes = sorted((lane.column, lane._store.shape[2]) for lane in engine._batch._lanes)
    assert lanes == [(2, 2), (50, 1)], "a lane for the short ones, and one for the long one, with room for itself alone"


def test_long_documents_enter_in_several_steps(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(12)
    expected = by_index(list(generate(make_engine(model_dir), requests)))
    monkeypatch.setattr("workers.engines.hf.engine.MAX_ENTERING_TOKENS", 4)
    responses = by_index(list(generate(make_engine(model_dir), requests)))
    assert all(one.response_R.equal(other.response_R) for one, other in zip(expected, responses, strict=True))


def test_sliding_window_is_kept(make_model_dir: Callable[..., Path]) -> None:
    path = make_model_dir("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    requests = [GenerateRequest(row, 2 + torch.arange(3 + 2 * row), seed=row) for row in range(4)]
    for request, response in zip(requests, by_index(list(generate(make_engine(path), requests))), strict=True):
        tokens = torch.cat([request.prompt_P, response.response_R])
        with torch.no_grad():
            logits = model(tokens.unsqueeze(0)).logits[0, request.prompt_P.numel() - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, response.response_R[:, None]).squeeze(-1)
        torch.testing.assert_close(response.log_probs_R, expected, rtol=0, atol=2e-5)


def test_the_base_of_an_adapter_is_there_again_after_a_sleep(model_dir: Path) -> None:
    lora = LoraConfig(rank=2)
    sampling = SamplingConfig(max_response_tokens=4, batch_size=2, temperature=0.0)
    engine = HfEngine(model_dir, ModelConfig(path=str(model_dir)), sampling=sampling, device=CPU, lora=lora)
    request = GenerateRequest(0, torch.tensor([3, 4]), seed=1)

    def load() -> None:
        engine.load_weights({name: torch.full(need.shape, 0.1) for name, need in engine.weight_needs().items()})

    def answer() -> list[int]:
        (response,) = generate(engine, [request])
        return [int(token) for token in response.response_R]

    load()
    before = answer()
    engine.sleep()
    engine.wake(WakePart.WEIGHTS)
    load()
    engine.wake(WakePart.KV_CACHE)
    assert answer() == before
    engine.close()
