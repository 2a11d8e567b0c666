"""The evaluation loop: answer held-out prompts with successive versions of the weights while training continues.

    wait for a due version -> load it -> generate -> score -> a line in evaluation.jsonl -> wait ...

It reads no queue, and nothing waits for it: its receiver is a best-effort reader of the weight agent that keeps only
due versions. Weights never change within an evaluation. A version that came and went meanwhile is skipped; the newest
due one is next. The configuration alone determines which versions are due, and for which instance:

    interval = 4, last step 10, two instances      due             0   4   8   10
                                                   instance        0   1   0   0
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.errors import UserCodeFailed
from asyncflow.json_lines import JsonLines, LineReader
from asyncflow.run_files import EVALUATION_FILE
from weightsync.receiver import WeightReceiver
from weightsync.version import Version
from workers.data.prompt_dataset import Prompt, PromptDataset
from workers.data.task_source import held_out_sets
from workers.engines.base import ResamplingEngine, SleepingGenerator, WakePart
from workers.engines.delivery import DeliveryCheck
from workers.engines.load_engine import load_generate_engine, load_generating_model
from workers.engines.weight_path import open_receiver
from workers.rank.context import LOADING, STARTING, WorkerContext
from workers.rank.device_turn import TurnHolder, open_turn, wait_for_devices
from workers.records.samples import KeptGroups, SampleLog
from workers.rewards.base import NO_FIELDS, FailedShare
from workers.rewards.scorer import ScoredResponse, Scorer, no_rewards
from workers.rollout.functions import open_rollouts
from workers.rollout.rollouts import sleeping
from workers.rows.finished import FinishedRollout, RolloutRequest
from workers.settings.dataflow import WEIGHTS
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig, key_of_set

logger = logging.getLogger(__name__)

_Z_95 = 1.959964  # standard normal quantile of 0.975
_LOOK_S = 0.5  # how often waits check whether the run stops (s)
_STREAM = 1  # separates the random numbers of evaluations from those of rollouts

_Scored = tuple[FinishedRollout, "Future[ScoredResponse]"]


def run_evaluate(context: WorkerContext) -> None:
    """Evaluate this instance's versions until the last one, or until the run stops; where nothing is trained
    (`asyncflow evaluate`), the model itself."""
    if not context.job.of_role(WEIGHTS):
        evaluate_model(context)
        return
    config = context.config.evaluate
    own = own_steps(
        interval=config.interval,
        last=context.job.last_step,
        first=context.start_step,
        instance=context.gang.index,
        num_instances=len(context.job.of_role(context.gang.role)),
        done=evaluated_steps(context.run_dir),
    )
    if not own:
        logger.info("no version is left for this instance to evaluate")
        return
    wake = threading.Event()
    context.wake_to_stop(wake)
    turn = open_turn(context, wake)
    # Before any device memory is allocated.
    if turn is not None and not wait_for_devices(context, turn, stop=context.stopping):
        return
    evaluator = Evaluator(context, own, wake, turn)
    while (version := evaluator.load_next()) is not None:
        evaluator.evaluate(version)
        evaluator.rest()
    evaluator.close()


def evaluate_model(context: WorkerContext) -> None:
    """Answer this instance's share of all sets with the weights of `model.path`; a line per response in `answers/`."""
    wake = threading.Event()
    context.wake_to_stop(wake)
    share = context.gang.index, len(context.job.of_role(context.gang.role))
    evaluator = Evaluator(context, [0], wake, share=share)
    file = context.run_dir / ANSWERS / f"{context.gang.name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)  # of an earlier start, which died
    lines = JsonLines(file)
    evaluator.write_answers(lines)
    lines.close()
    evaluator.close()


