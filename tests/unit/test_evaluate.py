"""The evaluation loop with weights that the test publishes, and the engine that sleeps."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.json_lines import JsonLines
from asyncflow.timeline import NoTimeline
from launcher.checks.preflight import check_held_out
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.config.rules import AT_START, OF_EVALUATIONS, check_rules
from weightsync.version import Version
from workers.data.tokenizer import load_tokenizer
from workers.rewards.scorer import ScoredResponse
from workers.rollout.evaluate import Evaluator, held_out_sets_of, line_of_sets
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.settings.run import RunConfig

DEADLINE_S = 20


class Weights:
    """A receiver: the test says what is published, and only the newest that is wanted stays at hand."""

    adopts = True

    def __init__(self, wanted: Callable[[Version], bool], arrived: Callable[[], None]) -> None:
        self._wanted, self._arrived = wanted, arrived
        self.newest: Version | None = None
        self.num_dropped = 0

    def publish(self, *steps: int) -> None:
        for version in (Version(0, step) for step in steps):
            if self._wanted(version):
                self.newest = version
                self._arrived()

    def load(self, apply: Callable[[Any], None], *, newer_than: Version | None) -> Version | None:
        assert newer_than is None or (self.newest is not None and self.newest > newer_than)
        apply({})
        return self.newest

    def drop(self) -> None:
        self.num_dropped += 1

    def close(self) -> None: ...


class Stopping(threading.Event):
    """Wakes others, as a worker's context does."""

    def __init__(self) -> None:
        super().__init__()
        self.woken: list[threading.Event] = []

    def set(self) -> None:
        super().set()
        for event in self.woken:
            event.set()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Evaluator, Weights, Any]]]:
    made: list[Evaluator] = []

    def make(*own: int, seconds: float = 0.001) -> tuple[Evaluator, Weights, Any]:
        overrides = [
            *("evaluate.engine=sim", "rollout.batch_size=8", "rollout.samples_per_step=3", "sim.mean_tokens=4"),
            *(f"sim.decode_s_per_token={seconds}", "rollout.max_response_tokens=64", "evaluate.max_prompts=12"),
        ]
        (tmp_path / "samples").mkdir()
        stopping = Stopping()
        config = load_config(find_recipe("quickstart"), overrides=overrides)
        context = SimpleNamespace(
            config=config, load_tokenizer=lambda: load_tokenizer(Path(config.model.path)),
            device=torch.device("cpu"), run_dir=tmp_path, gang=SimpleNamespace(name="evaluate-0"),
            elapsed_s=0.0, job=SimpleNamespace(lineage=0), last_step=60, timeline=NoTimeline(), stopping=stopping,
            report_state=lambda *_, **__: None, reward_failed=lambda why: None
        )  # fmt: skip
        receivers = []

        def open_receiver(*_: object, wanted: Any, arrived: Any, best_effort: bool, **__: object) -> Weights:
            assert best_effort, "the trainer would wait for it"
            receivers.append(Weights(wanted, arrived))
            return receivers[0]

        monkeypatch.setattr("workers.rollout.evaluate.open_receiver", open_receiver)
        wake = threading.Event()
        stopping.woken.append(wake)
        made.append(Evaluator(context, list(own), wake))  # type: ignore[arg-type]
        return made[0], receivers[0], context

    yield make
    for evaluator in made:
        evaluator.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_own_version_is_evaluated_with_its_weights(make: Any, tmp_path: Path) -> None:
    evaluator, weights, _ = make(0, 4)
    weights.publish(0, 1)
    evaluator.evaluate(evaluator.load_next())
    weights.publish(2, 3, 4, 5)
    evaluator.evaluate(evaluator.load_next())
    assert evaluator.load_next() is None
    done = lines(tmp_path / "evaluation.jsonl")
    assert [(line["step"], line["num_prompts"], line["num_samples"]) for line in done] == [(0, 12, 12), (4, 12, 12)]
    assert weights.num_dropped == 2, "memory of what is loaded is given back"
    samples = lines(tmp_path / "samples" / "evaluate-0.jsonl")
    assert [(line["step"], line["version"], line["index"]) for line in samples] == [
        (step, step, index) for step in (0, 4) for index in range(3)
    ]


