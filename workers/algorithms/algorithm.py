"""The interface between an algorithm and the loops that run it, and what all algorithms share. Tensors in, tensors out.

The column task asks for the `advantages` of whole groups. The trainer asks for `moments` and `normalized` (if
advantages are normalized over the step), then for `counts` and `loss` of every micro-batch, and once per update for
`scale`:

    rounds arrive    advantages -> loss loss loss ............................ -> scale     streams
                     advantages -> moments ... last row is there -> normalized -> loss loss loss -> scale   whole step

To add an algorithm, write a subclass with its own `Config` anywhere (`algorithm.name: module:Class`). Built-in ones
have their settings and names in `workers.settings.algorithms`; the docstring of a class is what docs/algorithms.md says
of it (`asyncflow config algorithms`).

Legend of shapes: N samples, A their drawn tokens, packed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from asyncflow.device import to_device
from tq.columns import Column, PackedBatch
from workers.algorithms.parts import (
    MAX_LOG_RATIO,
    BinaryDivergence,
    Clip,
    CrossEntropy,
    DualClip,
    LossCounts,
    MicroLoss,
    PolicyLoss,
    PolicyParts,
    PPOClip,
    Teacher,
    TopDivergence,
    TopOutcomes,
    ValueLoss,
    WeightClip,
    loss_scale,
    policy_parts,
    response_sums,
    token_weights,
)
from workers.rows.packed_rows import ROW_BEGINS, ROW_DRAWN, SAMPLE_DRAWN, drawn_per_row
from workers.settings.algorithms import (
    CISPOConfig,
    DAPOConfig,
    DistillConfig,
    DPPOConfig,
    GroupConfig,
    PolicyConfig,
    PPOClipConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
    SFTConfig,
    TurnCreditConfig,
)
from workers.settings.dataflow import LOSS_WEIGHTS, ROLLOUT_TOP_COLUMNS, TURN_IDS, TURN_REWARDS

SettingsT = TypeVar("SettingsT", bound=PolicyConfig)


class Algorithm(ABC, Generic[SettingsT]):
    """An objective of the actor: a loss made of `parts`, optionally with a KL penalty; subclasses add the advantages.

    Args:
        max_response_tokens: longest response; for a rollout of several turns, all of them together.
        mask_truncated: rows that were cut do not count.
    """

    # Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with the clips of `PPOClipConfig`.

    Config: ClassVar[type[PolicyConfig]]  # its settings, if it lives outside the package
    # Advantages are normalized over the step, so no training starts before the step's last row has arrived.
    whole_step = False
    whole_samples: ClassVar[bool] = False  # the ratio is per sample, not per token
    # The loss is a sum over samples, none of which looks at another, so a pipeline may train a micro-batch piece by
    # piece. A subclass declares this for itself, in its own body: what it overrides may look at all samples.
    per_sample: ClassVar[bool] = False
    # `advantages` obey `algorithm.credit`. The class that defines them says so, in its own body.
    credits_turns: ClassVar[bool] = False
    # Column with ids of tokens whose log-probabilities the loss needs, equally many for each drawn token; None: none.
    other_tokens: str | None = None

    def __init__(self, config: SettingsT, *, max_response_tokens: int, mask_truncated: bool) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._mask_truncated = mask_truncated
        self._parts = self.parts()

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads `ref_log_probs`."""
        return self._config.kl_coef > 0

    def parts(self) -> PolicyParts:
        """Return the components of the policy loss."""
        config = self._config
        return policy_parts(
            self.clips(), config.off_policy, config.loss_normalization, whole_samples=self.whole_samples
        )

    def clips(self) -> tuple[Clip, ...]:
        """Return what bounds a token's step, in order: PPO's clip, then the dual clip."""
        config = self._config
        assert isinstance(config, PPOClipConfig), f"{type(self).__name__} must define its own clips"
        dual = () if config.dual_clip is None else (DualClip(config.dual_clip),)
        return (PPOClip(config.eps_clip, config.upper_clip), *dual)

    @abstractmethod
    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return the outputs of the task `compute_advantages_and_returns`, at least `advantages`.

        `batch` holds the task's inputs for whole groups, with the `group_size` responses to a prompt next to each
        other. Columns are float32, with one value per row or one per drawn token.
        """

    def moments(self, batch: PackedBatch) -> "Moments":
        """Return what samples contribute to the moments of the step's advantages, over all tokens that count."""
        counts_A = self._weights(batch).repeat_interleave(drawn(batch)) > 0
        return Moments.of(token_advantages(batch)[counts_A])

    def normalized(self, batch: PackedBatch, moments: "Moments") -> PackedBatch:
        """Return this rank's batch with `advantages` normalized by all ranks' `moments`; for `whole_step` only."""
        raise AssertionError(f"{type(self).__name__} does not normalize over a step")

    def counts(self, batch: PackedBatch) -> LossCounts:
        """Return what a micro-batch adds to the divisor; a row is counted with its first sample."""
        # Reads `truncated`, `rewards` and, if present, `loss_weights`.
        keep_N, begins_N = self._weights(batch) > 0, batch[ROW_BEGINS].values
        return LossCounts(
            tokens=int(drawn(batch)[keep_N].sum()),
            sequences=int((keep_N & begins_N).sum()),
            responses=int((self._is_judged(batch) & begins_N).sum()),
        )

    def loss(self, batch: PackedBatch, *, device: torch.device) -> MicroLoss:
        """Return the loss of a micro-batch.

        Args:
            batch: samples (`samples_of`) with the columns `rollout_log_probs`, `advantages` (one per
                row or token), `truncated`, `rewards` and, for a KL penalty, `ref_log_probs`. Optional: `old_log_probs`,
                of the policy at the start of the step (default: the policy in training), and `loss_weights`, one per
                row.
            device: where the engine computes.
        """
        names = ["rollout_log_probs"]
        names += ["ref_log_probs"] if self.reads_reference else []
        names += ["old_log_probs"] if "old_log_probs" in batch.columns else []
        own = [drawn(batch), self._token_weights(batch), token_advantages(batch)]
        length_N, weight_A, advantage_A, *rest = to_device([*own, *(batch[name].values for name in names)], device)
        columns = dict(zip(names, rest, strict=True))
        return PolicyLoss(
            parts=self._parts,
            kl=self._config.kl_loss,
            length_N=length_N,
            weight_A=weight_A,
            advantage_A=advantage_A,
            rollout_log_probs_A=columns["rollout_log_probs"],
            ref_log_probs_A=columns.get("ref_log_probs"),
            old_log_probs_A=columns.get("old_log_probs"),
            entropy_coef=self._config.entropy_coef,
            per_sample=bool(vars(type(self)).get("per_sample")),
        )

    def scale(self, counts: LossCounts) -> float:
        """Return the factor for `TrainEngine.step`, from the counts of the update's micro-batches on all ranks."""
        return loss_scale(self._parts.aggregate, counts, max_response_tokens=self._max_response_tokens)

    def _token_weights(self, batch: PackedBatch) -> Tensor:
        weight_N, row_N = self._weights(batch), batch[ROW_DRAWN].values
        return token_weights(self._parts.aggregate, drawn(batch), weight_N, row_N)

    def _weights(self, batch: PackedBatch) -> Tensor:
        """Return float32 [N]: the weight of each sample's row."""
        truncated_N = batch["truncated"].values.bool()
        weight_N = loss_weights(batch) * self._is_judged(batch)
        return weight_N * ~truncated_N if self._mask_truncated else weight_N

    def _is_judged(self, batch: PackedBatch) -> Tensor:
        """Return bool [N]: whether something says how good a sample's row is; others count nowhere."""
        return has_reward(batch)