class Evaluator:
    """One evaluating instance.

    Args:
        own: steps whose weights it evaluates, in order, at least one.
        wake: set when something happens to a rollout or the turn.
        turn: for devices that it shares with the trainer, and has at the moment; it has them again for one version at a
            time. None: it has devices of its own.
        share: (k, N): it evaluates the model itself, on each N-th prompt from the k-th on; None: it follows a run.
    """

    def __init__(
        self,
        context: WorkerContext,
        own: list[int],
        wake: threading.Event,
        turn: TurnHolder | None = None,
        *,
        share: tuple[int, int] | None = None,
    ) -> None:
        config = context.config
        self._context = context
        self._own = frozenset(own)
        self._last_own = own[-1]
        tokenizer = context.load_tokenizer()
        told = partial(context.report_state, STARTING)
        self._sets = held_out_sets_of(config, tokenizer, share=share or (0, 1), progress=told)
        self._tell_too_long()
        self._sampling = sampling = config.evaluate.sampling(config.rollout)
        load = load_generate_engine if share is None else load_generating_model
        context.report_state(STARTING, LOADING)
        self._engine = load(config, sampling, device=context.device)
        self._delivery = DeliveryCheck(context, self._engine, sampling)
        self._wake = wake
        self._turn = turn
        self.rest()
        self._rollouts = open_rollouts(context, self._engine, sampling, wake=self._wake)
        self._scorer = Scorer(config.reward, tokenizer, failed=context.reward_failed)
        self._samples = SampleLog(
            context.run_dir, context.gang.name,
            kept=KeptGroups(config.rollout.samples_per_step, sum(one.num_prompts for one in self._sets)),
            now=lambda: (context.job.lineage, context.elapsed_s), tokenizer=tokenizer,
        )  # fmt: skip
        self._lines = JsonLines(context.run_dir / EVALUATION_FILE)
        self._version: Version | None = None
        self._last_passed = -1
        self._arrived = threading.Event()
        self._receiver: WeightReceiver | None = None
        if share is None:
            self._receiver = open_receiver(
                context, self._engine.weight_needs(), adopts=self._engine.adopts_weights,
                arrived=self._arrived.set, wanted=self._wants_version, best_effort=True,
            )  # fmt: skip

    def load_next(self) -> Version | None:
        """Wait for this instance's next version and load it; None: none is left, or the run stops."""
        held = -1 if self._version is None else self._version.step
        receiver = self._receiver
        assert receiver is not None, "a model that stays has one version"
        if held >= self._last_own or not self._wait_newer(receiver):
            return None
        if self._turn is not None:
            if not wait_for_devices(self._context, self._turn, stop=self._context.stopping):
                return None
            self._sleeper.wake(WakePart.WEIGHTS)
        with self._context.timeline.span("load weights"):
            load = partial(self._engine.load_weights, adopt=receiver.adopts)
            self._version = receiver.load(load, newer_than=self._version)
            receiver.drop()
        assert self._version is not None, "the wait ends with a newer version"
        if self._turn is not None:
            self._sleeper.wake(WakePart.KV_CACHE)
        self._draw_by(self._sampling)  # the last set may have left its temperature, which is not the trainer's
        self._delivery.check_loaded(self._version)
        self._engine.version = self._version.step
        self._tell_skipped(held, self._version.step)
        return self._version

    def evaluate(self, version: Version) -> None:
        """Answer all prompts with the loaded weights and write the results; write nothing if the run stops. Raises
        UserCodeFailed if nothing could be scored, or too much failed."""
        began = time.monotonic()
        lines: dict[str, dict[str, Any]] = {}
        answered: list[tuple[HeldOut, list[_Scored]]] = []
        for one in self._sets:
            own_began = time.monotonic()
            scored = self._answer(one, version)
            if scored is None:
                return
            seconds = time.monotonic() - own_began
            answers = [Answer.from_scored(one, rollout, score.result(), seconds) for rollout, score in scored]
            lines[one.name] = evaluation_line(answers, version=version, time_s=self._context.elapsed_s)
            answered.append((one, scored))
        self._lines.write([line_of_sets(lines, seconds=time.monotonic() - began)])
        for one, scored in answered:
            self._write_samples(one, sorted(scored, key=lambda each: each[0].index), version)

    def write_answers(self, lines: JsonLines) -> None:
        """Answer all sets with the weights that the engine has; a line per response, none if the run stops. Raises
        UserCodeFailed as `evaluate` does."""
        version = Version(self._context.job.lineage, 0)
        self._engine.version = version.step
        for one in self._sets:
            began = time.monotonic()
            scored = self._answer(one, version)
            if scored is None:
                return
            seconds = time.monotonic() - began
            answers = sorted(scored, key=lambda each: each[0].index)
            lines.write([_answer_line(one, rollout, score.result(), seconds) for rollout, score in answers])
            self._write_samples(one, answers, version)

    def _write_samples(self, one: "HeldOut", answers: Sequence[_Scored], version: Version) -> None:
        rollouts = [rollout for rollout, _ in answers]
        groups = [one.first_group + one.prompt_of(rollout.index) for rollout in rollouts]
        self._samples.write(rollouts, [score.result() for _, score in answers], groups, step=version.step)

    def _answer(self, one: "HeldOut", version: Version) -> list[_Scored] | None:
        """Answer a set with the loaded weights; None: the run stops. Raises UserCodeFailed as `evaluate` does."""
        self._draw_by(one.sampling)
        with self._context.timeline.span("evaluate", step=version.step, rows=len(one.requests)):
            scored = self._generate(one, version)
            if not self._wait_scores(scored):
                return None
        self._check_failures(version, one, scored)
        return scored

    def _draw_by(self, sampling: SamplingConfig) -> None:
        """Have the engine draw so, if the sets draw in different ways."""
        if len({other.sampling.draws_by for other in self._sets}) > 1:
            assert isinstance(self._engine, ResamplingEngine), "the checks before a start refuse other engines"
            self._engine.use_sampling(sampling)

    def rest(self) -> None:
        """Give devices away that other roles use, too."""
        if self._turn is not None:
            with self._context.timeline.span("sleep"):
                self._sleeper.sleep()
            self._turn.give()

    @property
    def _sleeper(self) -> SleepingGenerator:
        config = self._context.config
        return sleeping(self._engine, f"evaluate.engine: {config.evaluate.engine}", config.roles_text)

    def close(self) -> None:
        self._rollouts.close()
        self._engine.close()
        if self._receiver is not None:
            self._receiver.close()
        self._scorer.close()
        self._samples.close()
        self._lines.close()

    def _check_failures(self, version: Version, one: "HeldOut", scored: Sequence[_Scored]) -> None:
        """Raise UserCodeFailed if too much failed for a fair accuracy; skipped tasks do not count as failed."""
        if not scored:  # a set with fewer prompts than instances that share them
            return
        where = f"evaluation of step {version.step}{f' on {one.name}' if one.name else ''}"
        config = self._context.config
        not_made = [rollout.failure for rollout, _ in scored if rollout.failure and not rollout.skipped]
        made = [score.result().failure for rollout, score in scored if not rollout.failure]
        unscored = [failure for failure in made if failure]
        what = config.rollout.own_name
        if not made:
            if not_made:
                raise UserCodeFailed(f"{where}: no rollout could be made; {not_made[-1]}; correct that and resume")
            raise UserCodeFailed(
                f"{where}: {what} skipped all of its prompts; give others in evaluate.path, and resume"
            )
        if len(unscored) == len(made):
            raise no_rewards(where, unscored[-1])
        for failures, number, failed, name, most in (
            (not_made, len(made) + len(not_made), "rollouts failed", "rollout", config.rollout.max_failed_share),
            (unscored, len(made), "responses could not be scored", "reward", config.reward.max_failed_share),
        ):
            if too_many := FailedShare(most).add_step(len(failures), number):
                raise UserCodeFailed(
                    f"{where}: {too_many} {failed} ({name}.max_failed_share {most:g}), so what is left is not a fair "
                    f"sample; the last one: {failures[-1]}; correct that and resume, or raise the setting"
                )

    def _wants_version(self, version: Version) -> bool:
        """Return whether a version is this instance's; called by the receiver's thread, version by version."""
        if version.lineage < self._context.job.lineage:
            return False
        if version.step in self._own:
            return True
        self._last_passed = version.step
        self._arrived.set()
        return False

    def _wait_newer(self, receiver: WeightReceiver) -> bool:
        """Wait until a version is ready; False: the run stops, or all remaining ones were missed."""
        self._context.report_state("waiting for weights")
        with self._context.timeline.span("wait for weights"):
            while not self._context.stopping.is_set():
                # Read this first: a wanted version arrives before a later one is passed over.
                passed = self._last_passed
                if receiver.newest not in (None, self._version):
                    return True
                held = -1 if self._version is None else self._version.step
                if max(passed, held) >= min(self._last_own, self._context.last_step):  # a feed may have ended
                    self._tell_skipped(held, passed)
                    return False
                self._arrived.wait(_LOOK_S)
                self._arrived.clear()
        return False

    def _tell_too_long(self) -> None:
        skipped = [
            f"{one.num_skipped} of {one.num_skipped + one.num_prompts}{f' of {one.name}' if one.name else ''}"
            for one in self._sets
            if one.num_skipped
        ]
        if skipped and self._context.gang.index == 0:
            most = self._context.config.data.max_prompt_tokens
            self._context.warn_user(
                f"held-out prompts: {', '.join(skipped)} are longer than data.max_prompt_tokens {most}, and no "
                f"evaluation asks them; raise it"
            )

    def _tell_skipped(self, after: int, before: int) -> None:
        skipped = sorted(step for step in self._own if after < step < before)
        if skipped:
            logger.warning("weights of steps %s were replaced before they could be evaluated", skipped)

    def _generate(self, one: "HeldOut", version: Version) -> list[_Scored]:
        """Return responses to a set's requests (fewer if the run stops), each with its pending score."""
        stopping, waiting = self._context.stopping, deque(one.requests)
        scored: list[_Scored] = []
        while (waiting or self._rollouts.num_running) and not stopping.is_set():
            # Before looking at anything, so that no event is missed.
            self._wake.clear()
            number = min(self._rollouts.free_slots, len(waiting))
            if number:
                self._rollouts.begin([waiting.popleft() for _ in range(number)])
            for rollout in self._rollouts.step(self._wake):
                prompt = one.prompts[one.prompt_of(rollout.index)]
                scored.append((rollout, self._scorer.score(rollout, prompt.ground_truth, prompt.task or NO_FIELDS)))
            done = f"{len(scored)}/{len(one.requests)} responses{f' to {one.name}' if one.name else ''}"
            self._context.report_state("evaluating", done, step=version.step, version=version.step)
        self._rollouts.abort()
        return scored

    def _wait_scores(self, scored: list[_Scored]) -> bool:
        """Wait for the scores; False: the run stops."""
        left = {score for _, score in scored}
        while left and not self._context.stopping.is_set():
            left = wait(left, timeout=_LOOK_S).not_done
        return not self._context.stopping.is_set()


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts: its prompts in order, and a request for every response; "": the section's own set."""

    name: str
    sampling: SamplingConfig
    prompts: Sequence[Prompt]
    requests: Sequence[RolloutRequest]
    first_group: int  # prompts of the sets before it
    size: int  # responses per prompt
    num_skipped: int = 0  # prompts that are too long, and not among these

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def prompt_of(self, index: int) -> int:
        """Return the place in `prompts` of what a request asked; `index` counts the requests of this set."""
        return index // self.size