def test_delivery_is_proven_at_the_temperature_of_the_run_whichever_set_was_answered_last(make: Any) -> None:
    evaluator, weights, _ = make(0, 1)
    only = evaluator._sets[0]
    cooler = replace(only, name="cooler", sampling=only.sampling.model_copy(update={"temperature": 0.5}))
    evaluator._sets = (only, cooler)
    used: list[float] = []
    evaluator._engine.use_sampling = lambda sampling: used.append(sampling.temperature)
    proven: list[float] = []
    evaluator._delivery = SimpleNamespace(check_loaded=lambda _: proven.append(used[-1]))
    for step in (0, 1):
        weights.publish(step)
        evaluator.evaluate(evaluator.load_next())
    assert used[-1] == 0.5 and proven == [evaluator._sampling.temperature] * 2 != [0.5] * 2


def answered(*kinds: str) -> list[tuple[FinishedRollout, Future[ScoredResponse]]]:
    """Return rollouts, each with its score, that are `right`, `unscored`, `failed`, `absent` or `skipped`."""
    scored = []
    for index, kind in enumerate(kinds):
        request = RolloutRequest(index, index, 0, torch.tensor([1]))
        made = kind in ("right", "unscored")
        one = FinishedRollout.without_tokens(request, why="" if made else f"it {kind}")
        one = replace(one, leaves=kind in ("failed", "skipped"), failures=3 if kind == "failed" else 0)
        failure = "" if kind == "right" else "no score" if kind == "unscored" else one.failure
        score: Future[ScoredResponse] = Future()
        score.set_result(ScoredResponse("", "", "", 1.0, correct=True, failure=failure))
        scored.append((one, score))
    return scored


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["right"] * 2 + ["skipped"] * 198, ""),
        (["right"] * 90 + ["failed"] * 60 + ["skipped"] * 500, ""),
        (
            ["right"] * 90 + ["failed", "absent"] * 60,
            r"120 of the last 210 rollouts failed \(rollout.max_failed_share 0.5",
        ),
        (
            ["right"] * 50 + ["unscored"] * 100 + ["failed"] * 100,
            r"100 of the last 150 responses .* \(reward.max_failed",
        ),
        (["unscored"] * 3 + ["skipped"], "none of its responses could be scored; no score"),
        (["failed"] * 3 + ["skipped"], "no rollout could be made; it failed"),
        (["skipped"] * 3, "skipped all of its prompts"),
    ],
)
def test_rollouts_that_failed_rewards_that_failed_and_what_was_skipped_are_judged_apart(
    make: Any, kinds: list[str], words: str
) -> None:
    evaluator, _, context = make(0)
    context.config = context.config.model_copy(
        update={"reward": context.config.reward.model_copy(update={"max_failed_share": 0.5})}
    )
    with pytest.raises(UserCodeFailed, match=f"^evaluation of step 4: .*{words}") if words else nullcontext():
        evaluator._check_failures(Version(0, 4), evaluator._sets[0], answered(*kinds))


