"""The KL penalty as part of the reward: log-probability under the policy that the step found minus the reference's.

Both are the trainer's. Summed over an answer, what the generating engine rounds otherwise would count as divergence.

Legend of shapes: N answers, A tokens of the answers, packed.
"""

from torch import Tensor

from tq.batch import PackedBatch
from workers.algorithms.off_policy import answer_sums


def token_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [A]: log (policy / reference) at each token (k1), from `log_probs`, `ref_log_probs`."""
    return batch["log_probs"].values.double() - batch["ref_log_probs"].values.double()


def answer_penalties(batch: PackedBatch) -> Tensor:
    """Return float64 [N]: the sum over each answer's tokens."""
    return answer_sums(token_penalties(batch), batch["log_probs"].lengths.long())


def penalties_to_come(batch: PackedBatch) -> Tensor:
    """Return float64 [A]: the sum from each token to the end of its answer."""
    length_N = batch["log_probs"].lengths.long()
    penalty_A = token_penalties(batch)
    before_A = penalty_A.cumsum(0) - penalty_A
    ends_N = length_N.cumsum(0)
    total_N = answer_sums(penalty_A, length_N)
    starts_N = (ends_N - length_N)[length_N > 0]
    begun_A = before_A[starts_N].repeat_interleave(length_N[length_N > 0])
    return total_N.repeat_interleave(length_N) - (before_A - begun_A)