def drawn(batch: PackedBatch) -> Tensor:
    """Return int64 [N]: drawn tokens of each sample."""
    return batch[SAMPLE_DRAWN].values.long()


def loss_weights(batch: PackedBatch) -> Tensor:
    """Return float32 [N]: the weight that a user's task gave each sample's row; 1 without such a task."""
    return batch[LOSS_WEIGHTS].values.float() if LOSS_WEIGHTS in batch.columns else torch.ones(len(batch))


def has_reward(batch: PackedBatch) -> Tensor:
    """Return bool [N]: whether a sample's row has a reward. If scoring failed it is NaN."""
    return batch["rewards"].values.isfinite()


def token_advantages(batch: PackedBatch) -> Tensor:
    """Return float32 [A]: each drawn token's advantage, from a column with one value per row or per token."""
    column, length_N = batch["advantages"], drawn(batch)
    if torch.equal(column.lengths.long(), length_N):
        return column.values.float()
    return column.values.float().repeat_interleave(length_N)


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of numbers that arrive in parts. Plain numbers, so that they travel as JSON."""

    count: int = 0
    mean: float = 0.0  # 0 if there are no numbers
    squares: float = 0.0  # sum of squared distances from the mean

    @staticmethod
    def of(values: Tensor) -> "Moments":
        """Return the moments of a tensor, computed in float64."""
        if not values.numel():
            return Moments()
        values = values.double()
        mean = values.mean()
        return Moments(values.numel(), float(mean), float((values - mean).square().sum()))

    @staticmethod
    def merged(parts: Iterable["Moments"]) -> "Moments":
        """Return the moments of all parts together. Source: Chan, Golub, LeVeque 1983, eq. 2.1."""
        count, mean, squares = 0, 0.0, 0.0
        for part in parts:
            total = count + part.count
            if part.count:
                apart = part.mean - mean
                squares += part.squares + apart**2 * count * part.count / total
                mean += apart * part.count / total
            count = total
        return Moments(count, mean, squares)

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 if there are no numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


# Advantages: how much better a response, or a token of it, is than its alternatives. Pure.
#
# Responses are compared within their group, or tokens with a critic's expectation. A KL penalty inside the reward is
# log (policy / reference), both as computed by the trainer: the generating engine rounds differently, and summed over
# a response that difference would count as divergence.
#
# A row is a rollout, whose samples lie one after another. It has one reward, or one per turn (`algorithm.credit`), and
# how it is cut into samples changes no advantage: what reaches back from later tokens reaches across samples, in the
# order in which they were drawn (`turn_ids`).
#
# Legend of shapes: B prompts, G responses per prompt, N rows, A their drawn tokens, packed, R drawn tokens of the
# longest row, K most turns of a row, U all turns of all rows, row after row.


def group_advantages(reward_BG: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Center the rewards of each prompt's responses and, by default, scale them; [B, G] -> float32 [B, G].

    Rewards that are NaN are left out of their group. Advantages are zero for them, for a single reward, and for a group
    of equal rewards. `scale_by_std` divides by the sample standard deviation (Bessel's correction, as in TRL and verl)
    plus `eps`.
    """
    # Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; without scaling Liu et al. 2025 (arXiv 2503.20783),
    # section 3.2 (Dr. GRPO).
    assert reward_BG.dim() == 2 and reward_BG.shape[1], f"no group: rewards of shape {tuple(reward_BG.shape)}"
    reward_BG = reward_BG.double()
    # In float64, so that the rounding error of a mean is never divided by `eps`.
    number_B1 = reward_BG.isfinite().sum(1, keepdim=True)
    centered_BG = (reward_BG - reward_BG.nanmean(1, keepdim=True)).nan_to_num(nan=0.0)
    if scale_by_std:
        variance_B1 = centered_BG.square().sum(1, keepdim=True) / (number_B1 - 1).clamp(min=1)
        centered_BG = centered_BG / (variance_B1.sqrt() + eps)
    return torch.where(has_equal_rewards(reward_BG), 0.0, centered_BG).float()


