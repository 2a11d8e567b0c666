"""Advantages and returns of every token, from the rewards of tokens and a critic's values. Pure.

The token y_t is the action in state s_t: the prompt and the answer's tokens before it. The answer's end is final, also
where it was cut: nothing is bootstrapped after it, since no value of what would follow exists.

Legend of shapes: N answers, A tokens of these answers, packed, R tokens of the longest answer.
"""

import torch
from torch import Tensor


def token_rewards(reward_N: Tensor, length_N: Tensor, penalty_A: Tensor | None = None) -> Tensor:
    """Return float64 [A]: an answer's reward at its last token, minus what each token costs.

    Args:
        reward_N: floating [N].
        length_N: integer [N], tokens of each answer; the reward of an answer without tokens is nobody's.
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
    """Return advantages and returns of every token.

        delta_t = r_t + gamma V(s_t+1) - V(s_t)         V after the last token is 0
        A_t     = delta_t + gamma lam A_t+1
        return  = A_t + V(s_t)                          the critic's target (TD(lambda))

    Args:
        reward_A: floating [A].
        value_A: floating [A], V(s_t), before the critic's update.
        length_N: integer [N], tokens of each answer.
        gamma: discount per token.
        lam: 0: one-step errors; 1: Monte Carlo.
    Returns:
        float32 [A] and float32 [A], computed in float64.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 11, 12 and 16.
    """
    length_N = length_N.long()
    answers, tokens = len(length_N), int(length_N.max()) if len(length_N) else 0
    real_NR = torch.arange(tokens) < length_N.unsqueeze(1)
    reward_NR, value_NR = (torch.zeros(answers, tokens, dtype=torch.float64) for _ in range(2))
    reward_NR[real_NR], value_NR[real_NR] = reward_A.double(), value_A.double()
    advantage_NR = torch.zeros_like(value_NR)
    next_value_N = next_advantage_N = torch.zeros(answers, dtype=torch.float64)
    for t in reversed(range(tokens)):
        delta_N = reward_NR[:, t] + gamma * next_value_N - value_NR[:, t]
        # Behind an answer's end all is 0: nothing of it reaches its tokens.
        next_advantage_N = torch.where(real_NR[:, t], delta_N + gamma * lam * next_advantage_N, 0.0)
        next_value_N = value_NR[:, t]
        advantage_NR[:, t] = next_advantage_N
    advantage_A = advantage_NR[real_NR]
    return advantage_A.float(), (advantage_A + value_A.double()).float()
