"""What every generating engine does alike; see the package's docstring for how another one joins."""

import threading

import pytest
import torch

from asyncflow.errors import BadRequest
from workers.engines.base import GenerateRequest, generate

from .lab import Lab
from .tiny_model import EOS, MAX_POSITIONS, VOCABULARY


def test_log_probs_are_those_of_the_tempered_distribution_before_filters(model_lab: Lab) -> None:
    requests = model_lab.requests(40)
    answers = model_lab.drain(requests)
    assert [answer.index for answer in answers] == list(range(40))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.log_probs_R.dtype == torch.float32
        model_lab.assert_like_reference(request, answer)


def test_answers_end_at_eos_or_are_flagged(model_lab: Lab) -> None:
    answers = model_lab.drain(model_lab.requests(60))
    assert {answer.truncated for answer in answers} == {True, False}
    for answer in answers:
        assert EOS not in answer.response_R[:-1]
        assert (answer.response_R[-1] == EOS) != answer.truncated
        assert not answer.truncated or len(answer.response_R) == model_lab.sampling.max_response_tokens


def test_answers_are_never_longer_than_allowed(lab: Lab) -> None:
    for answer in lab.drain(lab.requests(40)):
        assert 0 < len(answer.response_R) <= lab.sampling.max_response_tokens


def test_answers_are_plain_tensors_of_host_memory(lab: Lab) -> None:
    for answer in lab.drain(lab.requests(3)):
        for tensor, dtype in (
            (answer.response_R, torch.int64),
            (answer.log_probs_R, torch.float32),
            (answer.versions_R, torch.int32),
        ):
            assert tensor.dtype == dtype and tensor.shape == answer.response_R.shape
            assert tensor.device.type == "cpu" and not tensor.is_inference()


def test_answer_does_not_depend_on_what_else_runs(model_lab: Lab) -> None:
    if not model_lab.adapter.draws_ignore_batch:
        pytest.skip("the engine says that its draws depend on the batch")
    requests = model_lab.requests(20)
    together = model_lab.drain(requests)
    alone = [model_lab.drain([request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.response_R.equal(other.response_R)
        torch.testing.assert_close(one.log_probs_R, other.log_probs_R, rtol=0, atol=2 * model_lab.adapter.tolerance)


def test_other_seeds_draw_other_answers(model_lab: Lab) -> None:
    prompt = torch.tensor([5, 6, 7])
    requests = [GenerateRequest(row, prompt, seed=row, ticket=row) for row in range(16)]
    answers = {tuple(answer.response_R.tolist()) for answer in model_lab.drain(requests)}
    assert len(answers) > 4


def test_new_weights_take_the_place_of_the_old_ones_entirely(model_lab: Lab) -> None:
    if not model_lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    requests = model_lab.requests(12)
    before = model_lab.drain(requests)
    model_lab.swap(model_lab.new, version=1)
    after = model_lab.drain(requests)  # the same prompts: what was kept of them would show
    assert any(not one.response_R.equal(other.response_R) for one, other in zip(before, after, strict=True))
    for request, answer in zip(requests, after, strict=True):
        assert answer.versions_R.tolist() == [1] * len(answer.response_R)
        model_lab.assert_like_reference(request, answer)


def test_needs_name_the_weights(lab: Lab) -> None:
    if not lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    needs, weights = lab.engine.weight_needs(), lab.adapter.weights(lab.old)
    assert {name: need.shape for name, need in needs.items()} == {
        name: tuple(weight.shape) for name, weight in weights.items()
    }


def test_tokens_carry_the_version_of_the_weights(lab: Lab) -> None:
    if not lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    for version in (7, 8):
        lab.swap(lab.old, version=version)
        for answer in lab.drain(lab.requests(3)):
            assert answer.versions_R.tolist() == [version] * len(answer.response_R)


def test_answers_go_on_with_weights_that_came_meanwhile(lab: Lab) -> None:
    if not (lab.engine.interruptible and lab.adapter.loads_weights):
        pytest.skip("the engine says that it cannot be interrupted")
    requests = lab.requests(16)
    lab.engine.submit(requests)
    answers = lab.step_until_some()
    lab.swap(lab.new, version=1)
    answers += lab.drain()
    assert len(answers) == 16
    seen = [tuple(dict.fromkeys(answer.versions_R.tolist())) for answer in answers]
    assert set(seen) <= {(0,), (0, 1), (1,)} and (0, 1) in seen, "versions ascend within an answer"
    if lab.adapter.families:
        for answer in answers:
            lab.assert_like_reference(requests[answer.ticket], answer)


def test_places_are_filled_while_others_run(lab: Lab) -> None:
    slots = lab.sampling.batch_size
    assert (lab.engine.num_running, lab.engine.free_slots) == (0, slots)
    lab.engine.submit(lab.requests(slots))
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots, 0)
    answers = lab.step_until_some()
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots - len(answers), len(answers))
    assert lab.engine.num_running, "all answers are of one length"
    lab.engine.submit(lab.requests(len(answers), first=slots))
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots, 0)
    answers += lab.drain()
    assert sorted(answer.ticket for answer in answers) == list(range(len(answers))) and len(answers) > slots


def test_answers_that_came_late_are_as_good_as_the_first(model_lab: Lab) -> None:
    slots = model_lab.sampling.batch_size
    requests = model_lab.requests(3 * slots)
    answers = model_lab.drain(requests)
    for request, answer in zip(requests, answers, strict=True):
        model_lab.assert_like_reference(request, answer)


def test_requests_of_one_row_are_told_apart_by_their_tickets(lab: Lab) -> None:
    prompt = torch.tensor([3, 4])
    lab.engine.submit([GenerateRequest(5, prompt, seed=1, ticket=10), GenerateRequest(5, prompt, seed=1, ticket=11)])
    answers = lab.drain()
    assert [(answer.index, answer.ticket) for answer in answers] == [(5, 10), (5, 11)]


def test_abort_forgets_what_runs(lab: Lab) -> None:
    lab.engine.submit(lab.requests(16))
    lab.step_until_some()
    lab.engine.abort()
    assert (lab.engine.num_running, lab.engine.free_slots) == (0, lab.sampling.batch_size)
    woken = threading.Event()
    woken.set()
    assert lab.engine.step(woken) == []
    assert [answer.ticket for answer in lab.drain(lab.requests(4, first=40))] == [40, 41, 42, 43]


def test_idle_step_returns_at_once(lab: Lab) -> None:
    assert lab.engine.step(threading.Event()) == []


def test_more_requests_than_places_are_answered_one_after_another(lab: Lab) -> None:
    requests = lab.requests(3 * lab.sampling.batch_size + 1)
    answers = list(generate(lab.engine, requests))
    assert sorted(answer.ticket for answer in answers) == [request.ticket for request in requests]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (torch.tensor([], dtype=torch.int64), "no tokens"),
        (torch.full((MAX_POSITIONS,), 3), f"{MAX_POSITIONS} tokens"),
        (torch.tensor([3, VOCABULARY]), str(VOCABULARY)),
        (torch.tensor([3, -1]), "-1"),
    ],
    ids=["empty", "too long", "unknown token", "negative token"],
)
def test_bad_request_is_refused_and_nothing_begins(model_lab: Lab, prompt: torch.Tensor, reason: str) -> None:
    good = model_lab.requests(2)
    with pytest.raises(BadRequest, match=reason):
        model_lab.engine.submit([good[0], GenerateRequest(77, prompt, seed=0, ticket=77)])
    assert model_lab.engine.num_running == 0
    assert [answer.ticket for answer in model_lab.drain(good)] == [0, 1]