def has_equal_rewards(reward_BG: Tensor) -> Tensor:
    """Return bool [B, 1]: whether all rewards of a group are equal, ignoring NaN."""
    return reward_BG.nan_to_num(nan=-torch.inf).amax(1, keepdim=True) <= reward_BG.nan_to_num(nan=torch.inf).amin(
        1, keepdim=True
    )


def token_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [A]: log (policy / reference) at each token (k1), from `old_log_probs` and `ref_log_probs`."""
    return batch["old_log_probs"].values.double() - batch["ref_log_probs"].values.double()


def response_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [N]: the sum over each row's tokens."""
    return response_sums(token_penalties(batch), batch["old_log_probs"].lengths.long())


def penalties_to_come(batch: PackedBatch) -> Tensor:
    """Return float64 [A]: the sum from each token to the end of its row, in the order in which tokens were drawn."""
    length_N, penalty_A = batch["old_log_probs"].lengths.long(), token_penalties(batch)
    order_A = drawn_order(batch, len(penalty_A))
    penalty_A = penalty_A[order_A]
    before_A = penalty_A.cumsum(0) - penalty_A
    ends_N = length_N.cumsum(0)
    total_N = response_sums(penalty_A, length_N)
    starts_N = (ends_N - length_N)[length_N > 0]
    begun_A = before_A[starts_N].repeat_interleave(length_N[length_N > 0])
    return as_stored(total_N.repeat_interleave(length_N) - (before_A - begun_A), order_A)


def drawn_order(batch: PackedBatch, num_drawn: int) -> Tensor:
    """Return int64 [A]: the places of the `num_drawn` tokens, row after row, each row's in the order in which they were
    drawn.

    Turns of several samples may alternate, e.g. those of a sub-agent and its caller. Without `turn_ids` (one response
    to a prompt, or samples of a process outside) tokens lie in order.
    """
    return turn_places(batch).argsort(stable=True) if TURN_IDS in batch.columns else torch.arange(num_drawn)


def as_stored(value_A: Tensor, order_A: Tensor) -> Tensor:
    """Return values that are in `drawn_order` in the order of the columns."""
    return torch.empty_like(value_A).index_copy(0, order_A, value_A)


def turn_places(batch: PackedBatch) -> Tensor:
    """Return int64 [A]: each drawn token's turn, numbered over all rows: ascending with the rows, then with the turns.
    With `turn_rewards` it is the turn's place among these."""
    column = batch[TURN_IDS]
    if TURN_REWARDS in batch.columns:
        turns_N = batch[TURN_REWARDS].lengths.long()
    else:
        most = int(column.values.max()) + 1 if len(column.values) else 0
        turns_N = torch.full((len(column),), most)
    turn_A, length_N = column.values.long(), column.lengths.long()
    assert (turn_A < turns_N.repeat_interleave(length_N)).all(), "a turn has no reward: it would get the next row's"
    return turn_A + (turns_N.cumsum(0) - turns_N).repeat_interleave(length_N)


