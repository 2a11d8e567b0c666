"""How a rank's rows of a round are cut into micro-batches. Pure.

By number: runs of `micro_batch_size` rows. By tokens: as few as fit a budget; a group that fits stays whole, so that
its prompt is computed once, and one that does not is cut, which computes the prompt once for each part:

    budget 20, prompt 8, answers 2 9 4 3      one part would have 26 tokens: (2 4) with 14, (9 3) with 20

Under `tq.policy: token-budget` a round has no more tokens than a micro-batch may have; longer groups alone are cut.
Neither changes the gradient: the loss is a sum over tokens, and scaled once for the whole update.
"""

from collections.abc import Sequence

from tq.balance import split_by_tokens
from tq.batch import PackedBatch
from workers.config import ActorConfig


def micro_batches(batch: PackedBatch, config: ActorConfig) -> list[Sequence[int]]:
    """Return the positions of rows in each micro-batch, every row once.

    Args:
        batch: columns `prompts` and `responses`, N >= 0 rows.
        config: of the actor.
    """
    if not len(batch):
        return []
    if not config.max_tokens_per_micro_batch:
        size = config.micro_batch_size
        return [range(start, min(start + size, len(batch))) for start in range(0, len(batch), size)]
    prompts = [prompt.numpy().tobytes() for prompt in batch["prompts"].rows()]
    lengths = list(zip(batch["prompts"].lengths.tolist(), batch["responses"].lengths.tolist(), strict=True))
    if not config.shared_prompt:
        return [*split_by_tokens([sum(pair) for pair in lengths], config.max_tokens_per_micro_batch)]
    return [*_with_shared_prompts(prompts, lengths, config.max_tokens_per_micro_batch)]


def _with_shared_prompts(prompts: Sequence[bytes], lengths: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Put whole groups, or parts of those that do not fit, into micro-batches."""
    groups: dict[bytes, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(position)
    parts, tokens = [], []
    for rows in groups.values():
        prompt_tokens = lengths[rows[0]][0]
        answers = [lengths[row][1] for row in rows]
        whole = prompt_tokens + sum(answers) <= budget
        cuts = [list(range(len(rows)))] if whole else split_by_tokens(answers, max(1, budget - prompt_tokens))
        for cut in cuts:
            parts.append([rows[place] for place in cut])
            tokens.append(prompt_tokens + sum(answers[place] for place in cut))
    return [sorted(row for part in together for row in parts[part]) for together in split_by_tokens(tokens, budget)]
