"""Sums of one training step, on one rank, then over all ranks; they become the step's line in `metrics.jsonl`. Pure.

Every sample is added once, on arrival; the loss's sums over tokens are added with every micro-batch of every pass.
`workers.records.step_record` writes what `to_metrics` returns.

Legend of shapes: N samples.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from asyncflow.device import exact_dtype
from tq.columns import PackedBatch
from workers.algorithms.parts import LossCounts
from workers.rows.packed_rows import drawn_per_row, responses_of
from workers.settings.dataflow import REWARD_PARTS, SOURCES

_DIFFERENT = "different_response/"
_LARGEST_EXPONENT = 700.0  # of a float's e^x
# Sums of a loss from which other metrics are computed; every other sum is a metric under its own name, per token.
_NO_METRICS = {"loss", "tokens", "ratio_squared", "return_squared", "error_squared"}


@dataclass
class UpdateTotals:
    """Sums of one optimizer update; plain numbers, so that they travel as JSON."""

    # `tokens`, `sequences`, `responses`: see `LossCounts`
    tokens: int = 0
    sequences: int = 0
    responses: int = 0
    loss: float = 0.0  # Before scaling

    def add_micro_batch(self, counts: LossCounts, loss: float) -> None:
        self.tokens += counts.tokens
        self.sequences += counts.sequences
        self.responses += counts.responses
        self.loss += loss

    @property
    def counts(self) -> LossCounts:
        return LossCounts(self.tokens, self.sequences, self.responses)

    @staticmethod
    def merge_parts(parts: Iterable["UpdateTotals"]) -> "UpdateTotals":
        whole = UpdateTotals()
        for part in parts:
            whole.add_micro_batch(part.counts, part.loss)
        return whole


@dataclass
class StepTotals:
    """Sums over the samples of a step; plain numbers, so that they travel as JSON."""

    sums: dict[str, float] = field(default_factory=dict)  # By name
    staleness_max: int = -1  # Largest staleness of any sample; -1 without samples

    def add_to_sum(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_batch(self, batch: PackedBatch, *, step: int, admitted_step: int, rewarded: bool = True) -> None:
        """Count N >= 1 samples that `step` trains: columns `tokens rewards correct truncated versions`, optionally
        `reward_parts sources`; of SFT, whose samples nobody drew, `tokens` and `response_mask`."""
        if "versions" not in batch.columns:
            self._add_lengths(batch, drawn_per_row(batch).double())
            self.add_to_sum("supervised", len(batch))
            self.staleness_max = max(self.staleness_max, 0)
            if SOURCES in batch.columns:
                for source in batch[SOURCES].texts():
                    self.add_to_sum(f"source/{source}/samples", 1)
            return
        lengths = batch["versions"].lengths.double()  # drawn tokens; a row without any is not stale
        oldest_N, _ = batch["versions"].extremes()
        staleness_N = (step - 1 - oldest_N) * (lengths > 0)  # `StalenessRule.age`
        has_reward = batch["rewards"].values.isfinite()
        rewards = batch["rewards"].values[has_reward].double()
        self._add_lengths(batch, lengths)
        self.add_to_sum("scored", len(rewards))
        self.add_to_sum("reward", float(rewards.sum()))
        self.add_to_sum("reward_squared", float((rewards**2).sum()))
        self.add_to_sum("correct", float(batch["correct"].values[has_reward].sum()))
        self.add_to_sum("failed_rollouts", int((lengths == 0).sum()))
        self.add_to_sum("failed_rewards", int((~has_reward & (lengths > 0)).sum()) if rewarded else 0)
        self.add_to_sum("truncated", float(batch["truncated"].values.sum()))
        self.add_to_sum("staleness", float(staleness_N.sum()))
        self.add_to_sum("late", len(batch) * (admitted_step < step))
        self.add_to_sum("early", len(batch) * (admitted_step > step))
        self._add_responses(batch)
        self._add_histogram("reward", rewards)
        self._add_histogram("staleness", staleness_N)
        parts = batch[REWARD_PARTS].objects() if REWARD_PARTS in batch.columns else [{}] * len(batch)
        for each in parts:
            self._add_means({f"reward/{name}_mean": value for name, value in each.items()})
        if SOURCES in batch.columns:
            self._add_sources(batch, parts)
        self.staleness_max = max(self.staleness_max, int(staleness_N.max()))

    def _add_lengths(self, batch: PackedBatch, lengths: Tensor) -> None:
        """Count samples and their tokens; `lengths`: trained tokens of each, float64 [N]."""
        self.add_to_sum("samples", len(batch))
        self.add_to_sum("response_tokens", float(lengths.sum()))
        self.add_to_sum("response_tokens_squared", float((lengths**2).sum()))
        self.add_to_sum("tokens", float(batch["tokens"].lengths.sum()))
        self._add_histogram("response_tokens", lengths)

    def _add_histogram(self, name: str, values: Tensor) -> None:
        for value, count in Counter(f"{value + 0.0:.2g}" for value in values.tolist()).items():
            self.add_to_sum(f"histogram/{name}/{value}", count)

    def _add_responses(self, batch: PackedBatch) -> None:
        """Count responses that end at once, and the number of different responses, up to two."""
        if "response_mask" not in batch.columns:
            return
        known = {name for name in self.sums if name.startswith(_DIFFERENT)}
        for tokens, is_cut in zip(responses_of(batch), batch["truncated"].values.tolist(), strict=True):
            self.add_to_sum("empty", float(len(tokens) < 2 and not is_cut))
            name = f"{_DIFFERENT}{xxhash.xxh3_64_hexdigest(tokens.contiguous().numpy().tobytes())}"
            if name in known or len(known) < 2:
                known.add(name)
                self.add_to_sum(name, 1)

    def find_complaint(self) -> str:
        """Return what is wrong with all responses of the step; "": nothing."""
        sums = defaultdict(float, self.sums)
        samples = int(sums["samples"])
        if samples < 2 or self._is_supervised:
            return ""
        if sums["truncated"] == samples:
            return (
                f"all {samples} responses are truncated: none drew a token that ends it; raise "
                f"rollout.max_response_tokens, or check whether eos_token_id in generation_config.json is the token "
                f"with which this model ends a response"
            )
        if sums["empty"] == samples:
            return (
                f"all {samples} responses are empty: they end with their first token; check whether the prompts in "
                f"samples/ end as this model's prompts do"
            )
        if sum(name.startswith(_DIFFERENT) for name in self.sums) == 1:
            return (
                f"all {samples} responses are the same, so nothing can be learned from them; look at samples/, and "
                f"check whether rollout.temperature is 0"
            )
        return ""

    def _add_sources(self, batch: PackedBatch, parts: Sequence[Mapping[str, float]]) -> None:
        rewards, correct = batch["rewards"].values.tolist(), batch["correct"].values.tolist()
        for source, reward, is_correct, each in zip(batch[SOURCES].texts(), rewards, correct, parts, strict=True):
            found = {f"reward/{name}_mean": value for name, value in each.items()}
            if math.isfinite(reward):
                found |= {"reward_mean": reward, "accuracy": float(is_correct)}
            self._add_means({f"source/{source}/{name}": value for name, value in found.items()})
            self.add_to_sum(f"source/{source}/samples", 1)

    def _add_means(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add_to_sum(f"mean/{name}", value)
            self.add_to_sum(f"means/{name}", 1)

    def add_loss(self, stats: Mapping[str, float], of: str = "loss") -> None:
        """Add a loss's own sums over tokens, under `loss` for the policy or `critic`."""
        for name, value in stats.items():
            self.add_to_sum(f"{of}/{name}", value)

    @staticmethod
    def merge_parts(parts: Iterable["StepTotals"]) -> "StepTotals":
        whole = StepTotals()
        for part in parts:
            for name, value in part.sums.items():
                whole.add_to_sum(name, value)
            whole.staleness_max = max(whole.staleness_max, part.staleness_max)
        return whole

    def to_metrics(self) -> dict[str, Any]:
        """Return means and population deviations under their public names.

        Loss terms are means over the tokens whose loss counts, of all passes; rewards over the samples that have one,
        and None if none has; everything else over all samples. SFT has no rewards, responses and ages, and so none of
        their metrics.
        """
        sums = defaultdict(float, self.sums)  # in a critic-only step the policy has no loss
        samples, scored = sums["samples"], max(1.0, sums["scored"])
        tokens = max(1.0, sums["loss/tokens"])
        reward_mean, reward_std = _moments(sums["reward"], sums["reward_squared"], scored)
        tokens_mean, tokens_std = _moments(sums["response_tokens"], sums["response_tokens_squared"], samples)
        if self._is_supervised:
            return {
                **self._loss_means("loss"),
                "perplexity": math.exp(min(_LARGEST_EXPONENT, sums["loss/cross_entropy"] / tokens)),
                "response_tokens_mean": tokens_mean,
                "response_tokens_std": tokens_std,
                "samples": int(samples),
                "train_tokens": int(sums["tokens"]),
                "staleness_max": self.staleness_max,
                **{name: int(value) for name, value in self.sums.items() if name.startswith("source/")},
            }
        return {
            **self._loss_means("loss"),
            "reward_mean": reward_mean if sums["scored"] else None,
            "reward_std": reward_std if sums["scored"] else None,
            "accuracy": sums["correct"] / scored if sums["scored"] else None,
            "reward_failures": int(sums["failed_rewards"]),
            "rollout_failures": int(sums["failed_rollouts"]),
            "response_tokens_mean": tokens_mean,
            "response_tokens_std": tokens_std,
            "samples": int(samples),
            "truncated_fraction": sums["truncated"] / samples,
            "train_tokens": int(sums["tokens"]),
            "kl": self.kl,
            "effective_sample_size": effective_sample_size(sums["loss/ratio_mean"], sums["loss/ratio_squared"], tokens),
            "staleness_mean": sums["staleness"] / samples,
            "staleness_max": self.staleness_max,
            "late_fraction": sums["late"] / samples,
            "early_fraction": sums["early"] / samples,
            **self._partial_means(),
            **{name: int(value) for name, value in self.sums.items() if name.startswith("source/")},
        }

    @property
    def _is_supervised(self) -> bool:
        return "supervised" in self.sums

    @property
    def kl(self) -> float:
        """KL divergence from the reference, a mean over the tokens whose loss counts (nats); 0 without a reference."""
        return self.sums.get("loss/kl", 0.0) / max(1.0, self.sums.get("loss/tokens", 0.0))

    def to_histograms(self) -> dict[str, dict[str, int]]:
        """Return, by name, how many responses have each value, to two digits, so that the ranks' counts add up."""
        found: dict[str, dict[str, int]] = {"reward": {}, "response_tokens": {}, "staleness": {}}
        for path, count in self.sums.items():
            if path.startswith("histogram/"):
                _, name, value = path.split("/")
                found[name][f"{float(value):g}"] = int(count)
        return found

    def _partial_means(self) -> dict[str, float]:
        names = sorted(name.removeprefix("means/") for name in self.sums if name.startswith("means/"))
        return {name: self.sums[f"mean/{name}"] / self.sums[f"means/{name}"] for name in names}

    def _loss_means(self, of: str) -> dict[str, float]:
        found = {path.partition("/")[2]: value for path, value in self.sums.items() if path.startswith(f"{of}/")}
        tokens = max(1.0, found.get("tokens", 0.0))
        return {name: value / tokens for name, value in found.items() if name not in _NO_METRICS}

    def critic_metrics(self) -> dict[str, float]:
        """Return means over the tokens whose loss counts, of all passes; values are those before the step's update.

        `explained_variance` is 1 - Var(return - value) / Var(return): 0 for a critic that knows nothing, 1 for one that
        knows the return; 0 if all returns are equal.
        """
        sums = self.sums
        means = dict.fromkeys(("value_mean", "return_mean", "value_clip_fraction"), 0.0) | self._loss_means("critic")
        tokens = max(1.0, sums["critic/tokens"])
        variance = sums["critic/return_squared"] / tokens - means["return_mean"] ** 2
        left = sums["critic/error_squared"] / tokens - (means["value_mean"] - means["return_mean"]) ** 2
        return {**means, "explained_variance": 1 - left / variance if variance > 0 else 0.0}


def numbers(each: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return scalars of one device as numbers, fetched together so that the host waits only once."""
    scalars = [value for stats in each for value in stats.values()]
    if not scalars:
        return [{} for _ in each]
    found = iter(torch.stack([value.to(exact_dtype(value.device)) for value in scalars]).tolist())
    return [{name: next(found) for name in stats} for stats in each]


def effective_sample_size(total: float, squared: float, count: float) -> float:
    """Return (sum of ratios)^2 / (count x sum of their squares): 1 on-policy, 1 / count if one token dominates (Kong
    1992)."""
    return total**2 / (count * squared) if squared > 0 else 1.0


def _moments(total: float, squared: float, count: float) -> tuple[float, float]:
    mean = total / count
    return mean, math.sqrt(max(0.0, squared / count - mean**2))