def turn_token_rewards(batch: PackedBatch, order_A: Tensor) -> Tensor:
    """Return float64 [A], in `drawn_order`: each turn's reward at its last token; NaN rewards become 0.

    What a turn without a token earned is paid at the row's last token before it.
    """
    place_A, column = turn_places(batch)[order_A], batch[TURN_REWARDS]
    turns_N = column.lengths.long()
    last_U = torch.searchsorted(place_A, torch.arange(len(column.values)), right=True) - 1
    first_U = (turns_N.cumsum(0) - turns_N).repeat_interleave(turns_N)
    paid_U = (last_U >= 0) & (place_A[last_U.clamp(min=0)] >= first_U) if len(place_A) else last_U >= 0
    reward_U = column.values.double().nan_to_num(nan=0.0)
    return torch.zeros(len(place_A), dtype=torch.float64).index_add(0, last_U[paid_U], reward_U[paid_U])


def returns_to_go(
    batch: PackedBatch, *, gamma: float, last_N: Tensor | None = None, penalty_A: Tensor | None = None
) -> Tensor:
    """Return float64 [N, K]: the rewards of each turn and, discounted by `gamma` per turn, of the later ones; NaN where
    a row has no such turn, or no reward. They are rounded to float32, as `rewards` are: sums of different rewards would
    differ by their rounding otherwise, which a comparison in standard deviations blows up.

    Args:
        last_N: added to the reward of a row's last turn.
        penalty_A: subtracted from the reward of the turn that drew each token.
    """
    column = batch[TURN_REWARDS]
    turns_N, rows = column.lengths.long(), len(column)
    reward_U = column.values.double()
    if penalty_A is not None:
        reward_U = reward_U.index_add(0, turn_places(batch), penalty_A.double(), alpha=-1)
    if last_N is not None:
        reward_U = reward_U.index_add(0, turns_N.cumsum(0) - 1, last_N.double())
    there_NK = torch.arange(int(turns_N.max())) < turns_N.unsqueeze(1)
    reward_NK = torch.zeros(there_NK.shape, dtype=torch.float64)
    reward_NK[there_NK] = reward_U
    to_go_N = torch.zeros(rows, dtype=torch.float64)
    for k in reversed(range(reward_NK.shape[1])):
        to_go_N = reward_NK[:, k] + gamma * to_go_N
        reward_NK[:, k] = to_go_N
    return reward_NK.float().double().where(there_NK & batch["rewards"].values.isfinite().unsqueeze(1), torch.nan)


def of_turns(value_NK: Tensor, batch: PackedBatch) -> Column:
    """Return a column with a turn's value, of [N, K], at each of its tokens."""
    column = batch[TURN_IDS]
    row_A = torch.arange(len(column)).repeat_interleave(column.lengths.long())
    return Column(value_NK[row_A, column.values.long()].float(), column.lengths)


def turn_advantages(
    to_go_NK: Tensor, batch: PackedBatch, compare: Callable[[Tensor], Tensor], group_size: int
) -> Column:
    """Return a column with an advantage per drawn token: the returns-to-go of the k-th turns of a group, compared with
    each other (`compare`: [B, G] with NaN for rollouts that have no such turn -> [B, G]).

    So a turn's baseline depends on nothing that the turn itself or a later one did. If all rewards come with the last
    turn and all rollouts have as many turns, the advantages are those of whole rollouts. A turn that no other rollout
    of its group reached has advantage 0.
    """
    # Source: GRPO's comparison (arXiv 2402.03300) in the place of turns, as the turn-level advantages of Zeng et al.
    # 2025 (arXiv 2505.11821), with what the rest of the rollout earns instead of its outcome alone. Process supervision
    # (2402.03300, section 4.1.3) centers single rewards before it adds them up, so that a rollout's advantage would
    # depend on its number of turns.
    compared = [compare(to_go_NK[:, k].reshape(-1, group_size)).flatten() for k in range(to_go_NK.shape[1])]
    return of_turns(torch.stack(compared, 1), batch)


def token_rewards(reward_N: Tensor, length_N: Tensor, penalty_A: Tensor | None = None) -> Tensor:
    """Return float64 [A]: a row's reward at its last drawn token, minus each token's penalty.

    The reward of a row without drawn tokens is dropped. `penalty_A` is e.g. `kl_coef * (log policy - log reference)`
    (Ouyang et al. 2022, arXiv 2203.02155, eq. 2).
    """
    length_N = length_N.long()
    reward_A = torch.zeros(int(length_N.sum()), dtype=torch.float64)
    last_N = length_N.cumsum(0) - 1
    reward_A[last_N[length_N > 0]] = reward_N.double()[length_N > 0]
    return reward_A if penalty_A is None else reward_A - penalty_A.double()


