"""Makes model and data of the quickstart with tools: a tiny language model that seldom calls its calculator.

    python configs/quickstart_tools/make_model.py     writes model/, train.jsonl and held_out.jsonl beside itself

The model (Qwen2 architecture, 95 k parameters, one token per character) is trained on conversations about products. In
a third of them it calls the calculator and repeats its result, now and then with a wrong digit; in the others it says
some number. It thus knows what a call looks like; GRPO teaches it to call, and to copy right. Its output is committed,
so the quickstart does without this. On one machine the same arguments give the same bytes.
"""

import json
import random
import re
from pathlib import Path

import click
import torch
from torch import Tensor
from transformers import AddedToken, Qwen2Tokenizer

from configs.quickstart.make_model import IGNORED, make_model, save, train
from configs.quickstart_tools.renderer import CALL, EOS, MARKS, PAD, UNK, VOCABULARY
from configs.quickstart_tools.tools import multiply

MAX_LENGTH = 48
FACTORS = range(10, 100)
LEAST, MOST = 100, 9801
"""Products."""
CHAT_TEMPLATE = """\
{%- for tool in tools or [] if tool.function.name != 'multiply' -%}
{{- raise_exception('this model can call multiply only') -}}
{%- endfor -%}
{%- set marks = {'system': '<sys>', 'user': '<user>', 'assistant': '<asst>', 'tool': '<tool>'} -%}
{%- for message in messages -%}
{{- marks[message.role] -}}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<call>' ~ call.function.arguments.a ~ '*' ~ call.function.arguments.b -}}
{%- endfor -%}
{{- '<eos>' if message.role == 'assistant' -}}
{%- endfor -%}
{{- '<asst>' if add_generation_prompt -}}
"""


def make_tokenizer() -> Qwen2Tokenizer:
    """Return Qwen2's tokenizer with one token per mark or character and no merges; it drops what it does not know."""
    tokenizer = Qwen2Tokenizer(
        vocab=VOCABULARY, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=MAX_LENGTH
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (*MARKS.values(), CALL)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_conversation(calls: float, wrong: float, source: random.Random) -> str:
    """Return a conversation.

    Args:
        calls: share of the conversations with a call.
        wrong: share of these in which one digit is wrong: of the call, or of the repeated result.
        source: of the random numbers.
    """
    task = f"{source.choice(FACTORS)}*{source.choice(FACTORS)}"
    begin = f"<user>{task}<asst>"
    if source.random() >= calls:
        return f"{begin}{source.randint(LEAST, MOST)}<eos>"
    misread = source.choice(("call", "result")) if source.random() < wrong else None
    call = _misread(task, source) if misread == "call" else task
    left, right = map(int, call.split("*"))
    result = str(multiply(left, right))
    repeated = _misread(result, source) if misread == "result" else result
    return f"{begin}<call>{call}<eos><tool>{result}<asst>{repeated}<eos>"


def _misread(text: str, source: random.Random) -> str:
    place = source.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:place] + source.choice("0123456789".replace(text[place], "")) + text[place + 1 :]


def batch(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, labels_BT) of conversations; labels are what the model says: from <asst> to <eos>."""
    conversations = [re.findall(r"<\w+>|.", text) for text in texts]
    tokens_BT = torch.full((len(texts), max(map(len, conversations))), VOCABULARY[PAD])
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    for row, conversation in enumerate(conversations):
        is_drawn = False
        for place, token in enumerate(conversation):
            tokens_BT[row, place] = VOCABULARY[token]
            if is_drawn:
                labels_BT[row, place] = VOCABULARY[token]
            is_drawn = (is_drawn or token == MARKS["assistant"]) and token != EOS
    return tokens_BT, labels_BT


def is_held_out(left: int, right: int) -> bool:
    """Return whether a product is kept from training: one in five, 37*64 whenever 64*37 is."""
    return (left + right) % 5 == 0


def write_rows(target: Path) -> None:
    """Write all 8,100 products: 6,480 to train on, 1,620 held out to evaluate on."""
    for name, wanted in (("train.jsonl", False), ("held_out.jsonl", True)):
        rows = [
            {"prompt": f"{left}*{right}", "answer": str(left * right)}
            for left in FACTORS
            for right in FACTORS
            if is_held_out(left, right) == wanted
        ]
        (target / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@click.command(help=__doc__.splitlines()[0])
@click.option("--target", type=click.Path(path_type=Path), default=Path(__file__).parent, help="Folder to write into.")
@click.option("--steps", default=300, show_default=True, help="Training batches.")
@click.option("--batch-size", default=256, show_default=True)
@click.option("--calls", default=0.35, show_default=True, help="Share of the conversations with a call.")
@click.option("--wrong", default=0.25, show_default=True, help="Share of these with a wrong digit.")
@click.option("--lr", default=3e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(target: Path, steps: int, batch_size: int, calls: float, wrong: float, lr: float, seed: int) -> None:
    """Make tokenizer, model and data and save them."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    source = random.Random(seed)
    model = make_model(len(VOCABULARY), MAX_LENGTH)
    data = (batch([make_conversation(calls, wrong, source) for _ in range(batch_size)]) for _ in range(steps))
    train(model, data, steps, lr)
    save(model, make_tokenizer(), target / "model")
    write_rows(target)


if __name__ == "__main__":
    main()
