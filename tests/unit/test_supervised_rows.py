"""What SFT trains of a row, against what the text says."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

import configs
from asyncflow.errors import ConfigError
from tests.support.chat_templates import tokenizer as tokenizer_of_family
from workers.data.prompt_dataset import PromptDataset
from workers.data.prompt_rows import PromptRow, read_prompt_rows
from workers.data.supervised_rows import SupervisedTokens, check_supervised, token_borders
from workers.data.tokenizer import load_tokenizer
from workers.settings.data import DataConfig

QUICKSTART = Path(configs.__path__[0]) / "quickstart" / "model"
# The quickstart's tokenizer knows digits, + and =, and <eos>.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '=' + m.content + '<eos>' + '+' }}"
    "{% else %}{{ '+' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ '=' + m.content + '<eos>' + '+' }}", "{{ '=' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '<eos>+' }}"
)
FORGETS = PLAIN.replace("m.content + '<eos>'", "(m.content if loop.last else '7') + '<eos>'")
ENDLESS = PLAIN.replace(" + '<eos>' + '+'", "")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART, tmp_path / "model"))


def trained(
    model_dir: Path, row: dict[str, Any], template: str = "", *, checked: bool = False, **settings: Any
) -> tuple[str, list[str]]:
    """Return the text of a row's tokens, and the pieces of it that are trained, with their end tokens.

    `checked`: by the checks before a start as well, which take a process.
    """
    if template:
        (model_dir / "chat_template.jinja").write_text(template)
    file = model_dir / "rows.jsonl"
    file.write_text(json.dumps(row))
    config = DataConfig.model_validate({"path": str(file), "chat_template": bool(template), **settings})
    rows = read_prompt_rows(file, config)
    if checked:
        check_supervised(rows, config, model_dir=model_dir)
    prompt = PromptDataset(rows, config, model_dir=model_dir, seed=0).prompt_at(0)
    assert prompt.mask is not None
    assert prompt.mask.shape == prompt.tokens.shape
    tokenizer = load_tokenizer(model_dir)
    pieces, before = [""], 0
    for token, counts in zip(prompt.tokens.tolist(), prompt.mask.tolist(), strict=True):
        if counts:
            pieces[-1:] = [*([pieces[-1]] if before else [pieces[-1], ""] if pieces[-1] else [""])]
            pieces[-1] += tokenizer.convert_ids_to_tokens(token)
        before = counts
    return tokenizer.decode(prompt.tokens), pieces


def test_a_completion_is_trained_with_an_end_and_its_prompt_is_not(model_dir: Path) -> None:
    row = {"question": "3+5=", "answer": "8"}
    text, pieces = trained(model_dir, row, prompt_field="question", completion_field="answer")
    assert (text, pieces) == ("3+5=8<eos>", ["8<eos>"])


def test_an_end_that_the_completion_has_is_not_doubled(model_dir: Path) -> None:
    text, pieces = trained(model_dir, {"prompt": "3+5=", "completion": "8<eos>"}, completion_field="completion")
    assert (text, pieces) == ("3+5=8<eos>", ["8<eos>"])


def test_what_stands_in_for_the_template_or_is_left_out_is_told_before_a_start(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Special tokens in a message's text would be learned as if the template had written them."""
    (model_dir / "chat_template.jinja").write_text(PLAIN)
    talks = [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": said}] for said in ("2", "2<eos>+3")]
    file = model_dir / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [*talks, [*talks[0] * 9]]))
    settings = {"path": str(file), "chat_template": True, "completion_field": "messages", "max_prompt_tokens": 20}
    config = DataConfig.model_validate(settings)
    check_supervised(read_prompt_rows(file, config), config, model_dir=model_dir)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2 and "1 of 3 rows are longer than data.max_prompt_tokens = 20 and are left out" in told[1]
    assert "messages of 1 of the first 3 rows hold special tokens" in told[0] and "rows.jsonl:2 first" in told[0]
    assert told[0].endswith("and learns to write those of the assistant")