def held_out_sets_of(
    config: RunConfig,
    tokenizer: Any,
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda done: None,
) -> list[HeldOut]:
    """Read and tokenize all sets; with `share` (k, N), request only each N-th prompt from the k-th on.

    `progress`: see `PromptDataset`. Raises ConfigError if one cannot be read, UserCodeFailed for its source.
    """
    found: list[HeldOut] = []
    rows = held_out_sets(config)
    for name, own in config.evaluate.named_sets().items():
        dataset = PromptDataset(
            rows[name],
            own.prompts(config.data, key=key_of_set(name)),
            model_dir=Path(config.model.path),
            seed=config.seed,
            own_rollout=config.rollout.is_own,
            with_tasks=config.sends_tasks,
            tokenizer=tokenizer,
            progress=progress,
        )
        size, sampling = own.n_samples_per_prompt, own.sampling(config.rollout)
        prompts = [dataset.prompt_at(place) for place in range(len(dataset))]
        first = sum(one.num_prompts for one in found)
        requests = [
            RolloutRequest(
                index,
                index,
                _seed(config.seed, first * size + index if name else index),
                prompt.tokens,
                prompt.task,
                first + place,
                member,
                max_tokens=sampling.max_response_tokens,
            )
            for place, prompt in enumerate(prompts)
            if place % share[1] == share[0]
            for member, index in enumerate(range(place * size, (place + 1) * size))
        ]
        found.append(HeldOut(name, sampling, prompts, requests, first, size, dataset.num_skipped))
    return found