def test_version_that_was_replaced_meanwhile_is_skipped_and_told(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, weights, _ = make(0, 4, 8, 10)
    weights.publish(0)
    assert evaluator.load_next() == Version(0, 0)
    weights.publish(*range(1, 10))
    assert evaluator.load_next() == Version(0, 8)
    assert "weights of steps [4] were replaced" in caplog.text


def test_instance_whose_last_version_was_missed_leaves(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, weights, _ = make(4, 12)
    weights.publish(4, 13)
    assert evaluator.load_next() == Version(0, 4)
    assert evaluator.load_next() is None
    assert "weights of steps [12] were replaced" in caplog.text


@pytest.mark.parametrize("last_step", [4, 6])
def test_instance_leaves_where_a_feed_ended_before_its_last_version(make: Any, last_step: int) -> None:
    evaluator, weights, context = make(4, 12)
    weights.publish(*range(4, last_step + 1))
    assert evaluator.load_next() == Version(0, 4)
    context.last_step = last_step
    assert evaluator.load_next() is None


def test_version_that_came_before_later_ones_is_not_missed(make: Any) -> None:
    evaluator, weights, _ = make(4, 12)
    weights.publish(4, 5, 12, 13, 14)
    assert evaluator.load_next() == Version(0, 12)
    assert evaluator.load_next() is None


def test_stop_ends_the_wait_for_weights(make: Any) -> None:
    evaluator, _, context = make(0)
    stop = threading.Timer(0.05, context.stopping.set)
    stop.start()
    assert evaluator.load_next() is None
    stop.join(DEADLINE_S)


def test_stop_ends_an_evaluation_and_leaves_no_line(make: Any, tmp_path: Path) -> None:
    evaluator, weights, context = make(0, seconds=1000.0)
    weights.publish(0)
    evaluator.load_next()
    stop = threading.Timer(0.05, context.stopping.set)
    stop.start()
    evaluator.evaluate(Version(0, 0))
    stop.join(DEADLINE_S)
    assert (tmp_path / "evaluation.jsonl").read_text() == ""


def test_an_instance_without_a_share_of_the_prompts_answers_none(make: Any, tmp_path: Path) -> None:
    evaluator, _, context = make(0)
    tokenizer = load_tokenizer(Path(context.config.model.path))
    evaluator._sets = held_out_sets_of(context.config, tokenizer, share=(12, 13))
    answers = JsonLines(tmp_path / "answers.jsonl")
    evaluator.write_answers(answers)
    answers.close()
    assert (tmp_path / "answers.jsonl").read_text() == ""


SETS = (
    "evaluate.sets={held: {path: quickstart/held_out.jsonl, max_prompts: 3}, seen: {path: quickstart/train.jsonl, "
    "max_prompts: 2, n_samples_per_prompt: 4, temperature: 0.7, max_response_tokens: 3, prompt_template: '1+{prompt}'}}"
)


def with_sets(*overrides: str) -> RunConfig:
    return load_config(find_recipe("quickstart"), overrides=("evaluate.path=null", SETS, *overrides))


def test_each_set_has_its_own_prompts_templates_and_sampling() -> None:
    config = with_sets()
    held, seen = held_out_sets_of(config, load_tokenizer(Path(config.model.path)))
    assert [(one.name, one.num_prompts, len(one.requests)) for one in (held, seen)] == [("held", 3, 3), ("seen", 2, 8)]
    assert (held.sampling.draws_by, seen.sampling.draws_by) == ((0.0, 1.0, 0), (0.7, 1.0, 0))
    assert {one.max_tokens for one in held.requests} == {4}, "as in the rollout"
    assert {one.max_tokens for one in seen.requests} == {3}
    assert [prompt.text for prompt in seen.prompts] == ["1+0+1=", "1+0+2="]
    assert held.prompts[0].text == "0+0="
    seeds = [one.seed for part in (held, seen) for one in part.requests]
    assert len({*seeds}) == len(seeds)
    assert [(one.group, one.member) for one in seen.requests[3:5]] == [(3, 3), (4, 0)]
    assert [seen.prompt_of(one.index) for one in seen.requests] == [0] * 4 + [1] * 4
    engine = config.evaluate.sampling(config.rollout)
    assert (engine.draws_by, engine.max_response_tokens) == ((1.0, 1.0, 0), 4), "each set says how it draws"


def test_one_set_that_has_no_name_is_evaluated_as_ever() -> None:
    config = load_config(find_recipe("quickstart"))
    (only,) = held_out_sets_of(config, load_tokenizer(Path(config.model.path)))
    assert (only.name, only.num_prompts, only.first_group) == ("", 20, 0)
    line = {"step": 1, "lineage": 0, "time_s": 2.0, "accuracy": 0.5, "seconds": 0.1}
    assert line_of_sets({"": line}, seconds=0.25) == {**line, "seconds": 0.25}


def test_line_of_several_sets_has_the_first_ones_figures_and_each_under_its_name() -> None:
    lines = {
        name: {"step": 1, "lineage": 0, "time_s": 2.0, "accuracy": accuracy, "seconds": 0.1}
        for name, accuracy in (("held", 0.5), ("seen", 0.75))
    }
    assert line_of_sets(lines, seconds=0.3) == {
        "step": 1,
        "lineage": 0,
        "time_s": 2.0,
        "accuracy": 0.5,
        "seconds": 0.3,
        "held/accuracy": 0.5,
        "held/seconds": 0.1,
        "seen/accuracy": 0.75,
        "seen/seconds": 0.1,
    }


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("evaluate.path=quickstart/held_out.jsonl", "give either path or source, or sets"),
        ("evaluate.sets.held.path=null", "held has no prompts; give it path or source"),
        (
            "evaluate.sets.seen.temperature=0",
            "seen.n_samples_per_prompt: 4 .*; greedy responses to one prompt are all the",
        ),
        ("evaluate.sets.held.path=nowhere.jsonl", "evaluate.sets.held.path: 'nowhere.jsonl' does not exist"),
        ("evaluate.sets={'a b': {path: quickstart/held_out.jsonl}}", "the name 'a b' must be made of"),
        ("evaluate.sets.held.interval=3", "evaluate.sets.held.interval: unknown key"),
    ],
)
def test_a_set_that_cannot_be_used_is_named(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        with_sets(override)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("evaluate.sets.held.prompt_field=nope", "set evaluate.sets.held.prompt_field to the right one, or name anot"),
        ("evaluate.ground_truth_field=nope", "set evaluate.sets.held.ground_truth_field to the right one, or name an"),
        ("evaluate.sets.seen.chat_template=true", "^evaluate.sets.seen.chat_template: .* has none; set it to false$"),
    ],
)
def test_rows_that_a_set_cannot_read_are_refused_by_the_sets_own_settings(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_held_out(with_sets(override))


@pytest.mark.parametrize(
    ("overrides", "section"),
    [
        (("evaluate.sets.seen.system_prompt=Add.",), "evaluate.sets.seen"),
        (("evaluate.system_prompt=Add.",), "evaluate"),
        (("evaluate.system_prompt=Add.", "evaluate.sets.held.chat_template=true"), ""),
    ],
)
def test_a_system_prompt_that_no_template_gets_is_refused(overrides: tuple[str, ...], section: str) -> None:
    config = with_sets(*overrides, "roles={rollout: 1, actor: 1, evaluate: 1}")
    complaint = f"^{section}.system_prompt: there is no chat template" if section else "nothing"
    with pytest.raises(ConfigError, match=complaint) if section else nullcontext():
        check_rules(config, OF_EVALUATIONS)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("evaluate.engine=own:Engine",), "which evaluate.engine own:Engine cannot"),
        (("rollout.function=tools", "rollout.tools=[own:tool]"), "replies of rollout.function: tools have one limit"),
    ],
)
def test_sets_that_an_engine_cannot_tell_apart_are_refused_before_a_start(
    overrides: tuple[str, ...], complaint: str
) -> None:
    config = with_sets("roles={rollout: 1, actor: 1, evaluate: 1}")
    given = dict(one.partition("=")[::2] for one in overrides)
    evaluate = config.evaluate.model_copy(update={"engine": given.get("evaluate.engine", "hf")})
    rollout = config.rollout.model_copy(update={"function": given.get("rollout.function")})
    with pytest.raises(ConfigError, match=complaint):
        check_rules(config.model_copy(update={"evaluate": evaluate, "rollout": rollout}), AT_START)
