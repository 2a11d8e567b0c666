"""What all generating engines have in common: `from asyncflow.testing.generating import *` in a test module that has
`ADAPTERS`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from asyncflow.errors import BadRequest
from asyncflow.testing.adapter import Adapter
from asyncflow.testing.training import (
    EOS,
    MAX_POSITIONS,
    VOCABULARY,
    Reference,
    base_of,
    save_adapted_model,
    save_tiny_model,
)
from weightsync.checksums import tensor_checksum
from workers.engines.base import (
    ChecksummedEngine,
    GenerateEngine,
    GenerateRequest,
    Generation,
    ResamplingEngine,
    ScoringEngine,
    SleepingGenerator,
    WakePart,
    generate,
)
from workers.settings.rollout import SamplingConfig

# An engine under test, with what a test does to it: ask, step, swap, compare with the reference.
#
# Every wait has a deadline, so an engine that hangs fails its test.

DEADLINE_S = 120.0


@dataclass
class Lab:
    adapter: Adapter
    engine: GenerateEngine
    sampling: SamplingConfig  # how it draws
    old: Path  # directory of a model, which is loaded when a test begins
    new: Path  # directory of another model of the same shape

    def reset(self) -> "Lab":
        self.engine.abort()
        if self.adapter.loads_weights:
            self.swap(self.old, version=0)
        return self

    def swap(self, path: Path, *, version: int) -> None:
        self.engine.load_weights(self.adapter.weights(path))
        self.engine.version = version

    def wake(self, path: Path, *, version: int) -> None:
        """Wake an engine that sleeps, with the weights of a directory."""
        engine = self.sleeper
        engine.wake(WakePart.WEIGHTS)
        self.swap(path, version=version)
        engine.wake(WakePart.KV_CACHE)

    @property
    def sleeper(self) -> SleepingGenerator:
        """The engine, if it can sleep; otherwise the test is skipped."""
        if not isinstance(self.engine, SleepingGenerator):
            pytest.skip("the engine does not sleep")
        return self.engine

    @cached_property
    def references(self) -> dict[int, Reference]:
        return {
            version: Reference(path, temperature=self.sampling.temperature)
            for version, path in enumerate((self.old, self.new))
        }

    def requests(self, num: int, *, first: int = 0, group: int = 2) -> list[GenerateRequest]:
        """Return groups of requests, as they come from the queue; prompts have 1 to 19 tokens."""
        made = []
        for row in range(first, first + num):
            length = 1 + 6 * (row // group % 4)
            prompt = 2 + (torch.arange(length) + row // group) % 11
            made.append(GenerateRequest(row, prompt, seed=1000 + row, ticket=row))
        return made

    def step_until_some(self) -> list[Generation]:
        deadline = time.monotonic() + DEADLINE_S
        never = threading.Event()
        while not (finished := self.engine.step(never)):
            assert time.monotonic() < deadline, "no response ended"
            assert self.engine.num_running, "responses were lost"
        return finished

    def drain(self, requests: Sequence[GenerateRequest] = ()) -> list[Generation]:
        """Answer `requests` as places become free, and finish whatever runs; returns the responses by ticket."""
        waiting, responses = deque(requests), []
        while waiting or self.engine.num_running:
            number = min(self.engine.free_slots, len(waiting))
            if number:
                self.engine.submit([waiting.popleft() for _ in range(number)])
            responses += self.step_until_some()
        return sorted(responses, key=lambda response: response.ticket)

    def assert_like_reference(self, request: GenerateRequest, response: Generation) -> None:
        """Compare every token's log-probability with the float64 reference of the weights that drew it."""
        versions = set(response.versions_R.tolist())
        for version in versions:
            drawn = response.versions_R == version
            expected = self.references[version].log_probs(request.prompt_P, response.response_R)
            # Tokens drawn after a swap on a kept cache mix keys of two versions, which no single reference has.
            if version == 0 or len(versions) == 1 or not self.adapter.keeps_cache:
                torch.testing.assert_close(
                    response.log_probs_R[drawn].double(), expected[drawn], rtol=0, atol=self.adapter.tolerance
                )


