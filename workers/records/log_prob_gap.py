"""How far the generating engine's log-probabilities are from the trainer's for the same tokens, by token age.

Before its first update, step s computes with the weights of step s - 1. For tokens drawn by these weights (age 0) the
engines must agree up to rounding; a larger difference is an error in one of them. A token of version v has age
s - 1 - v, and its weights differ as well: how off-policy the data of each age is, is what the mismatch metrics say.

Older tokens are judged as well. If the trainer holds a copy of the version that drew them (`actor.tri_model` without
weights), it judges by that copy. Otherwise, once it has the next weights, it scores a few samples of a step again
(`MoveProbe`) to learn how far one version moves a token; older tokens may be that much further apart.

    step 7   trains with version 6; keeps some tokens' log-probabilities; update: version 7
    step 8   scores these tokens with version 7: the move of 6 -> 7       tokens of version 6 have age 1

Legend of shapes: A drawn tokens, packed.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncflow.device import to_device
from asyncflow.errors import TrainingDiverged
from tq.columns import PackedBatch
from workers.algorithms.parts import bounded_ratio, kl_divergence
from workers.engines.base import DivisibleLoss, LossFunction, TrainEngine
from workers.engines.delivery import rounding_error
from workers.records.step_totals import effective_sample_size
from workers.rows.packed_rows import SAMPLE_DRAWN, sequences_of
from workers.settings.run import RunConfig

# A difference of more than this many errors is a fault.
_TIMES = 2.0
# An older version may be this many times as far away as the trainer's own moves since, which few samples measure.
_MOVES = 3.0
# At most this many tokens and samples of a rank measure a move.
_PROBE_TOKENS, _PROBE_SAMPLES = 512, 64
# A mean of many tokens that is more than this many standard deviations off is not due to chance.
_DEVIATIONS = 6.0
# Fewer tokens of an age prove nothing: their deviation is unknown, too.
_TOKENS = 256
# Tokens whose entropies add up to less prove nothing, however many they are: the surprise of a confident policy is that
# of the few unlikely tokens among them.
_NATS = 512.0
# Tolerated difference between surprise and entropy, as a share of the entropy.
_SURPRISE = 0.05
# This many complaints in a row are not due to chance: the run learns from samples that the policy did not draw.
_STEPS = 2


@dataclass(frozen=True)
class GapLimits:
    """How far the engines of a run may differ."""

    error: float  # Mean difference due to rounding (nats), at an entropy of at least one nat
    # Whether the tokens' mean -log p must equal the entropy: responses are drawn from the whole distribution, and none
    # is selected by its outcome, as a user's own rollouts may do
    surprise: bool = True

    @staticmethod
    def from_config(config: RunConfig) -> "GapLimits | None":
        """Return the limits for the least precise dtype that computes or sends the policy; None: a simulated engine."""
        rollout, error = config.rollout, rounding_error(config)
        if error is None:
            return None
        chosen = config.algorithm.filters_groups or bool(config.schedule.lateness) or rollout.is_own
        # With the masks, log-probabilities and entropies are of the distribution that was drawn from.
        whole = (rollout.top_p == 1 and not rollout.top_k) or rollout.keeps_mask
        return GapLimits(error, surprise=whole and not chosen)

    def mean(self, entropy: float) -> float:
        """Return the largest allowed mean absolute difference (nats) at a given mean entropy of the tokens."""
        return _TIMES * self.error * _spread(entropy)

    def signed_limit(self, entropy: float) -> float:
        """Return how far from 0 the mean difference may be (nats).

        Over tokens that the generating engine drew, it is KL(generating || trainer), half the square of the errors, so
        an error in one direction shows here long before it shows in the absolute difference.
        """
        return (_TIMES * self.error) ** 2 * _spread(entropy) + self.error / 8


def _spread(entropy: float) -> float:
    """Return the share of an error that shows in a token's log-probability: almost none where the token is certain."""
    return min(1.0, entropy) + 0.02


