"""Makes the quickstart's reward model: a tiny model that prefers right sums to wrong ones.

    python configs/quickstart/make_reward_model.py       writes configs/quickstart/reward_model/

The model (Qwen2 architecture with a head of one number, 94 k parameters) is trained on pairs: the right answer to a sum
of the training data, and another text, by the loss of Bradley and Terry (Ouyang et al. 2022, arXiv 2203.02155, eq. 1).
Its output is committed: nobody needs to run this. On one machine the same arguments give the same bytes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import Qwen2ForSequenceClassification

from configs.quickstart.make_model import (
    EOS,
    NUM_ANSWERS,
    PAD,
    VOCABULARY,
    encode,
    is_held_out,
    make_model,
    make_tokenizer,
)

LONGEST = 4
"""Tokens of a response, as in the quickstart."""


def make_reward_model() -> Qwen2ForSequenceClassification:
    """Return the untrained model; its weights follow from torch's global seed."""
    config = make_model().config
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config)


def sums() -> Tensor:
    """Return int64 [80, 2]: the sums to train on."""
    return torch.tensor([(a, b) for a in range(10) for b in range(10) if not is_held_out(a, b)])


def response_tokens(text: str) -> list[int]:
    """Return a response as the policy would give it: it ends, or is cut, and the rest is padding."""
    tokens = [*encode(text), VOCABULARY[EOS]][:LONGEST]
    return tokens + [VOCABULARY[PAD]] * (LONGEST - len(tokens))


def pairs(num_steps: int, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (right_BT, wrong_BT): a right answer to a sum and a wrong one, which half of the time is not a number."""
    known, numbers = sums(), torch.tensor([response_tokens(str(answer)) for answer in range(NUM_ANSWERS)])
    digits = torch.tensor(encode("0123456789"))
    for _ in range(num_steps):
        chosen_B2 = known[torch.randint(len(known), (batch_size,), generator=generator)]
        total_B = chosen_B2.sum(1)
        plus, equals = (torch.full((batch_size,), VOCABULARY[sign]) for sign in "+=")
        prompt = torch.stack([digits[chosen_B2[:, 0]], plus, digits[chosen_B2[:, 1]], equals], dim=1)
        other_B = (total_B + torch.randint(1, NUM_ANSWERS, (batch_size,), generator=generator)) % NUM_ANSWERS
        wrong = torch.where(
            torch.rand(batch_size, 1, generator=generator) < 0.5,
            numbers[other_B],
            _scribbles(batch_size, generator),
        )
        is_right = (wrong == numbers[total_B]).all(1, keepdim=True)
        wrong = torch.where(is_right, numbers[other_B], wrong)
        yield torch.cat([prompt, numbers[total_B]], dim=1), torch.cat([prompt, wrong], dim=1)


def _scribbles(batch_size: int, generator: torch.Generator) -> Tensor:
    """Return int64 [B, LONGEST] of any tokens; most of them end early, and nothing follows an end."""
    tokens = torch.randint(VOCABULARY[EOS], len(VOCABULARY), (batch_size, LONGEST), generator=generator)
    tokens[torch.rand(batch_size, LONGEST, generator=generator) < 0.3] = VOCABULARY[EOS]
    ended = (tokens == VOCABULARY[EOS]).cumsum(1) - (tokens == VOCABULARY[EOS]).long() > 0
    return tokens.masked_fill(ended, VOCABULARY[PAD])


def train(model: Qwen2ForSequenceClassification, data: Iterator[tuple[Tensor, Tensor]], steps: int, lr: float) -> None:
    """Train on pairs; the learning rate falls linearly to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for right, wrong in data:
        right_B, wrong_B = model(input_ids=torch.cat([right, wrong]), use_cache=False).logits[:, 0].chunk(2)
        loss = -logsigmoid(right_B - wrong_B).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@click.command(help=__doc__.splitlines()[0])
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Folder to write into.")
@click.option("--steps", default=600, show_default=True, help="Training batches.")
@click.option("--batch-size", default=128, show_default=True, help="Pairs of a batch.")
@click.option("--lr", default=3e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(target: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Make the model and save it with the policy's tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make_reward_model()
    train(model, pairs(steps, batch_size, torch.Generator().manual_seed(seed)), steps, lr)
    directory = target / "reward_model"
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)
    click.echo(f"{sum(p.numel() for p in model.parameters())} parameters in {os.path.relpath(directory)}")


if __name__ == "__main__":
    main()
