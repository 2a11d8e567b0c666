"""Advantages: how much better a response, or a token of it, is than its alternatives. Pure.

Responses are compared inside their group, or tokens with what a critic expected of them. A KL penalty inside the reward
is log (policy / reference), both as the trainer computes them: the generating engine rounds differently, and summed
over a response that would count as divergence.

Legend of shapes: B prompts, G responses of each, N samples, A drawn tokens of these, packed, R those of the longest.
"""

import torch
from torch import Tensor

from tq.columns import PackedBatch
from workers.algorithms.parts import response_sums


def group_advantages(reward_BG: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Center the rewards of each prompt's responses and, by default, scale them.

    Computed in float64, so that rounding of a mean is never divided by `eps`.

    Args:
        reward_BG: floating [B, G]; NaN where a response has none; the group is then the other responses. A single
            reward has nothing to be compared with, so all is zero.
        scale_by_std: divide by the group's sample standard deviation (Bessel's correction, as TRL and verl do).
        eps: added to the deviation.
    Returns:
        float32 [B, G], mean 0 over G; zeros for a group of equal rewards, and where there is none.
    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; without scaling Liu et al. 2025 (arXiv 2503.20783),
        section 3.2 (Dr. GRPO).
    """
    assert reward_BG.dim() == 2 and reward_BG.shape[1], f"no group: rewards of shape {tuple(reward_BG.shape)}"
    reward_BG = reward_BG.double()
    number_B1 = reward_BG.isfinite().sum(1, keepdim=True)
    centered_BG = (reward_BG - reward_BG.nanmean(1, keepdim=True)).nan_to_num(nan=0.0)
    if scale_by_std:
        variance_B1 = centered_BG.square().sum(1, keepdim=True) / (number_B1 - 1).clamp(min=1)
        centered_BG = centered_BG / (variance_B1.sqrt() + eps)
    return torch.where(has_equal_rewards(reward_BG), 0.0, centered_BG).float()


def has_equal_rewards(reward_BG: Tensor) -> Tensor:
    """Return bool [B, 1]: whether all rewards of a group are the same; those that are NaN are none."""
    return reward_BG.nan_to_num(nan=-torch.inf).amax(1, keepdim=True) <= reward_BG.nan_to_num(nan=torch.inf).amin(
        1, keepdim=True
    )


def token_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [A]: log (policy / reference) at each token (k1), from `old_log_probs`, `ref_log_probs`."""
    return batch["old_log_probs"].values.double() - batch["ref_log_probs"].values.double()


def response_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [N]: the sum over each row's tokens."""
    return response_sums(token_penalties(batch), batch["old_log_probs"].lengths.long())


def penalties_to_come(batch: PackedBatch, length_N: Tensor) -> Tensor:
    """Return float64 [A]: the sum from each token to the end of its sample, of the N that have `length_N` tokens."""
    length_N = length_N.long()
    penalty_A = token_penalties(batch)
    before_A = penalty_A.cumsum(0) - penalty_A
    ends_N = length_N.cumsum(0)
    total_N = response_sums(penalty_A, length_N)
    starts_N = (ends_N - length_N)[length_N > 0]
    begun_A = before_A[starts_N].repeat_interleave(length_N[length_N > 0])
    return total_N.repeat_interleave(length_N) - (before_A - begun_A)


def token_rewards(reward_N: Tensor, length_N: Tensor, penalty_A: Tensor | None = None) -> Tensor:
    """Return float64 [A]: a sample's reward at its last drawn token, minus what each token costs.

    Args:
        reward_N: floating [N].
        length_N: integer [N], drawn tokens of each sample; the reward of one without any is dropped.
        penalty_A: floating [A], of each token, e.g. `kl_coef * (log policy - log reference)`
            (Ouyang et al. 2022, arXiv 2203.02155, eq. 2); None: there is none.
    """
    length_N = length_N.long()
    reward_A = torch.zeros(int(length_N.sum()), dtype=torch.float64)
    last_N = length_N.cumsum(0) - 1
    reward_A[last_N[length_N > 0]] = reward_N.double()[length_N > 0]
    return reward_A if penalty_A is None else reward_A - penalty_A.double()


def generalized_advantages(
    reward_A: Tensor, value_A: Tensor, length_N: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of every token, from the rewards of tokens and a critic's values.

    The drawn token y_t is the action in state s_t: all tokens of the sample before it. What the policy did not draw
    (observations) is no action, so s_t+1 is the state of the next drawn token. The last one is final, also where the
    sample was cut: nothing is bootstrapped after it, since no value of what would follow exists.

        delta_t = r_t + gamma V(s_t+1) - V(s_t)         V after the last token is 0
        A_t     = delta_t + gamma lam A_t+1
        return  = A_t + V(s_t)                          the critic's target (TD(lambda))

    Args:
        reward_A: floating [A].
        value_A: floating [A], V(s_t), before the critic's update.
        length_N: integer [N], drawn tokens of each sample.
        gamma: discount per token.
        lam: 0: one-step errors; 1: Monte Carlo.
    Returns:
        float32 [A] and float32 [A], computed in float64.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 11, 12 and 16.
    """
    length_N = length_N.long()
    responses, tokens = len(length_N), int(length_N.max()) if len(length_N) else 0
    real_NR = torch.arange(tokens) < length_N.unsqueeze(1)
    reward_NR, value_NR = (torch.zeros(responses, tokens, dtype=torch.float64) for _ in range(2))
    reward_NR[real_NR], value_NR[real_NR] = reward_A.double(), value_A.double()
    advantage_NR = torch.zeros_like(value_NR)
    next_value_N = next_advantage_N = torch.zeros(responses, dtype=torch.float64)
    for t in reversed(range(tokens)):
        delta_N = reward_NR[:, t] + gamma * next_value_N - value_NR[:, t]
        # Behind a response's end all is 0: nothing of it reaches its tokens.
        next_advantage_N = torch.where(real_NR[:, t], delta_N + gamma * lam * next_advantage_N, 0.0)
        next_value_N = value_NR[:, t]
        advantage_NR[:, t] = next_advantage_N
    advantage_A = advantage_NR[real_NR]
    return advantage_A.float(), (advantage_A + value_A.double()).float()