def _slack(mean: float, squared: float, tokens: float) -> float:
    """Return how far the mean of `tokens` values may be from the true mean, given the mean of their squares."""
    return _DEVIATIONS * math.sqrt(max(0.0, squared - mean**2) / tokens)


@dataclass
class LogProbGap:
    """The difference over some tokens; plain numbers, so that they travel as JSON."""

    # Age of tokens -> sums over them: `tokens`, `total` (absolute differences), `signed` (generating engine - trainer),
    # `squared`, `entropy`, `surprise` (-log p - entropy, with the trainer's p), `surprise_squared`, `k3`, `ratio` and
    # `ratio_squared` (trainer's policy to generating policy), and `largest`, the largest difference. If the trainer
    # holds the version that drew them, `held`, `held_signed` and `held_squared` are `total`, `signed` and `squared`
    # against that version.
    ages: dict[str, dict[str, float]] = field(default_factory=dict)
    # The trainer's move by the previous update: `tokens`, and `total` of absolute differences; {}: unknown
    move: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def from_stats(stats: Mapping[str, float]) -> "LogProbGap":
        gap = LogProbGap()
        for key, value in stats.items():
            age, _, name = key.partition("/")
            gap.ages.setdefault(age, {})[name] = value
        return gap

    def add_gap(self, other: "LogProbGap") -> None:
        for age, sums in other.ages.items():
            own = self.ages.setdefault(age, {})
            for name, value in sums.items():
                before = own.get(name, 0.0)
                own[name] = max(before, value) if name == "largest" else before + value
        for name, value in other.move.items():
            self.move[name] = self.move.get(name, 0.0) + value

    @staticmethod
    def merge_parts(parts: Iterable["LogProbGap"]) -> "LogProbGap":
        whole = LogProbGap()
        for part in parts:
            whole.add_gap(part)
        return whole

    @property
    def mean(self) -> float | None:
        """Mean absolute difference (nats) over tokens of the newest weights; None without such tokens."""
        newest = self.ages.get("0")
        return newest["total"] / newest["tokens"] if newest else None

    @property
    def mean_move(self) -> float | None:
        """Mean absolute difference (nats) that the previous update made; None if unknown."""
        return self.move["total"] / self.move["tokens"] if self.move.get("tokens") else None

    def find_complaint(self, limits: GapLimits, moves: Sequence[float | None]) -> str:
        """Return what to tell the user, about the newest tokens that show a fault; "": nothing is wrong.

        Args:
            moves: `mean_move` of the steps so far, this one's last; None where unknown.
        """
        for age in sorted(map(int, self.ages)):
            since = [moves[-1 - k] if k < len(moves) else None for k in range(age)]
            if "held" in self.ages[str(age)]:
                since = []
            if age < 0 or None in since or self.ages[str(age)]["tokens"] < _TOKENS:
                continue
            found = self._describe_age(age, limits, sum(move for move in since if move is not None))
            if found:
                return found
        return ""

    def _describe_age(self, age: int, limits: GapLimits, moved: float) -> str:
        sums = self.ages[str(age)]
        tokens = sums["tokens"]
        names = ("held", "held_signed", "held_squared") if "held" in sums else ("total", "signed", "squared")
        mean, signed, squared = (sums[name] / tokens for name in names)
        entropy = sums["entropy"] / tokens
        of = "tokens of the same weights" if age == 0 else f"tokens of weights {age} versions older"
        wrong = (
            "one of the two engines is wrong: its temperature, its weights, or the log-probabilities that it reports"
        )
        limit = limits.mean(entropy) + _MOVES * moved
        if mean > limit + _slack(mean, squared, tokens):
            return (
                f"the generating engine's log-probabilities are {mean:.2g} nats from the trainer's on average, for "
                f"{of}, where at most {limit:.2g} is expected; {wrong} (rollout_log_prob_diff_mean)"
            )
        limit = limits.signed_limit(entropy) + _MOVES * moved
        if abs(signed) > limit + _slack(signed, squared, tokens):
            return (
                f"the generating engine's log-probabilities are {abs(signed):.2g} nats "
                f"{'above' if signed > 0 else 'below'} the trainer's on average, for {of}, where at most {limit:.2g} "
                f"is expected; {wrong} (rollout_log_prob_diff_mean)"
            )
        return self._describe_surprise(tokens, sums, entropy) if age == 0 and limits.surprise else ""

    @staticmethod
    def _describe_surprise(tokens: float, sums: Mapping[str, float], entropy: float) -> str:
        """Tokens that the policy drew are as likely as its entropy says; those of a sharper one are likelier."""
        surprise = sums["surprise"] / tokens
        slack = _slack(surprise, sums["surprise_squared"] / tokens, tokens)
        if sums["entropy"] < _NATS or abs(surprise) <= _SURPRISE * entropy + slack:
            return ""
        return (
            f"the generating engine draws tokens that are {'less' if surprise > 0 else 'more'} likely than the "
            f"policy's entropy says, {abs(surprise):.2g} of {entropy:.2g} nats on average: it draws from another "
            f"distribution (temperature, top-p, top-k), though the log-probabilities agree"
        )

    def to_metrics(self) -> dict[str, float | None]:
        """Return the metrics by public name. None: no token of the newest weights, or the previous update's move is
        unknown.
        """
        found: dict[str, float | None] = {
            "rollout_log_prob_diff_mean": self.mean,
            "rollout_log_prob_diff_max": self.ages["0"]["largest"] if "0" in self.ages else None,
            "policy_move": self.mean_move,
        }
        for age, sums in sorted(self.ages.items(), key=lambda item: int(item[0])):
            found[f"mismatch/age_{age}_mean"] = sums["total"] / sums["tokens"]
            found[f"mismatch/age_{age}_k3"] = sums["k3"] / sums["tokens"]
            found[f"mismatch/age_{age}_max"] = sums["largest"]
            share = effective_sample_size(sums["ratio"], sums["ratio_squared"], sums["tokens"])
            found[f"mismatch/age_{age}_ess"] = share
        return found