def generalized_advantages(
    reward_A: Tensor, value_A: Tensor, length_N: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return every token's advantage and return, float32 [A] each, from token rewards and a critic's values V(s_t).

    The drawn token y_t is the action in state s_t: all tokens of its sample before it. Tokens that the policy did not
    draw (observations) are not actions, so s_t+1 is the state of the next drawn token, also if that begins the
    rollout's next sample. The last one is terminal, even if the rollout was cut: there is no value to bootstrap from.
    `gamma` discounts per token; `lam` 0 gives one-step errors, 1 Monte Carlo.
    """
    #     delta_t = r_t + gamma V(s_t+1) - V(s_t)         V after the last token is 0
    #     A_t     = delta_t + gamma lam A_t+1
    #     return  = A_t + V(s_t)                          the critic's target (TD(lambda))
    #
    # Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 11, 12 and 16. Computed in float64.
    length_N = length_N.long()
    responses, tokens = len(length_N), int(length_N.max()) if len(length_N) else 0
    real_NR = torch.arange(tokens) < length_N.unsqueeze(1)
    reward_NR, value_NR = (torch.zeros(responses, tokens, dtype=torch.float64) for _ in range(2))
    reward_NR[real_NR], value_NR[real_NR] = reward_A.double(), value_A.double()
    advantage_NR = torch.zeros_like(value_NR)
    next_value_N = next_advantage_N = torch.zeros(responses, dtype=torch.float64)
    for t in reversed(range(tokens)):
        delta_N = reward_NR[:, t] + gamma * next_value_N - value_NR[:, t]
        # Zero beyond a response's end, so that padding never reaches its tokens.
        next_advantage_N = torch.where(real_NR[:, t], delta_N + gamma * lam * next_advantage_N, 0.0)
        next_value_N = value_NR[:, t]
        advantage_NR[:, t] = next_advantage_N
    advantage_A = advantage_NR[real_NR]
    return advantage_A.float(), (advantage_A + value_A.double()).float()


def turn_level_advantages(
    reward_A: Tensor, value_A: Tensor, place_A: Tensor, length_N: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return every token's advantage and return, float32 [A] each, by GAE whose steps are turns.

    A turn is one action: its reward is the sum over its tokens, its state that of its first token, and all of its
    tokens have its advantage and, as the critic's target, its return. All but `length_N` in `drawn_order`; `place_A`:
    `turn_places`. `gamma` and `lam` apply per turn.
    """
    # Source: Schulman et al. 2016 (arXiv 1506.02438) with turns as actions, as AReaL's `gae_timestep_unit: turn`. The
    # bi-level GAE of VAGEN (arXiv 2510.16907) goes from last token to last token instead, and on inside each turn.
    turn_U, tokens_U = place_A.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    first_U = tokens_U.cumsum(0) - tokens_U
    row_A = torch.arange(len(length_N)).repeat_interleave(length_N.long())
    turns_N = torch.zeros(len(length_N), dtype=torch.int64).index_add(0, row_A[first_U], torch.ones_like(turn_U))
    both = generalized_advantages(response_sums(reward_A, tokens_U), value_A[first_U], turns_N, gamma=gamma, lam=lam)
    advantage_A, return_A = (each.repeat_interleave(tokens_U) for each in both)
    return advantage_A, return_A


class GRPO(Algorithm[GroupConfig]):
    """Group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300, eq. 3).

    Advantage: the reward minus the group's mean, in standard deviations of the group. Loss: clipped per token, with a
    KL term (k3). With `scale_advantages_by_std: false` and `loss_normalization: constant` it is Dr. GRPO (arXiv
    2503.20783).
    """

    per_sample = True
    credits_turns = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`: one per row from `rewards`, or one per token from `turn_rewards`."""
        config = self._config
        compare = partial(group_advantages, scale_by_std=config.scale_advantages_by_std, eps=config.advantage_eps)
        if isinstance(config, TurnCreditConfig) and config.credits_turns:
            to_go_NK = returns_to_go(batch, gamma=config.gamma)
            return {"advantages": turn_advantages(to_go_NK, batch, compare, group_size)}
        return {"advantages": Column.of_scalars(compare(batch["rewards"].values.reshape(-1, group_size)))}


class CISPO(GRPO):
    """Clipped importance weights (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5).

    Advantage: GRPO's. Loss: the ratio is a weight without gradient, at most 1 + `eps_clip_high`, so that no token loses
    its gradient. There is no lower bound (`eps_clip: 1`); the paper gives no number for the upper one.
    """

    per_sample = True

    def clips(self) -> tuple[Clip, ...]:
        config = self._config
        assert isinstance(config, CISPOConfig)
        return (WeightClip(1 - config.eps_clip, 1 + config.eps_clip_high),)


class DAPO(Algorithm[DAPOConfig]):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3).

    Advantage: GRPO's, after a penalty for overlong responses (`overlong_buffer_tokens`). Loss: clipped per token with a
    higher upper clip (0.28), mean over tokens (`loss_normalization: token`). Dynamic sampling is `group_filter:
    zero_variance`: groups whose responses all have the same reward teach nothing, and are replaced before training.
    """

    # Legend of shapes: N responses.

    per_sample = True
    credits_turns = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`: one per row from `rewards`, or one per token from `turn_rewards`. With a buffer, each
        row's count of drawn tokens is charged to the row, or its last turn."""
        reward_N, penalty_N = batch["rewards"].values.double(), None
        config = self._config
        buffer = config.overlong_buffer_tokens
        if buffer:
            penalty_N = overlong_penalty(
                drawn_per_row(batch), max_tokens=self._max_response_tokens, buffer_tokens=buffer
            )
        compare = partial(group_advantages, eps=config.advantage_eps)
        if config.credits_turns:
            to_go_NK = returns_to_go(batch, gamma=config.gamma, last_N=penalty_N)
            return {"advantages": turn_advantages(to_go_NK, batch, compare, group_size)}
        reward_N = reward_N if penalty_N is None else reward_N + penalty_N
        return {"advantages": Column.of_scalars(compare(reward_N.reshape(-1, group_size)))}


def overlong_penalty(length_N: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return float64 [N]: 0 before the buffer begins, then decreasing linearly to -1 at `max_tokens`."""
    # Source: arXiv 2503.14476, eq. 13; `max_tokens` is its L_max, `buffer_tokens` its L_cache.
    return ((max_tokens - buffer_tokens - length_N.double()) / buffer_tokens).clamp(-1, 0)


# Largest divergence in the authors' own runs (verl, `examples/dppo_trainer`).
AUTHORS_BOUNDS = {"tv": 0.15, "kl": 0.05}


class DPPO(GRPO):
    """Divergence proximal policy optimization (Qi et al. 2026, arXiv 2602.04879, eq. 11 to 14).

    Advantage: GRPO's. Loss: instead of a clip of the ratio, a bound on how far a probability moves: tokens further than
    `max_divergence` from the policy that drew them do not move further away. The divergence, `tv` or `kl`, is that of
    the drawn token against all others or, with `divergence_top_k`, of the likeliest tokens and the drawn one.
    """

    per_sample = True

    def __init__(self, config: GroupConfig, *, max_response_tokens: int, mask_truncated: bool) -> None:
        super().__init__(config, max_response_tokens=max_response_tokens, mask_truncated=mask_truncated)
        self.other_tokens = ROLLOUT_TOP_COLUMNS[0] if config.num_top_log_probs else None

    def clips(self) -> tuple[Clip, ...]:
        """Return the truncation of the ratio, then the trust region."""
        config = self._config
        assert isinstance(config, DPPOConfig)
        bound = config.max_divergence or AUTHORS_BOUNDS[config.divergence]
        divergence = TopDivergence if config.divergence_top_k else BinaryDivergence
        return (WeightClip(0.0, config.max_ratio), divergence(config.divergence, bound))

    def loss(self, batch: PackedBatch, *, device: torch.device) -> MicroLoss:
        """Like `Algorithm.loss`; with `divergence_top_k` also from the columns `ROLLOUT_TOP_COLUMNS`. The loss then
        takes those tokens' log-probabilities under the policy as third argument."""
        loss = super().loss(batch, device=device)
        if self.other_tokens is None:
            return loss
        assert isinstance(loss, PolicyLoss)
        drawn_A = batch["tokens"].values[batch["response_mask"].values.bool()]
        ids, log_probs = (batch[name].values for name in ROLLOUT_TOP_COLUMNS)
        shape = len(drawn_A), len(ids) // max(1, len(drawn_A))
        has_drawn_A = (ids.view(shape) == drawn_A.unsqueeze(1)).any(1)
        top_AK, has_drawn_A = to_device([log_probs.view(shape), has_drawn_A], device)
        return replace(loss, top=TopOutcomes(top_AK, has_drawn_A))


class GSPO(GRPO):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7).

    Advantage: GRPO's. Loss: ratio and clip are those of whole samples (3e-4, 4e-4), mean over rollouts. The ratio is
    the trainer's to itself: a gap between two engines in bfloat16 is as large as the clip.
    """

    whole_samples = True
    per_sample = True


class PPO(Algorithm[PPOConfig]):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 9).

    Advantage: of every token, by GAE (arXiv 1506.02438) from the values of a critic. Loss: clipped per token, mean over
    tokens; the KL penalty is a term of the loss, or part of each token's reward (arXiv 2203.02155, eq. 2). The critic
    is a model of its own, so the two losses are not added: [engines.md](engines.md#critic-fsdp), sections `critic` and
    `algorithm`.
    """

    per_sample = True
    credits_turns = True

    def __init__(self, config: PPOConfig, *, max_response_tokens: int, mask_truncated: bool) -> None:
        super().__init__(config, max_response_tokens=max_response_tokens, mask_truncated=mask_truncated)
        self.whole_step = config.whole_step

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, not whitened yet, and `returns`, per token, along each rollout: it is paid once, however
        many samples it has."""
        # Reads `rewards`, `values` and, if there are several turns, `turn_ids`; with the KL penalty in the reward,
        # `old_log_probs` and `ref_log_probs`; with `credit: turn`, `turn_rewards`.
        config, values = self._config, batch["values"]
        order_A = drawn_order(batch, len(values.values))
        value_A, length_N = values.values[order_A], values.lengths
        penalty_A = config.kl_coef * token_penalties(batch)[order_A] if config.has_reward_penalty else None
        if config.credits_turns:
            reward_A = turn_token_rewards(batch, order_A)
            reward_A = reward_A if penalty_A is None else reward_A - penalty_A
        else:
            reward_N = batch["rewards"].values.nan_to_num(nan=0.0)  # rows without a reward count nowhere
            reward_A = token_rewards(reward_N, length_N, penalty_A)
        if config.gae_timestep_unit == "turn":
            place_A = turn_places(batch)[order_A]
            both = turn_level_advantages(reward_A, value_A, place_A, length_N, gamma=config.gamma, lam=config.lam)
        else:
            both = generalized_advantages(reward_A, value_A, length_N, gamma=config.gamma, lam=config.lam)
        advantage_A, return_A = (as_stored(each, order_A) for each in both)
        return {"advantages": Column(advantage_A, values.lengths), "returns": Column(return_A, values.lengths)}

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Whiten `advantages`: mean 0 and variance 1 over the step's tokens that count."""
        column = batch["advantages"]
        deviation = (moments.deviation**2 + self._config.advantage_eps) ** 0.5
        values = (column.values.double() - moments.mean) / deviation
        return batch.with_columns({"advantages": Column(values.float(), column.lengths)})

    def value_loss(self, batch: PackedBatch, *, device: torch.device) -> ValueLoss:
        """Return the critic's loss of a micro-batch; its sum is scaled like the policy's (`counts`, `scale`).

        `batch` holds samples with the columns `values`, `returns`, `truncated`, `rewards` and, optionally,
        `loss_weights`.
        """
        columns = [self._token_weights(batch), batch["values"].values, batch["returns"].values]
        weight_A, old_value_A, return_A = to_device(columns, device)
        config = self._config
        return ValueLoss(weight_A, old_value_A, return_A, clip=config.value_clip, coef=config.value_loss_coef)


class ReinforcePlusPlus(Algorithm[ReinforcePlusPlusConfig]):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, section 3, eq. 8 to 10).

    Advantage: the reward minus the KL penalty to come, normalized over all tokens of the step, as in the authors' code.
    Loss: clipped per token, mean over tokens. `baseline: group` subtracts the group's mean first, and has the KL term
    (k2) in the loss.
    """

    # Legend of shapes: N rows, A their drawn tokens, packed.

    whole_step = True
    per_sample = True
    credits_turns = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, not normalized yet: one per row, or per token if the KL penalty is in the reward, or
        turns are credited by themselves."""
        reward_N, config = batch["rewards"].values.double(), self._config
        to_go_NK = returns_to_go(batch, gamma=config.gamma) if config.credits_turns else None
        if config.baseline == "group":
            compare = partial(group_advantages, scale_by_std=False)
            if to_go_NK is not None:
                return {"advantages": turn_advantages(to_go_NK, batch, compare, group_size)}
            return {"advantages": Column.of_scalars(compare(reward_N.reshape(-1, group_size)))}
        if to_go_NK is not None:
            column = of_turns(to_go_NK.nan_to_num(nan=0.0), batch)
            if not config.kl_coef:
                return {"advantages": column}
            reward_A, length_N = column.values.double(), column.lengths
        elif not config.kl_coef:
            return {"advantages": Column.of_scalars(reward_N.nan_to_num(nan=0.0).float())}
        else:
            length_N = batch["old_log_probs"].lengths
            reward_A = reward_N.nan_to_num(nan=0.0).repeat_interleave(length_N.long())
        advantage_A = reward_A - config.kl_coef * penalties_to_come(batch)
        return {"advantages": Column(advantage_A.float(), length_N)}

    def normalized(self, batch: PackedBatch, moments: Moments) -> PackedBatch:
        """Center and scale `advantages` by the moments of the whole step."""
        column = batch["advantages"]
        values = (column.values.double() - moments.mean) / max(moments.deviation, self._config.advantage_eps)
        return batch.with_columns({"advantages": Column(values.float(), column.lengths, shapes=column.shapes)})


