"""What is refused before a run starts is what its prompts would be refused for."""

import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest

import configs
from asyncflow.errors import ConfigError
from workers.data.config import DataConfig
from workers.data.prompt_check import ShownPrompt, check_prompts
from workers.data.prompt_dataset import PromptDataset
from workers.data.prompt_rows import PromptRow
from workers.data.tokenizer import ModelTokenizer, load_tokenizer

QUICKSTART = Path(configs.__path__[0]) / "quickstart" / "model"
ROWS = [PromptRow(f"{i}+{i}=", str(2 * i), i + 1) for i in range(5)]
LONG = PromptRow("1+1+1=", "3", 6)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ 'Be good.' }}{% endif %}\n"
    "    {%- generation %}{{ bos_token }}{{ message['role'] + '\n' + message.content | trim }}{% endgeneration %}"
    "{{ eos_token }}{% if loop.index > 99 %}{% break %}{% endif %}{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART, tmp_path / "model"))


def edit_settings(model_dir: Path, **changes: object) -> None:
    file = model_dir / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_config(model_dir: Path, **changes: object) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def data(**settings: Any) -> DataConfig:
    return DataConfig.model_validate({"path": "rows.jsonl", **settings})


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (ROWS, {}),
        ([*ROWS, LONG], {"max_prompt_tokens": 4}),
        ([*ROWS, LONG], {"max_prompt_tokens": 4, "overlong": "reject"}),
        (ROWS, {"max_prompt_tokens": 3}),
        (ROWS, {"prompt_template": "1+{prompt}", "max_prompt_tokens": 6, "overlong": "reject"}),
        (ROWS, {"prompt_template": "1+{prompt}", "max_prompt_tokens": 5, "overlong": "reject"}),
        ([PromptRow("words", "1", 1)], {}),
        (ROWS, {"chat_template": True}),
    ],
)
def test_check_and_data_set_refuse_the_same(rows: list[PromptRow], settings: dict[str, Any]) -> None:
    def refusal(build: Any) -> str:
        try:
            build()
        except ConfigError as error:
            return str(error)
        return ""

    config = data(**settings)
    expected = refusal(lambda: PromptDataset(rows, config, model_dir=QUICKSTART, seed=0))
    assert refusal(lambda: check_prompts(rows, config, model_dir=QUICKSTART)) == expected


def test_prompt_of_another_chunk_is_rejected_by_line() -> None:
    rows = [PromptRow("1+1=", "2", line) for line in range(1, 1000)]
    rows[700] = PromptRow("1+1+1=", "3", 701)
    with pytest.raises(ConfigError, match=r"rows.jsonl:701: the prompt has 6 tokens"):
        check_prompts(rows, data(max_prompt_tokens=4, overlong="reject"), model_dir=QUICKSTART)


def test_a_sampler_is_told_of_the_prompts_that_are_left() -> None:
    rows = [PromptRow("1+1+1=" if line % 5 == 0 else "1+1=", "2", line) for line in range(1, 1001)]
    sampled = data(max_prompt_tokens=4, sampler="own:Sampler")
    kept = check_prompts(rows, sampled, model_dir=QUICKSTART).num_kept
    assert kept == 800 == len(PromptDataset(rows, sampled, model_dir=QUICKSTART, seed=0))


def test_chat_template_counts(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}1111")
    check_prompts(ROWS, data(chat_template=True, overlong="reject", max_prompt_tokens=8), model_dir=model_dir)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the prompt has 8 tokens"):
        check_prompts(ROWS, data(chat_template=True, overlong="reject", max_prompt_tokens=7), model_dir=model_dir)


def test_limits_in_the_tokenizer_do_not_hide_the_length(model_dir: Path) -> None:
    file = model_dir / "tokenizer.json"
    limit = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": limit}))
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the prompt has 4 tokens"):
        check_prompts(ROWS, data(overlong="reject", max_prompt_tokens=3), model_dir=model_dir)