@dataclass
class Comparison:
    """Compares the tokens of one micro-batch."""

    rollout_A: Tensor  # float32 [A], from the generating engine
    age_A: Tensor  # integer [A], versions between the weights that drew the token and the trainer's
    # Age -> float32 [A], from the trainer's copy of the version that drew the tokens of this age
    held: Mapping[int, Tensor] = field(default_factory=dict)
    # Set by the loss: `AGE/NAME` as in `LogProbGap.ages`, scalars on the device
    stats: dict[str, Tensor] = field(default_factory=dict)
    log_probs_A: Tensor | None = None  # Set by the loss: float32 [A], from the trainer

    @staticmethod
    def from_batch(batch: PackedBatch, *, step: int, held: Mapping[int, Tensor] | None = None) -> "Comparison":
        """Return the comparison for a micro-batch before the first update of `step`.

        Args:
            batch: with columns `rollout_log_probs` and `versions`.
            held: older version -> log-probabilities of the trainer's copy of it.
        """
        ages = {step - 1 - version: log_probs_A for version, log_probs_A in (held or {}).items()}
        return Comparison(batch["rollout_log_probs"].values, step - 1 - batch["versions"].values, ages)

    def wrap_loss(self, loss: LossFunction) -> "ComparedLoss":
        """Return `loss` with the comparison made before it."""
        return ComparedLoss(self, loss)

    @torch.no_grad()
    def compare_tokens(self, log_probs_A: Tensor, entropy_A: Tensor) -> None:
        log_probs_A = self.log_probs_A = log_probs_A.detach().float()
        rollout_A, age_A = to_device([self.rollout_A, self.age_A], log_probs_A.device)
        gap_A = (log_probs_A - rollout_A).abs()
        ratio_A = bounded_ratio(log_probs_A - rollout_A)
        surprise_A = -log_probs_A - entropy_A
        sums = {
            "tokens": torch.ones_like(gap_A),
            "total": gap_A,
            "signed": rollout_A - log_probs_A,
            "squared": gap_A.square(),
            "entropy": entropy_A.to(gap_A),
            "surprise": surprise_A,
            "surprise_squared": surprise_A.square(),
            "k3": kl_divergence(rollout_A, log_probs_A, "k3"),
            "ratio": ratio_A,
            "ratio_squared": ratio_A.square(),
        }
        for age in sorted(set(self.age_A.tolist())):
            here_A = age_A == age
            # Mask instead of select: only the device knows the number of tokens, and asking for it would wait.
            self.stats |= {f"{age}/{name}": torch.where(here_A, value_A, 0.0).sum() for name, value_A in sums.items()}
            self.stats[f"{age}/largest"] = torch.where(here_A, gap_A, 0.0).amax()
            if age in self.held:
                signed_A = torch.where(here_A, rollout_A - self.held[age], 0.0)
                held = {"held": signed_A.abs(), "held_signed": signed_A, "held_squared": signed_A.square()}
                self.stats |= {f"{age}/{name}": value_A.sum() for name, value_A in held.items()}


