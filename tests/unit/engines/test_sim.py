"""Engines that sleep: how long responses are, when they end, and which weights their tokens are of."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from workers.engines.base import GenerateRequest, WakePart
from workers.engines.sim.decode_times import Decoding, SimLengths
from workers.engines.sim.engine import SimGenerateEngine, sim_shapes
from workers.settings.sim import SimConfig


class Clock:
    """Stands still until it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def requests(*indices: int) -> list[GenerateRequest]:
    return [GenerateRequest(index, torch.tensor([1, 2]), seed=0) for index in indices]


def lengths_of(samples: int = 64, **config: object) -> SimLengths:
    return SimLengths(SimConfig.model_validate(config), samples_per_step=samples, seed=3)


def woken() -> threading.Event:
    """Nobody waits for the real clock."""
    event = threading.Event()
    event.set()
    return event


@pytest.mark.parametrize("lengths", ["constant", "lognormal", "pareto"])
def test_lengths_have_the_mean_of_every_step_and_depend_on_seed_and_step_only(lengths: str) -> None:
    one = lengths_of(lengths=lengths, mean_tokens=1000)
    other = lengths_of(lengths=lengths, mean_tokens=1000)
    for step in (1, 2, 9):
        rows = range((step - 1) * 64, step * 64)
        drawn = [one.response_length(row) for row in rows]
        assert np.mean(drawn) == pytest.approx(1000, rel=1e-3)
        assert drawn == [other.response_length(row) for row in rows]
    assert lengths == "constant" or one.response_length(0) != one.response_length(64)


def test_lengths_may_be_recorded_ones(tmp_path: Path) -> None:
    recorded = tmp_path / "lengths.txt"
    recorded.write_text("1\n3\n")
    drawn = lengths_of(4, lengths="file", lengths_file=str(recorded), mean_tokens=10)
    assert [drawn.response_length(row) for row in range(8)] == [5, 15, 5, 15, 5, 15, 5, 15]


def test_long_responses_are_clipped() -> None:
    free = lengths_of(4096, sigma=1.0, clip=1000.0, mean_tokens=1000)
    clipped = lengths_of(4096, sigma=1.0, clip=3.0, mean_tokens=1000)
    assert max(map(clipped.response_length, range(4096))) < 4500 < max(map(free.response_length, range(4096)))


def test_responses_slow_each_other_down_by_how_many_run() -> None:
    config = SimConfig(decode_s_by_batch={1: 0.1, 3: 0.2})
    assert [config.decode_s(number) for number in (1, 2, 3, 9)] == pytest.approx([0.1, 0.15, 0.2, 0.2])
    clock = Clock()
    lengths = lengths_of(lengths="constant", mean_tokens=10)
    engine = SimGenerateEngine(config, lengths, num_slots=2, max_response_tokens=99, clock=clock)
    engine.version = 3
    engine.submit(requests(0))
    clock.now += 0.5  # half of its tokens alone, the others beside another response
    engine.submit(requests(1))
    engine.version = 7
    clock.now += 0.74
    assert engine.step(woken()) == []
    clock.now += 0.02
    (first,) = engine.step(woken())
    assert (first.index, first.versions_R.tolist()) == (0, [3] * 5 + [7] * 5)
    clock.now += 0.5  # the other one, alone again
    assert [response.index for response in engine.step(woken())] == [1]


def test_responses_end_when_their_tokens_are_drawn() -> None:
    clock = Clock()
    config = SimConfig(lengths="constant", mean_tokens=10, decode_s_per_token=0.1, prefill_s_per_token=0.5)
    engine = SimGenerateEngine(
        config, lengths_of(lengths="constant", mean_tokens=10), num_slots=2, max_response_tokens=99, clock=clock
    )
    engine.submit(requests(0))
    clock.now += 1.5
    engine.submit(requests(1))
    assert (engine.num_running, engine.free_slots) == (2, 0)
    clock.now += 1.4  # 2 prompt tokens of 0.5 s, as many of the other one's beside it, 10 tokens of 0.1 s
    assert engine.step(woken()) == []
    clock.now += 0.1
    (response,) = engine.step(woken())
    assert (response.index, len(response.response_R), response.truncated) == (0, 10, False)
    assert (engine.num_running, engine.free_slots) == (1, 1)
    engine.abort()
    assert (engine.num_running, engine.free_slots) == (0, 2)


def test_what_ended_is_there_at_once_though_prompts_enter_before_it_is_asked_for() -> None:
    decoding = Decoding(lambda responses: 0.1)
    decoding.begin(0, 1.0, 0.0)
    decoding.stall_responses(10.0, 1.5)
    assert decoding.next_end == 1.0
    assert decoding.take_ended(1.5) == [0]