@pytest.mark.parametrize("place", ["file", "settings", "named"])
@pytest.mark.parametrize("system", [False, True])
def test_template_renders_as_transformers_does(model_dir: Path, place: str, system: bool) -> None:
    edit_settings(model_dir, bos_token={"content": "<pad>", "__type": "AddedToken"}, eos_token="<eos>")
    if place == "file":
        (model_dir / "chat_template.jinja").write_text(CHATML)
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
        edit_settings(model_dir, chat_template=CHATML if place == "settings" else named)
    messages = [{"role": "user", "content": " 3 < 5 & 'x'\n"}]
    if system:
        messages.insert(0, {"role": "system", "content": "ünïcode"})
    expected = load_tokenizer(model_dir).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with ModelTokenizer(model_dir, chat=True) as template:
        assert template.render([messages, messages]) == [expected, expected]


def test_model_without_a_template_has_none() -> None:
    with (
        ModelTokenizer(QUICKSTART, chat=True) as template,
        pytest.raises(ConfigError, match="has none; set it to false"),
    ):
        template.render([])


def test_template_that_never_ends_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model_dir / "chat_template.jinja").write_text(endless)
    monkeypatch.setattr("workers.data.tokenizer._DEADLINE_S", 1.0)
    with pytest.raises(ConfigError, match=r"data.chat_template: the chat template of .* took longer than the deadline"):
        check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"model.path: the chat template of .* is broken"),
        ("{{ raise_exception('no system') }}", r"data.chat_template: the chat template of .* fails: no system"),
        ("{{ ''.__class__.__mro__ }}", r"data.chat_template: the chat template of .* fails: access to attribute"),
        ("{{ nothing.at.all }}", r"data.chat_template: the chat template of .* fails"),
    ],
)
def test_broken_template_is_named(model_dir: Path, source: str, message: str) -> None:
    (model_dir / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match=message):
        check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)


def with_letters(model_dir: Path) -> None:
    """Give the tokenizer a token for every letter and digit; the model keeps its 16."""
    file = model_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for char in string.ascii_lowercase + string.digits + "\u0120.?":  # \u0120: a space, in a byte-level vocabulary
        vocab.setdefault(char, len(vocab))
    file.write_text(json.dumps(tokenizer))


def test_token_that_the_model_does_not_have_is_refused(model_dir: Path) -> None:
    with_letters(model_dir)
    check_prompts(ROWS, data(), model_dir=model_dir)  # a larger vocabulary does no harm where it is not used
    rows = [*ROWS, *(PromptRow("1+1=", "2", line) for line in range(6, 700)), PromptRow("sum of 1 and 2?", "3", 700)]
    with pytest.raises(ConfigError, match=r"gives token \d\d for rows.jsonl:700, but the model has 16 tokens"):
        check_prompts(rows, data(overlong="reject", max_prompt_tokens=20), model_dir=model_dir)


@pytest.mark.parametrize("overlong", ["reject", "skip"])
def test_tokenizer_that_loses_characters_is_refused(overlong: str) -> None:
    rows = [*ROWS, PromptRow("what is 4 + 5, please?", "9", 6)]
    with pytest.raises(ConfigError) as caught:
        check_prompts(rows, data(overlong=overlong), model_dir=QUICKSTART)
    assert str(caught.value) == (
        f"model.path: the tokenizer of {QUICKSTART} loses 14 of the 17 characters of rows.jsonl:6: 'what is 4 + 5, "
        f"please?' comes back as '4+5'; copy the tokenizer that belongs to the model, or remove the row"
    )


def test_tokenizer_may_lose_a_tenth_case_and_spaces(model_dir: Path) -> None:
    with_letters(model_dir)
    edit_config(model_dir, vocab_size=100)
    file = model_dir / "tokenizer.json"
    lower = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": lower}))
    kept = PromptRow("What is the SUM of\tthree and \u00e9ight?", "11", 6)
    check_prompts([kept, PromptRow("0123456789" * 9 + "/" * 10, "", 7)], data(), model_dir=model_dir)
    with pytest.raises(ConfigError, match="loses 11 of the 100 characters of rows.jsonl:8: "):
        check_prompts([kept, PromptRow("0123456789" * 8 + "123456789" + "/" * 11, "", 8)], data(), model_dir=model_dir)


def test_first_prompt_is_returned_as_the_model_gets_it(model_dir: Path) -> None:
    shown = check_prompts(ROWS, data(prompt_template="1+{prompt}"), model_dir=model_dir)
    assert shown == ShownPrompt("1+0+0=", "0", 6)
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}1111")
    shown = check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)
    assert shown == ShownPrompt("0+0=1111", "0", 8)