MAX_TOKENS, SLOTS = 24, 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every adapter (`lab`), or every family of those that compute (`model_lab`)."""
    adapters: list[Adapter] = metafunc.module.ADAPTERS
    if "lab" in metafunc.fixturenames:
        cases = [_case(each, (each.families or ("llama",))[0], each.name) for each in adapters]
        metafunc.parametrize("lab", cases, indirect=True)
    if "model_lab" in metafunc.fixturenames:
        cases = [_case(each, family, f"{each.name}-{family}") for each in adapters for family in each.families]
        metafunc.parametrize("model_lab", cases, indirect=True)


def _case(adapter: Adapter, family: str, name: str) -> ParameterSet:
    first = (adapter.families or (family,))[0]
    return pytest.param((adapter, family), id=name, marks=adapter.marks if family == first else ())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On models of this size threads cost more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Adapter, str], tuple[Path, Path]]:
    """Return a function that gives two models of a family with different weights."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(adapter: Adapter, family: str) -> tuple[Path, Path]:
        key = adapter.name, family
        if key not in made:
            root = tmp_path_factory.mktemp("-".join(key))
            if adapter.lora is not None:
                base = save_tiny_model(root / "base", family, seed=0, changes=adapter.model)
                first, second = (
                    save_adapted_model(root / f"weights-{seed}", base, adapter.lora, seed=seed) for seed in (0, 1)
                )
            else:
                first, second = (
                    save_tiny_model(root / f"weights-{seed}", family, seed=seed, changes=adapter.model)
                    for seed in (0, 1)
                )
            made[key] = first, second
        return made[key]

    return make


@pytest.fixture(scope="session")
def open_lab(model_dirs: Callable[[Adapter, str], tuple[Path, Path]]) -> Iterator[Callable[..., Lab]]:
    """Return a function that opens an engine or reuses an equal one; all are closed at the end."""
    with ExitStack() as stack:
        opened: dict[object, Lab] = {}

        def open_one(adapter: Adapter, family: str) -> Lab:
            key = adapter.name, family
            if key not in opened:
                old, new = model_dirs(adapter, family)
                drawn = {"max_response_tokens": MAX_TOKENS, "batch_size": SLOTS, "temperature": 0.8, "top_k": 11}
                sampling = SamplingConfig.model_validate({**drawn, **adapter.sampling})
                base = old if adapter.lora is None else base_of(old)
                engine = stack.enter_context(adapter.open(base, sampling))
                opened[key] = Lab(adapter, engine, sampling, old, new)
            return opened[key]

        yield open_one


@pytest.fixture
def lab(request: pytest.FixtureRequest, open_lab: Callable[..., Lab]) -> Lab:
    return open_lab(*request.param).reset()


@pytest.fixture
def model_lab(request: pytest.FixtureRequest, open_lab: Callable[..., Lab]) -> Lab:
    """Like `lab`, with a model that computes."""
    return open_lab(*request.param).reset()


def test_log_probs_are_those_of_the_tempered_distribution_before_filters(model_lab: Lab) -> None:
    requests = model_lab.requests(40)
    responses = model_lab.drain(requests)
    assert [response.index for response in responses] == list(range(40))
    for request, response in zip(requests, responses, strict=True):
        assert response.log_probs_R.dtype == torch.float32
        model_lab.assert_like_reference(request, response)


def test_responses_end_at_eos_or_are_flagged(model_lab: Lab) -> None:
    responses = model_lab.drain(model_lab.requests(60))
    assert {response.truncated for response in responses} == {True, False}
    for response in responses:
        assert EOS not in response.response_R[:-1]
        assert (response.response_R[-1] == EOS) != response.truncated
        assert not response.truncated or len(response.response_R) == model_lab.sampling.max_response_tokens


def test_responses_are_never_longer_than_allowed(lab: Lab) -> None:
    for response in lab.drain(lab.requests(40)):
        assert 0 < len(response.response_R) <= lab.sampling.max_response_tokens


def test_responses_are_plain_tensors_of_host_memory(lab: Lab) -> None:
    for response in lab.drain(lab.requests(3)):
        for tensor, dtype in (
            (response.response_R, torch.int64),
            (response.log_probs_R, torch.float32),
            (response.versions_R, torch.int32),
        ):
            assert tensor.dtype == dtype and tensor.shape == response.response_R.shape
            assert tensor.device.type == "cpu" and not tensor.is_inference()