def test_nothing_is_drawn_while_the_engine_sleeps_and_prompts_are_computed_again() -> None:
    clock = Clock()
    config = SimConfig(lengths="constant", mean_tokens=10, decode_s_per_token=0.1, prefill_s_per_token=0.01)
    lengths = lengths_of(lengths="constant", mean_tokens=10)
    engine = SimGenerateEngine(config, lengths, num_slots=4, max_response_tokens=99, clock=clock)
    engine.version = 4
    engine.submit(requests(0))
    clock.now += 0.02 + 0.4  # its prompt and four tokens
    engine.sleep()
    clock.now += 50.0
    engine.wake(WakePart.WEIGHTS)
    engine.load_weights({})
    engine.version = 5
    clock.now += 50.0
    engine.wake(WakePart.KV_CACHE)
    clock.now += 0.06 + 0.59  # prompt and four tokens again, then six
    assert engine.step(woken()) == []
    clock.now += 0.02
    (response,) = engine.step(woken())
    assert response.versions_R.tolist() == [4] * 4 + [5] * 6


def test_a_generator_is_asked_to_wake_in_order() -> None:
    engine = SimGenerateEngine(SimConfig(), lengths_of(), num_slots=4, max_response_tokens=99, clock=Clock())
    engine.sleep()
    for early in (
        lambda: engine.step(woken()),
        lambda: engine.load_weights({}),
        lambda: engine.wake(WakePart.WEIGHTS, WakePart.KV_CACHE),
        lambda: engine.step(woken()),
    ):
        with pytest.raises(AssertionError):
            early()


def test_tokens_are_of_the_weights_that_were_loaded_when_they_were_drawn() -> None:
    clock = Clock()
    config = SimConfig(lengths="constant", mean_tokens=10, decode_s_per_token=0.1)
    engine = SimGenerateEngine(
        config, lengths_of(lengths="constant", mean_tokens=10), num_slots=4, max_response_tokens=99, clock=clock
    )
    engine.version = 4
    engine.submit(requests(0))
    clock.now += 0.35
    engine.version = 5
    engine.submit(requests(1))
    clock.now += 0.33
    engine.version = 7
    clock.now += 0.7
    responses = {response.index: response.versions_R.tolist() for response in engine.step(woken())}
    assert responses == {0: [4] * 3 + [5] * 3 + [7] * 4, 1: [5] * 3 + [7] * 7}
    engine.submit(requests(2))
    clock.now += 1.0
    assert [response.versions_R.tolist() for response in engine.step(woken())] == [[7] * 10]


def test_a_waiting_step_ends_when_it_is_woken() -> None:
    config = SimConfig(lengths="constant", mean_tokens=10, decode_s_per_token=100.0)
    engine = SimGenerateEngine(
        config, lengths_of(lengths="constant", mean_tokens=10), num_slots=1, max_response_tokens=99
    )
    engine.submit(requests(0))
    wake, stepped = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (engine.step(wake), stepped.set()), daemon=True)
    thread.start()
    assert not stepped.wait(0.05)
    wake.set()
    assert stepped.wait(10)


def test_model_has_the_parameters_that_were_asked_for() -> None:
    numbers = [rows * columns for rows, columns in sim_shapes(SimConfig(parameters=1_000_000)).values()]
    assert sum(numbers) == pytest.approx(1_000_000, rel=0.01)


def test_long_responses_are_cut_and_flagged() -> None:
    clock = Clock()
    config = SimConfig(lengths="constant", mean_tokens=10, decode_s_per_token=0.1)
    lengths = lengths_of(lengths="constant", mean_tokens=10)
    engine = SimGenerateEngine(config, lengths, num_slots=1, max_response_tokens=4, clock=clock)
    engine.submit([GenerateRequest(3, torch.tensor([1]), seed=0, ticket=17)])
    clock.now += 0.41
    (response,) = engine.step(woken())
    assert (response.index, response.ticket, len(response.response_R), response.truncated) == (3, 17, 4, True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lengths": "pareto", "sigma": 1.0}, "sigma"),
        ({"lengths": "file"}, "lengths_file"),
    ],
)
def test_settings_that_give_no_lengths_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        SimConfig.model_validate(settings)


def test_forward_alone_takes_a_third_of_training_unless_it_is_given() -> None:
    assert SimConfig(train_s_per_token=0.3).policy_forward_s_per_token == pytest.approx(0.1)
    assert SimConfig(train_s_per_token=0.3, forward_s_per_token=0.0).policy_forward_s_per_token == 0.0