class RLOO(Algorithm[RLOOConfig]):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, section 2.2).

    Advantage: the reward, minus the KL penalty of the whole response, minus the mean of the other responses' to the
    same prompt. Loss: sum over tokens.
    """

    per_sample = True
    credits_turns = True

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`: one per row from `rewards`, or one per token from `turn_rewards`; with a penalty, also
        from the log-probabilities."""
        config, reward_N = self._config, batch["rewards"].values.double()
        if config.credits_turns:
            penalty_A = config.kl_coef * token_penalties(batch) if config.kl_coef else None
            to_go_NK = returns_to_go(batch, gamma=config.gamma, penalty_A=penalty_A)
            return {"advantages": turn_advantages(to_go_NK, batch, leave_one_out, group_size)}
        if config.kl_coef:
            reward_N = reward_N - config.kl_coef * response_penalties(batch)
        return {"advantages": Column.of_scalars(leave_one_out(reward_N.reshape(-1, group_size)))}


def leave_one_out(reward_BG: Tensor) -> Tensor:
    """Return float32 [B, G]: each reward minus the mean of the others; zero for NaN, and where all are equal."""
    reward_BG = reward_BG.double()
    # NaN rewards are not counted as others.
    others_B1 = (reward_BG.isfinite().sum(1, keepdim=True) - 1).clamp(min=1)
    others_BG = (reward_BG.nansum(1, keepdim=True) - reward_BG) / others_B1
    return torch.where(has_equal_rewards(reward_BG), 0.0, (reward_BG - others_BG).nan_to_num(nan=0.0)).float()