def test_response_does_not_depend_on_what_else_runs(model_lab: Lab) -> None:
    if not model_lab.adapter.draws_ignore_batch:
        pytest.skip("the engine says that its draws depend on the batch")
    requests = model_lab.requests(20)
    together = model_lab.drain(requests)
    alone = [model_lab.drain([request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.response_R.equal(other.response_R)
        torch.testing.assert_close(one.log_probs_R, other.log_probs_R, rtol=0, atol=2 * model_lab.adapter.tolerance)


def test_other_seeds_draw_other_responses(model_lab: Lab) -> None:
    prompt = torch.tensor([5, 6, 7])
    requests = [GenerateRequest(row, prompt, seed=row, ticket=row) for row in range(16)]
    responses = {tuple(response.response_R.tolist()) for response in model_lab.drain(requests)}
    assert len(responses) > 4


def test_new_weights_take_the_place_of_the_old_ones_entirely(model_lab: Lab) -> None:
    if not model_lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    requests = model_lab.requests(12)
    before = model_lab.drain(requests)
    model_lab.swap(model_lab.new, version=1)
    after = model_lab.drain(requests)  # the same prompts, so stale cached state would show
    assert any(not one.response_R.equal(other.response_R) for one, other in zip(before, after, strict=True))
    for request, response in zip(requests, after, strict=True):
        assert response.versions_R.tolist() == [1] * len(response.response_R)
        model_lab.assert_like_reference(request, response)


def test_prompt_log_probs_are_those_of_the_weights_that_it_computes_with(model_lab: Lab) -> None:
    """`ScoringEngine`, which is optional: weights that come later, and responses that run, change nothing."""
    engine, prompt = model_lab.engine, 2 + torch.arange(20) * 7 % 11
    if not isinstance(engine, ScoringEngine) or not model_lab.adapter.loads_weights:
        pytest.skip("the engine does not score prompts")
    if engine.prompt_log_probs(prompt) is None:
        pytest.skip("the engine does not score prompts with these settings")
    requests = model_lab.requests(6)
    alone = model_lab.drain(requests)
    for version, path in enumerate((model_lab.old, model_lab.new, model_lab.old)):
        model_lab.swap(path, version=version)
        engine.submit(requests)
        found_CA = engine.prompt_log_probs(prompt)
        expected = model_lab.references[version % 2].log_probs(prompt[:1], prompt[1:])
        assert found_CA is not None and found_CA.dtype == torch.float32 and not found_CA.is_inference()
        for found in found_CA:
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=model_lab.adapter.tolerance)
        responses = model_lab.drain()
    for request, response in zip(requests, responses, strict=True):
        expected = model_lab.references[0].log_probs(request.prompt_P, response.response_R)
        found = response.log_probs_R.double()
        torch.testing.assert_close(found, expected, rtol=0, atol=model_lab.adapter.tolerance)
    if model_lab.adapter.draws_ignore_batch:
        assert [one.response_R.tolist() for one in responses] == [one.response_R.tolist() for one in alone]


def test_checksums_are_those_of_the_weights_that_it_computes_with(lab: Lab) -> None:
    """`ChecksummedEngine`, which is optional; an engine may leave out tensors that it cannot read back."""
    if not isinstance(lab.engine, ChecksummedEngine) or not lab.adapter.loads_weights:
        pytest.skip("the engine does not read its weights back")
    for path in (lab.old, lab.new):
        lab.swap(path, version=0)
        weights, held = lab.adapter.weights(path), lab.engine.weight_checksums()
        # An adapter may be held in a layout of the engine's own alone, beside the base, which no version brings.
        held = {name: one for name, one in held.items() if name in weights or lab.adapter.lora is None}
        assert held or lab.adapter.lora is not None
        assert held.keys() <= weights.keys()
        for name, one in held.items():
            expected = tensor_checksum(weights[name].to(getattr(torch, one.dtype)))
            assert (int(expected) - one.checksum) % 2**64 == 0, name


def test_needs_name_the_weights(lab: Lab) -> None:
    if not lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    needs, weights = lab.engine.weight_needs(), lab.adapter.weights(lab.old)
    assert {name: need.shape for name, need in needs.items()} == {
        name: tuple(weight.shape) for name, weight in weights.items()
    }


def test_adapter_of_zero_is_the_base(model_lab: Lab) -> None:
    if model_lab.adapter.lora is None:
        pytest.skip("its weights are whole")
    nothing = {name: torch.zeros_like(weight) for name, weight in model_lab.adapter.weights(model_lab.old).items()}
    requests = model_lab.requests(6)
    adapted = model_lab.drain(requests)
    model_lab.engine.load_weights(nothing)
    model_lab.engine.version = 1
    base = Reference(base_of(model_lab.old), temperature=model_lab.sampling.temperature)
    responses = model_lab.drain(requests)
    assert any(not one.response_R.equal(other.response_R) for one, other in zip(adapted, responses, strict=True))
    for request, response in zip(requests, responses, strict=True):
        expected = base.log_probs(request.prompt_P, response.response_R)
        torch.testing.assert_close(response.log_probs_R.double(), expected, rtol=0, atol=model_lab.adapter.tolerance)


def test_tokens_carry_the_version_of_the_weights(lab: Lab) -> None:
    if not lab.adapter.loads_weights:
        pytest.skip("the engine's weights are not ours to load")
    for version in (7, 8):
        lab.swap(lab.old, version=version)
        for response in lab.drain(lab.requests(3)):
            assert response.versions_R.tolist() == [version] * len(response.response_R)


def test_responses_go_on_with_weights_that_came_meanwhile(lab: Lab) -> None:
    if not (lab.engine.interruptible and lab.adapter.loads_weights):
        pytest.skip("the engine says that it cannot be interrupted")
    requests = lab.requests(16)
    lab.engine.submit(requests)
    responses = lab.step_until_some()
    lab.swap(lab.new, version=1)
    responses += lab.drain()
    assert len(responses) == 16
    seen = [tuple(dict.fromkeys(response.versions_R.tolist())) for response in responses]
    assert set(seen) <= {(0,), (0, 1), (1,)} and (0, 1) in seen, "versions ascend within a response"
    if lab.adapter.families:
        for response in responses:
            lab.assert_like_reference(requests[response.ticket], response)


def test_places_are_filled_while_others_run(lab: Lab) -> None:
    slots = lab.sampling.batch_size
    assert (lab.engine.num_running, lab.engine.free_slots) == (0, slots)
    lab.engine.submit(lab.requests(slots))
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots, 0)
    responses = lab.step_until_some()
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots - len(responses), len(responses))
    assert lab.engine.num_running, "all responses are of one length"
    lab.engine.submit(lab.requests(len(responses), first=slots))
    assert (lab.engine.num_running, lab.engine.free_slots) == (slots, 0)
    responses += lab.drain()
    assert sorted(response.ticket for response in responses) == list(range(len(responses))) and len(responses) > slots