ANSWERS = "answers"  # in the directory of an evaluation without training: a file per instance


@dataclass(frozen=True)
class Answer:
    """What an evaluation keeps of one response; a line of `answers/`."""

    set: str  # Its set's name
    prompt: int  # Place of its prompt in the set
    member: int  # Which of the prompt's responses
    reward: float | None  # None: it could not be scored
    correct: bool
    tokens: int  # Drawn
    truncated: bool
    seconds: float  # What this instance took for its share of the set

    @staticmethod
    def from_scored(one: HeldOut, rollout: FinishedRollout, score: ScoredResponse, seconds: float) -> "Answer":
        known = not score.failure
        return Answer(
            one.name,
            *divmod(rollout.index, one.size),
            reward=score.reward if known else None,
            correct=known and bool(score.correct),
            tokens=rollout.log_probs_A.numel(),
            truncated=rollout.truncated,
            seconds=round(seconds, 4),
        )


def _answer_line(one: HeldOut, rollout: FinishedRollout, score: ScoredResponse, seconds: float) -> dict[str, Any]:
    """Return a line of `answers/`: an answer with its text, for people."""
    texts = {"response": score.response, "ground_truth": score.ground_truth}
    return asdict(Answer.from_scored(one, rollout, score, seconds)) | texts


def line_of_sets(lines: Mapping[str, Mapping[str, Any]], *, seconds: float) -> dict[str, Any]:
    """Return the line of an evaluation of several sets: the first one's figures, and each one's under its name."""
    first = dict(next(iter(lines.values())))
    named = {
        f"{name}/{key}": value
        for name, line in lines.items()
        for key, value in line.items()
        if name and key not in ("step", "lineage", "time_s")
    }
    return {**first, "seconds": round(seconds, 4), **named}