class Distill(Algorithm[DistillConfig]):
    """On-policy distillation (Gu et al. 2023, arXiv 2306.08543; Agarwal et al. 2023, arXiv 2306.13649, reverse KL).

    Advantage: of every token, log (teacher / policy), the reverse KL divergence's at the tokens that the policy drew
    itself, without those to come; with `reward_coef`, plus GRPO's. Loss: clipped per token, mean over tokens; with
    `top_k`, the divergence over the teacher's most likely tokens is a term of the loss instead of the advantage. The
    teacher is the reference (`ref.path`, role `ref`) or a model beside it (`teacher_coef`, section and role `teacher`).
    """

    # Source of the advantage per token without discount: Lu et al. 2025,
    # https://thinkingmachines.ai/blog/on-policy-distillation.

    per_sample = True

    def __init__(self, config: DistillConfig, *, max_response_tokens: int, mask_truncated: bool) -> None:
        super().__init__(config, max_response_tokens=max_response_tokens, mask_truncated=mask_truncated)
        self.other_tokens = config.top_columns[0] if config.top_k else None

    @property
    def reads_reference(self) -> bool:
        config = self._config
        return config.kl_coef > 0 and (config.has_own_teacher or not config.top_k)

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        """Return `advantages`, one per drawn token, from `rewards`, `old_log_probs` and what the teacher gives
        them; with `top_k` one per row, from `rewards`."""
        config = self._config
        reward_BG = batch["rewards"].values.reshape(-1, group_size)
        group_N = config.reward_coef * group_advantages(reward_BG, eps=config.advantage_eps).flatten().double()
        if config.top_k:
            return {"advantages": Column.of_scalars(group_N.float())}
        length_N = batch["old_log_probs"].lengths
        apart_A = batch["old_log_probs"].values.double() - batch[config.teacher_column].values.double()
        apart_A = apart_A.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantage_A = -config.teacher_weight * apart_A + group_N.repeat_interleave(length_N.long())
        return {"advantages": Column(advantage_A.float(), length_N)}

    def loss(self, batch: PackedBatch, *, device: torch.device) -> MicroLoss:
        """Like `Algorithm.loss`, with the teacher's columns. With `top_k` these are its most likely tokens; the loss
        takes their log-probabilities under the policy as third argument."""
        config, loss = self._config, super().loss(batch, device=device)
        if not (config.top_k or config.has_own_teacher):  # `ref_log_probs` says how far the teacher is
            return loss
        assert isinstance(loss, PolicyLoss)
        name = config.top_columns[1] if config.top_k else config.teacher_column
        (log_probs,) = to_device([batch[name].values], device)
        if config.top_k:
            num_drawn = len(loss.rollout_log_probs_A)
            log_probs = log_probs.view(num_drawn, len(log_probs) // max(1, num_drawn))
        # Without `top_k` the divergence is in the advantages already, and here only measured.
        coef = config.teacher_weight if config.top_k else 0.0
        return replace(loss, teacher=Teacher(log_probs, coef, is_reference=not config.has_own_teacher))

    def _is_judged(self, batch: PackedBatch) -> Tensor:
        # The teacher judges every token; a reward is added if there is one.
        return has_reward(batch) | (batch[ROW_DRAWN].values > 0)


class SFT(Algorithm[SFTConfig]):
    """Supervised fine-tuning: cross entropy on the completions, or the assistant's messages, that the data hold.

    Loss: -log p, mean over the step's trained tokens, or per row and then over rows (`loss_normalization: sequence`).
    """

    per_sample = True

    def clips(self) -> tuple[Clip, ...]:
        return ()

    def advantages(self, batch: PackedBatch, *, group_size: int) -> Mapping[str, Column]:
        raise AssertionError("nothing is rewarded")

    def loss(self, batch: PackedBatch, *, device: torch.device) -> CrossEntropy:
        """Return the loss of a micro-batch: samples with, optionally, `loss_weights`, one per row."""
        (weight_A,) = to_device([self._token_weights(batch)], device)
        return CrossEntropy(weight_A)

    def _weights(self, batch: PackedBatch) -> Tensor:
        return loss_weights(batch)

    def _is_judged(self, batch: PackedBatch) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)