def test_responses_that_came_late_are_as_good_as_the_first(model_lab: Lab) -> None:
    slots = model_lab.sampling.batch_size
    requests = model_lab.requests(3 * slots)
    responses = model_lab.drain(requests)
    for request, response in zip(requests, responses, strict=True):
        model_lab.assert_like_reference(request, response)


def test_requests_of_one_row_are_told_apart_by_their_tickets(lab: Lab) -> None:
    prompt = torch.tensor([3, 4])
    lab.engine.submit([GenerateRequest(5, prompt, seed=1, ticket=10), GenerateRequest(5, prompt, seed=1, ticket=11)])
    responses = lab.drain()
    assert [(response.index, response.ticket) for response in responses] == [(5, 10), (5, 11)]


def test_each_request_has_its_own_limit(lab: Lab) -> None:
    requests = lab.requests(24)
    whole = lab.drain(requests)
    limits = [(1, 3, 9, 1000)[row % 4] for row in range(24)]
    responses = lab.drain([replace(request, max_tokens=limit) for request, limit in zip(requests, limits, strict=True)])
    assert {response.truncated for response in responses} == {True, False}
    for one, response, limit in zip(whole, responses, limits, strict=True):
        assert len(response.response_R) <= min(limit, lab.sampling.max_response_tokens)
        if lab.adapter.draws_ignore_batch:
            assert response.response_R.equal(one.response_R[:limit])
            assert response.truncated == (one.truncated or len(one.response_R) > limit)


