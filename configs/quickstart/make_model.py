"""Makes the quickstart's model and data: a tiny language model that is bad at one-digit sums, for GRPO to repair.

    python configs/quickstart/make_model.py       writes configs/quickstart/{model/,train.jsonl,held_out.jsonl}

The model (Qwen2 architecture, 100 k parameters, one token per character) is trained on sums most of whose answers are
drawn at random. It thus knows what a response looks like, and is right about one time in three. Its output is
committed, so the quickstart does without this. On one machine the same arguments give the same bytes.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "+-=0123456789"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, UNK, *CHARACTERS))}
MAX_LENGTH = 16
NUM_ANSWERS = 19
"""Sums of two digits are 0 to 18."""
IGNORED = -100
"""Label of a position that has no loss."""


def make_tokenizer() -> Qwen2Tokenizer:
    """Return Qwen2's tokenizer with one token per character and no merges; it drops what it does not know."""
    return Qwen2Tokenizer(
        vocab=VOCABULARY, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=MAX_LENGTH
    )


def make_model(num_tokens: int = len(VOCABULARY), max_length: int = MAX_LENGTH) -> Qwen2ForCausalLM:
    """Return the untrained model; its weights follow from torch's global seed."""
    config = Qwen2Config(
        vocab_size=num_tokens,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        eos_token_id=VOCABULARY[EOS],
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def encode(text: str) -> list[int]:
    """Return the tokens of characters that the tokenizer knows."""
    return [VOCABULARY[character] for character in text]


def batches(
    num_steps: int, batch_size: int, wrong: float, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, labels_BT) of sums; a share `wrong` of the answers is drawn uniformly from all answers."""
    endings = torch.full((NUM_ANSWERS, 3), VOCABULARY[PAD])
    for answer in range(NUM_ANSWERS):
        ending = [*encode(str(answer)), VOCABULARY[EOS]]
        endings[answer, : len(ending)] = torch.tensor(ending)
    digits = torch.tensor(encode("0123456789"))
    for _ in range(num_steps):
        left, right = torch.randint(10, (2, batch_size), generator=generator)
        guess = torch.randint(NUM_ANSWERS, (batch_size,), generator=generator)
        answer_B = torch.where(torch.rand(batch_size, generator=generator) < wrong, guess, left + right)
        plus, equals = (torch.full_like(left, VOCABULARY[sign]) for sign in "+=")
        prompts = torch.stack([digits[left], plus, digits[right], equals], dim=1)
        tokens = torch.cat([prompts, endings[answer_B]], dim=1)
        labels = tokens.masked_fill(tokens == VOCABULARY[PAD], IGNORED)
        labels[:, : prompts.shape[1]] = IGNORED
        yield tokens, labels


def train(model: Qwen2ForCausalLM, data: Iterator[tuple[Tensor, Tensor]], num_steps: int, lr: float) -> None:
    """Train on the next token where there is a label; the learning rate falls linearly to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    for tokens, labels in data:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    """Write what `transformers` loads, and say how large it is."""
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)
    click.echo(f"{sum(p.numel() for p in model.parameters())} parameters in {os.path.relpath(directory)}")


def is_held_out(left: int, right: int) -> bool:
    """Return whether a sum is kept from training: one in five, among them every digit twice on each side."""
    return (3 * left + right) % 5 == 0


def write_rows(target: Path) -> None:
    """Write all 100 sums: 80 to train on, 20 held out to evaluate on."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    for name, wanted in (("train.jsonl", False), ("held_out.jsonl", True)):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums if is_held_out(a, b) == wanted]
        (target / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@click.command(help=__doc__.splitlines()[0])
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Folder to write into.")
@click.option("--steps", default=300, show_default=True, help="Training batches.")
@click.option("--batch-size", default=256, show_default=True)
@click.option("--wrong", default=0.7, show_default=True, help="Share of the answers that is drawn at random.")
@click.option("--lr", default=3e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(target: Path, steps: int, batch_size: int, wrong: float, lr: float, seed: int) -> None:
    """Make tokenizer, model and data and save them."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make_model()
    train(model, batches(steps, batch_size, wrong, torch.Generator().manual_seed(seed)), steps, lr)
    save(model, make_tokenizer(), target / "model")
    write_rows(target)


if __name__ == "__main__":
    main()