def _seed(run_seed: int, index: int) -> int:
    """Mix (run seed, response) into 64 bits: equal for all versions, so that only the weights differ."""
    return int(np.random.SeedSequence([run_seed, index, _STREAM]).generate_state(1, np.uint64)[0])


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of successes among `number` independent trials.

    Unlike the normal approximation it stays within 0..1, and is useful for few trials and for shares of 0 and 1.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22 (158), p. 209.
    """
    z2 = _Z_95**2 / number
    center = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, center - half), min(1.0, center + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased chance that one of `k` responses to a prompt is right, 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code (2107.03374), equation 1.

    Args:
        num_samples: responses to the prompt, n >= k.
        num_correct: of these, c.
    """
    # As a product, since the binomials of 64 responses exceed a double's exact integers.
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def pass_rates(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return pass@k with its 95 % Wilson interval over prompts, for K = 2, 4, 8, ... as far as responses go.

    Args:
        counts: (scored responses, right ones) of each prompt; a prompt with fewer than K does not count for K.
    """
    rates: dict[str, float] = {}
    most = max((number for number, _ in counts), default=0)
    for k in (2**power for power in range(1, most.bit_length())):
        each = [pass_at_k(number, right, k) for number, right in counts if number >= k]
        mean = math.fsum(each) / len(each)
        # A prompt's estimate lies between 0 and 1, so it varies at most as a success or failure does.
        low, high = wilson_interval(mean, len(each))
        rates |= {
            f"pass_at_{k}": round(mean, 6),
            f"pass_at_{k}_low": round(low, 6),
            f"pass_at_{k}_high": round(high, 6),
        }
    return rates


def evaluation_line(answers: Sequence[Answer], *, version: Version, time_s: float) -> dict[str, Any]:
    """Return the line of one evaluation of a set.

    Args:
        answers: to all prompts, equally many each, in any order; at least one was scored.
        time_s: since the command started.
    """
    num_samples, known = len(answers), [one for one in answers if one.reward is not None]
    num_prompts = len({one.prompt for one in answers})
    accuracy = sum(one.correct for one in known) / len(known)
    # The trials are prompts: several responses to one prompt are not independent.
    low, high = wilson_interval(accuracy, max(1, num_prompts * len(known) // num_samples))
    counts: dict[int, tuple[int, int]] = {}
    for one in known:
        number, right = counts.get(one.prompt, (0, 0))
        counts[one.prompt] = number + 1, right + one.correct
    return {
        "step": version.step,
        "lineage": version.lineage,
        "accuracy": round(accuracy, 6),
        "accuracy_low": round(low, 6),
        "accuracy_high": round(high, 6),
        "reward_mean": round(sum(one.reward for one in known if one.reward is not None) / len(known), 6),
        "reward_failures": num_samples - len(known),
        "response_tokens_mean": round(sum(one.tokens for one in answers) / num_samples, 3),
        "truncated_fraction": round(sum(one.truncated for one in answers) / num_samples, 6),
        **pass_rates(list(counts.values())),
        "num_prompts": num_prompts,
        "num_samples": num_samples,
        "time_s": round(time_s, 3),
        "seconds": max(one.seconds for one in answers),  # instances that share a set work at the same time
    }


def evaluated_steps(run_dir: Path) -> frozenset[int]:
    """Return the steps in a run's file, which the launcher has cut to complete lines of the surviving lineage."""
    return frozenset(int(line["step"]) for line in LineReader(run_dir / EVALUATION_FILE).read())


def due_steps(*, interval: int, last: int) -> list[int]:
    """Return the steps whose weights are due: 0, every `interval` steps, and the last one."""
    return sorted({*range(0, last, interval), last})


def own_steps(
    *, interval: int, last: int, first: int, instance: int, num_instances: int, done: Collection[int]
) -> list[int]:
    """Return the due steps that one instance evaluates, in order.

    Step k * interval belongs to instance k mod `num_instances`; the last step to instance 0, so that one stays to the
    end.

    Args:
        first: step of the weights that this start begins with.
        done: steps that were already evaluated.
    """
    return [
        step
        for step in due_steps(interval=interval, last=last)
        if step >= first and step not in done and (0 if step == last else step // interval % num_instances) == instance
    ]