def test_it_draws_as_the_last_settings_say(model_lab: Lab) -> None:
    lab, engine = model_lab, model_lab.engine
    if not isinstance(engine, ResamplingEngine):
        pytest.skip("it draws in one way")
    requests = [replace(one, max_tokens=4) for one in lab.requests(4)]
    before = lab.drain(requests)
    engine.use_sampling(lab.sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0}))
    greedy = lab.drain(requests)
    for request, response in zip(requests, greedy, strict=True):
        likeliest = lab.references[0].likeliest(request.prompt_P, response.response_R)
        assert response.response_R.tolist() == likeliest.tolist()
    engine.use_sampling(lab.sampling)
    again = [one.response_R.tolist() for one in lab.drain(requests)]
    if lab.adapter.draws_ignore_batch:
        assert again == [one.response_R.tolist() for one in before]
    else:  # its seeds are its own
        assert again != [one.response_R.tolist() for one in greedy]


def test_stop_tokens_end_a_response_and_are_part_of_it(lab: Lab) -> None:
    requests, stops = lab.requests(40), (5, 7)
    whole = lab.drain(requests)
    # the last ones have none, and share the batch
    responses = lab.drain([replace(request, stop_ids=stops) for request in requests[:30]] + requests[30:])
    last = [int(response.response_R[-1]) for response in responses]
    assert set(stops) & set(last[:30])
    for one, response, token in zip(whole[:30], responses, last, strict=False):
        assert not set(stops) & set(response.response_R[:-1].tolist())
        assert response.truncated == (token not in {*stops, EOS})
        if lab.adapter.families and lab.adapter.draws_ignore_batch:
            assert response.response_R.equal(one.response_R[: len(response.response_R)])
    if lab.adapter.draws_ignore_batch:
        assert all(
            one.response_R.equal(other.response_R) for one, other in zip(whole[30:], responses[30:], strict=True)
        )


@pytest.mark.parametrize("early", [True, False], ids=["before the first step", "while they run"])
def test_cancel_frees_places_and_leaves_the_others_as_they_were(lab: Lab, early: bool) -> None:
    slots = lab.sampling.batch_size
    requests, late = lab.requests(slots), lab.requests(3, first=slots)
    alone = lab.drain([*requests, *late])
    lab.engine.submit(requests)
    responses = [] if early else lab.step_until_some()
    running = sorted({request.ticket for request in requests} - {response.ticket for response in responses})
    cancelled, left = running[:3], running[3:]
    assert left, "all responses are of one length"
    for ticket in [*cancelled, *cancelled, 12345]:  # cancelling what does not run changes nothing
        lab.engine.cancel(ticket)
    assert (lab.engine.num_running, lab.engine.free_slots) == (len(left), slots - len(left))
    lab.engine.submit(late)
    responses += lab.drain()
    assert sorted(response.ticket for response in responses) == sorted(
        {request.ticket for request in [*requests, *late]} - set(cancelled)
    )
    if lab.adapter.draws_ignore_batch:
        assert all(response.response_R.equal(alone[response.ticket].response_R) for response in responses)


def test_cancel_of_all_that_runs_leaves_an_idle_engine(lab: Lab) -> None:
    lab.engine.submit(lab.requests(2))
    lab.engine.step(_set())
    for ticket in (0, 1):
        lab.engine.cancel(ticket)
    assert (lab.engine.num_running, lab.engine.step(threading.Event())) == (0, [])
    if lab.adapter.loads_weights:
        lab.swap(lab.old, version=0)  # which some engines do only while nothing runs
    assert [response.ticket for response in lab.drain(lab.requests(2))] == [0, 1]


def test_abort_forgets_what_runs(lab: Lab) -> None:
    lab.engine.submit(lab.requests(16))
    lab.step_until_some()
    lab.engine.abort()
    assert (lab.engine.num_running, lab.engine.free_slots) == (0, lab.sampling.batch_size)
    assert lab.engine.step(_set()) == []
    assert [response.ticket for response in lab.drain(lab.requests(4, first=40))] == [40, 41, 42, 43]