CONVERSATION = [
    {"role": "user", "content": "3+5"},
    {"role": "assistant", "content": "8"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_every_assistants_message_of_a_conversation_is_trained_with_its_end(model_dir: Path, template: str) -> None:
    text, pieces = trained(model_dir, {"messages": CONVERSATION}, template, completion_field="messages")
    assert text == "+3+5=8<eos>++1+1=2<eos>+"
    assert pieces == ["8<eos>", "2<eos>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("completion", ["2", CONVERSATION[3:]])
def test_after_a_prompt_of_messages_only_the_completion_is_trained(
    model_dir: Path, template: str, completion: object
) -> None:
    row = {"prompt": CONVERSATION[:3], "completion": completion}
    assert trained(model_dir, row, template, completion_field="completion")[1] == ["2<eos>"]


def test_a_conversation_may_begin_with_a_greeting_and_a_text_beside_it_is_not_guessed_at(model_dir: Path) -> None:
    talk = [{"role": "assistant", "content": "7"}, *CONVERSATION[:2]]
    text, pieces = trained(model_dir, {"messages": talk}, PLAIN, completion_field="messages")
    assert text.startswith("=7<eos>+") and pieces == ["7<eos>", "8<eos>"]
    with pytest.raises(ConfigError, match="whether that comes before cannot be told; set data.prompt_field"):
        trained(model_dir, {"messages": talk, "prompt": "summary"}, PLAIN, completion_field="messages")
    row = {"messages": talk, "prompt": [{"role": "user", "content": "3"}]}
    assert trained(model_dir, row, PLAIN, completion_field="messages")[0].startswith("+3=7<eos>")


def test_a_text_prompt_becomes_the_users_message(model_dir: Path) -> None:
    text, pieces = trained(model_dir, {"prompt": "3+5", "answer": "8"}, PLAIN, completion_field="answer")
    assert (text, pieces) == ("+3+5=8<eos>+", ["8<eos>"])


def test_a_template_without_an_end_gets_one_behind_the_last_message(model_dir: Path) -> None:
    text, pieces = trained(model_dir, {"prompt": "3+5", "answer": "8"}, ENDLESS, completion_field="answer")
    assert (text, pieces) == ("+3+5=8<eos>", ["8<eos>"])


def test_a_template_that_writes_earlier_messages_differently_is_refused_and_a_last_one_is_not(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 in another way up to '8' than as a whole.*generation"):
        trained(model_dir, {"messages": CONVERSATION}, FORGETS, completion_field="messages")
    row = {"prompt": CONVERSATION[:3], "completion": "2"}
    assert trained(model_dir, row, FORGETS, completion_field="completion")[1] == ["2<eos>"]


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is six times seven?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Thanks\n"},
    {"role": "assistant", "content": "At your service, <b>42</b>\ntimes."},
]


@pytest.mark.parametrize(
    ("family", "end", "replies"),
    [
        ("qwen2.5", "<|im_end|>", ["It is 42.", "At your service, <b>42</b>\ntimes."]),
        ("smollm2", "<|im_end|>", ["It is 42.", "At your service, <b>42</b>\ntimes."]),
        ("llama3", "<|eot_id|>", ["It is 42.", "At your service, <b>42</b>\ntimes."]),
        ("mistral", "</s>", [" It is 42.", " At your service, <b>42</b>\ntimes."]),
    ],
)
def test_published_templates_tell_the_assistants_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, end: str, replies: list[str]
) -> None:
    tokenizer = tokenizer_of_family(family)
    monkeypatch.setattr(
        "workers.data.supervised_rows.eos_token_ids", lambda path: (tokenizer.convert_tokens_to_ids(end),)
    )
    config = DataConfig(path="rows.jsonl", chat_template=True, completion_field="messages")
    talk = TALK[1:] if family == "mistral" else TALK  # (it writes a system message into the last question)
    row = SupervisedTokens(config, model_dir=QUICKSTART, tokenizer=tokenizer).tokenize_row(
        PromptRow([], "", 1, completion=talk)
    )
    assert row.mask is not None
    assert tokenizer.decode([t for t, counts in zip(row.tokens, row.mask, strict=True) if counts]) == "".join(
        reply + end for reply in replies
    )
    assert row.text == tokenizer.apply_chat_template(talk, tokenize=False)


BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "answer", ["It is 42.", "bye \U0001fabf", "hello ", "  hello", "\n\nTwo", "\u597d\u7684\u9f98", ""]
)
def test_a_block_is_trained_to_its_last_byte_and_with_its_end_whatever_it_holds(
    monkeypatch: pytest.MonkeyPatch, answer: str, *, given: bool, trims: bool
) -> None:
    """Tokens of a byte each have no character of their own, and some tokenizers leave spaces out of a token's place."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(tokenizer_of_family("smollm2", BLOCKS))
    if trims:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    monkeypatch.setattr("workers.data.supervised_rows.eos_token_ids", lambda path: (end,))
    talk = [{"role": "user", "content": "42?"}, {"role": "assistant", "content": answer}] * 2
    row = PromptRow(talk[:3], "", 1, completion=talk[3:]) if given else PromptRow([], "", 1, completion=talk)
    config = DataConfig(path="rows.jsonl", chat_template=True, completion_field="messages")
    made = SupervisedTokens(config, model_dir=QUICKSTART, tokenizer=tokenizer).tokenize_row(row)
    assert made.mask is not None
    found = [token for token, counts in zip(made.tokens, made.mask, strict=True) if counts]
    assert tokenizer.decode(found) == f"{answer}<|im_end|>" * (1 if given else 2)
    assert tokenizer.decode(made.tokens) == tokenizer.apply_chat_template(talk, tokenize=False)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}={% if 'tool_calls' in m %}({{ m.tool_calls[0].function.name }}){% endif %}"
    "{{ m.content }}<eos>{% else %}+{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.mark.parametrize("call", [{}, {"content": None}, {"content": None, "name": None}])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_calls_of_tools_need_no_content_and_see_the_tools(model_dir: Path, call: dict[str, Any], tools: object) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]
    talk = [
        {"role": "user", "content": "3+5", "tool_calls": None},
        {"role": "assistant", "tool_calls": calls, **call},
        {"role": "tool", "name": "add", "content": "8"},
        {"role": "assistant", "content": "8", "tool_calls": None},
    ]
    file = model_dir / "rows.jsonl"
    file.write_text(json.dumps({"messages": talk, "tools": tools}))
    (model_dir / "chat_template.jinja").write_text(CALLS)
    config = DataConfig(path=str(file), chat_template=True, completion_field="messages")
    tokens = SupervisedTokens(config, model_dir=model_dir, tokenizer=load_tokenizer(model_dir))
    text = tokens.tokenize_row(read_prompt_rows(file, config)[0]).text
    assert text == "[add]+3+5=(add)<eos>+8=8<eos>"


def test_tools_that_are_torn_json_are_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="rows.jsonl:1: 'tools' is not a JSON list"):
        trained(model_dir, {"messages": CONVERSATION, "tools": '[{"type"'}, PLAIN, completion_field="messages")


@pytest.mark.parametrize("tools", ['{"type": "function"}', "{nope", {"type": "function"}])
def test_tools_that_are_no_list_are_refused(model_dir: Path, tools: object) -> None:
    with pytest.raises(ConfigError, match="rows.jsonl:1: 'tools' is not a JSON list|'tools' is {.*}, and not a list"):
        trained(model_dir, {"messages": CONVERSATION, "tools": tools}, PLAIN, completion_field="messages")


@pytest.mark.parametrize(
    ("row", "template", "complaint"),
    [
        ({"prompt": "1+1="}, "", "no field 'completion'; found: prompt; set data.completion_field"),
        ({"prompt": "1+1=", "completion": ""}, "", "'completion' is empty, so nothing is trained"),
        ({"prompt": "1+1=", "completion": 2}, "", "'completion' is a number"),
        ({"completion": "2"}, "", "no field 'prompt'"),
        ({"completion": CONVERSATION[:1]}, PLAIN, "no message of the assistant"),
        ({"completion": CONVERSATION}, "", "is a list .of messages.; set data.chat_template to true"),
        ({"completion": CONVERSATION}, "{{ raise_exception('no') }}", "the chat template of .* fails: no"),
    ],
)
def test_what_cannot_be_trained_is_named_by_its_line(
    model_dir: Path, row: dict[str, Any], template: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        trained(model_dir, row, template, completion_field="completion")
    assert "rows.jsonl:1" in str(caught.value)


def test_a_conversation_takes_no_template_of_a_prompt(model_dir: Path) -> None:
    row, settings = {"messages": CONVERSATION}, {"completion_field": "messages", "prompt_template": "So: {prompt}"}
    with pytest.raises(ConfigError, match="rows.jsonl:1: 'messages' is a whole conversation, which data.prompt_templ"):
        trained(model_dir, row, PLAIN, **settings)


def test_a_template_that_renders_at_random_is_refused(model_dir: Path) -> None:
    template = PLAIN.replace("'+' + m.content", "'+' ~ (range(99999) | random)")
    with pytest.raises(ConfigError, match=r"renders .*rows.jsonl:1 differently each time|rows.jsonl:1 in another way"):
        trained(model_dir, {"messages": CONVERSATION}, template, completion_field="messages", checked=True)


@pytest.mark.parametrize("row", [{"prompt": "3+5=", "completion": "eight"}, {"prompt": "sum=", "completion": "8"}])
def test_a_row_that_the_tokenizer_cannot_write_is_refused(model_dir: Path, row: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer of .* loses \d of the \d characters of .*rows.jsonl:1"):
        trained(model_dir, row, completion_field="completion", checked=True)


def test_a_row_with_two_begins_of_text_is_refused() -> None:
    tokenizer = tokenizer_of_family("mistral")
    config = DataConfig(path="rows.jsonl", completion_field="completion")
    row = PromptRow("<s><s>3+5=", "", 1, completion="8")
    tokens = SupervisedTokens(config, model_dir=QUICKSTART, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="rows.jsonl:1: begins with two <s>"):
        tokens.tokenize_row(row)


def test_rows_with_their_completions_are_as_long_as_the_limit_says(model_dir: Path) -> None:
    row = {"prompt": "3+5=", "completion": "8"}
    trained(model_dir, row, completion_field="completion", max_prompt_tokens=6, overlong="reject")
    with pytest.raises(ConfigError, match="the row has 6 tokens"):
        trained(model_dir, row, completion_field="completion", max_prompt_tokens=5, overlong="reject", checked=True)
    with pytest.raises(ConfigError, match="the only row of .* is longer than 5 tokens; raise it"):
        trained(model_dir, row, completion_field="completion", max_prompt_tokens=5)


def test_a_row_beyond_the_tokenizers_limit_is_told_by_our_checks_alone(
    model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    file = model_dir / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 3}))
    text, _ = trained(model_dir, {"prompt": "3+5=", "completion": "8"}, completion_field="completion")
    assert text == "3+5=8<eos>" and not caplog.records


@pytest.mark.parametrize(
    ("offsets", "borders", "found"),
    [
        ([(0, 2), (2, 5)], [0, 2, 5], {0: 0, 2: 1, 5: 2}),
        ([(0, 0), (0, 2), (2, 5), (0, 0)], [0, 2, 5], {0: 1, 2: 2, 5: 3}),  # with tokens that the tokenizer adds
        ([(0, 2), (3, 5)], [2], {2: 1}),  # a byte-level token without its space
        ([(0, 2), (3, 5)], [3], None),  # the space of that token is before the border
        ([(0, 2), (2, 3), (3, 5)], [3], {3: 2}),
        ([(0, 1), (1, 2), (1, 2), (2, 3)], [1, 2], {1: 1, 2: 3}),  # two tokens of one character
        ([(0, 3), (3, 5)], [2], None),
        ([], [0], {0: 0}),
    ],
)
def test_tokens_before_a_border(
    offsets: list[tuple[int, int]], borders: list[int], found: dict[int, int] | None
) -> None:
    assert token_borders(offsets, borders) == found