@dataclass(frozen=True)
class ComparedLoss:
    """A loss with the comparison made before it; of parts of the micro-batch none is made."""

    comparison: Comparison
    loss: LossFunction

    def __call__(self, log_probs_A: Tensor, entropy_A: Tensor, *others_P: Tensor) -> Tensor:
        self.comparison.compare_tokens(log_probs_A, entropy_A)
        return self.loss(log_probs_A, entropy_A, *others_P)

    def cut_loss(self, sizes: Sequence[tuple[int, int]]) -> Sequence[LossFunction] | None:
        """See `DivisibleLoss`."""
        return self.loss.cut_loss(sizes) if isinstance(self.loss, DivisibleLoss) else None


class GapWatch:
    """Judges the gap of each step. All ranks have the same gaps, so all judge alike."""

    def __init__(self, config: RunConfig) -> None:
        self._limits = GapLimits.from_config(config)
        self._ends_run = config.algorithm.engine_gap == "end"
        self._moves: deque[float | None] = deque(maxlen=max(1, config.schedule.staleness_bound))
        self._num_in_a_row = 0

    def judge_gap(self, gap: LogProbGap) -> str:
        """Return what is wrong with a step's gap; "": nothing."""
        self._moves.append(gap.mean_move)
        complaint = "" if self._limits is None else gap.find_complaint(self._limits, self._moves)
        self._num_in_a_row = self._num_in_a_row + 1 if complaint else 0
        return complaint

    def check(self, step: int, complaint: str) -> None:
        """Refuse to continue with engines that disagree, given the last judged step and its complaint. Raises
        TrainingDiverged if the step before had a complaint, too."""
        if self._ends_run and self._num_in_a_row >= _STEPS:
            raise TrainingDiverged(
                f"step {step}: {complaint}, as in the step before; correct that and resume from an earlier checkpoint, "
                f"or continue with algorithm.engine_gap: warn"
            )


class MoveProbe:
    """Measures how far an update moves the policy, on a few samples trained in the previous step."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._kept: tuple[PackedBatch, Tensor] | None = None
        self._updated = False

    def keep(self, batch: PackedBatch, log_probs_A: Tensor) -> None:
        """Keep samples, and their drawn tokens' log-probabilities, of a step's first micro-batch; later calls in the
        step do nothing."""
        if self._kept is not None:
            return
        drawn_N = batch[SAMPLE_DRAWN].values.long()
        enough = int((drawn_N.cumsum(0) < _PROBE_TOKENS).sum()) + 1
        first = range(min(enough, _PROBE_SAMPLES, len(batch)))
        self._kept = batch.select(first), log_probs_A[: int(drawn_N[: len(first)].sum())].clone()

    def note_update(self) -> None:
        self._updated = True

    def measure_move(self) -> dict[str, float]:
        """Score the kept samples and forget them; collective. {} until the policy was updated."""
        kept, self._kept = self._kept, None
        if not self._updated:
            return {}
        self._updated = False
        now_A = self._engine.log_probs(None if kept is None else sequences_of(kept[0]))
        if kept is None or not len(now_A):
            return {}
        return {"tokens": float(len(now_A)), "total": float((now_A - kept[1]).abs().sum())}