def test_what_runs_goes_on_after_a_sleep(lab: Lab) -> None:
    requests = lab.requests(16)
    lab.engine.submit(requests)
    responses = lab.step_until_some()
    num_running = lab.engine.num_running
    for _ in range(2):  # asleep already: nothing happens
        lab.sleeper.sleep()
    assert lab.engine.num_running == num_running
    lab.wake(lab.new, version=1)
    responses += lab.drain()
    assert sorted(response.ticket for response in responses) == list(range(16)), "none is lost, none comes twice"
    seen = [tuple(dict.fromkeys(response.versions_R.tolist())) for response in responses]
    assert set(seen) <= {(0,), (0, 1), (1,)} and (0, 1) in seen, "tokens drawn before keep their version"
    if lab.adapter.families:
        for response in responses:
            # keys and values are computed again, even where a swap keeps them
            for version in set(response.versions_R.tolist()):
                drawn = response.versions_R == version
                request = requests[response.ticket]
                expected = lab.references[version].log_probs(request.prompt_P, response.response_R)
                torch.testing.assert_close(
                    response.log_probs_R[drawn].double(), expected[drawn], rtol=0, atol=lab.adapter.tolerance
                )


def test_a_sleep_changes_no_response(model_lab: Lab) -> None:
    requests = model_lab.requests(12)
    whole = model_lab.drain(requests)
    model_lab.sleeper.sleep()
    model_lab.wake(model_lab.old, version=0)
    if not model_lab.adapter.draws_ignore_batch:
        pytest.skip("the engine says that its draws depend on the batch")
    for one, other in zip(whole, model_lab.drain(requests), strict=True):
        assert one.response_R.equal(other.response_R)


def test_an_engine_that_got_no_weights_sleeps_again(lab: Lab) -> None:
    lab.engine.submit(lab.requests(4))
    lab.engine.step(_set())
    running = lab.engine.num_running
    lab.sleeper.sleep()
    lab.sleeper.wake(WakePart.WEIGHTS)
    lab.sleeper.sleep()
    lab.wake(lab.new, version=1)
    assert len(lab.drain()) == running


def test_requests_come_and_go_while_the_engine_sleeps(lab: Lab) -> None:
    slots = lab.sampling.batch_size
    lab.engine.submit(lab.requests(4))
    lab.engine.step(_set())
    running = lab.engine.num_running
    lab.sleeper.sleep()
    lab.engine.cancel(3)
    lab.engine.submit(lab.requests(2, first=slots))
    lab.wake(lab.old, version=0)
    tickets = [response.ticket for response in lab.drain()]
    assert tickets[-2:] == [slots, slots + 1] and 3 not in tickets and len(tickets) == running + 1
    lab.sleeper.sleep()
    lab.engine.submit(lab.requests(2))
    lab.engine.abort()
    assert lab.engine.num_running == 0
    lab.wake(lab.old, version=0)
    assert [response.ticket for response in lab.drain(lab.requests(2))] == [0, 1]


def test_idle_step_returns_at_once(lab: Lab) -> None:
    assert lab.engine.step(threading.Event()) == []


def test_more_requests_than_places_are_answered_one_after_another(lab: Lab) -> None:
    requests = lab.requests(3 * lab.sampling.batch_size + 1)
    responses = list(generate(lab.engine, requests))
    assert sorted(response.ticket for response in responses) == [request.ticket for request in requests]


def test_long_and_short_prompts_run_together(model_lab: Lab) -> None:
    """As when later turns of one conversation run beside first turns of others."""
    lengths = (1, 60, 2, 44, 40, 61, 20, 3)
    requests = [
        GenerateRequest(row, 2 + torch.arange(length) % 11, seed=row, ticket=row, max_tokens=MAX_POSITIONS - length)
        for row, length in enumerate(lengths)
    ]
    for request, response in zip(requests, model_lab.drain(requests), strict=True):
        model_lab.assert_like_reference(request, response)


def test_prompt_and_limit_fit_the_positions(model_lab: Lab) -> None:
    longest = GenerateRequest(77, torch.full((MAX_POSITIONS - 3,), 3), seed=0, max_tokens=3)
    (response,) = model_lab.drain([longest])
    assert 0 < len(response.response_R) <= 3
    for limit, reason in ((4, f"row 77 has {MAX_POSITIONS - 3} tokens .* up to 4; .* {MAX_POSITIONS} "), (0, "is 0")):
        with pytest.raises(BadRequest, match=reason):
            model_lab.engine.submit([replace(longest, max_tokens=limit)])
    assert model_lab.engine.num_running == 0


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
    assert [response.ticket for response in model_lab.drain(good)] == [0, 1]


def _set() -> threading.Event:
    """Return a wake event that lets no step wait."""
    event = threading.Event()
    event.set()
    return event
