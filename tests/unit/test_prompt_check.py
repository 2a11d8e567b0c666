"""What is refused before a run starts is what its prompts would be refused for, and templates render alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import configs
from asyncflow.errors import ConfigError
from workers.chat_template import ChatTemplate
from workers.config import DataConfig
from workers.data import PromptRow
from workers.prompt_check import check_prompts
from workers.prompt_dataset import PromptDataset
from workers.tokenizer import load_tokenizer

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
    template = ChatTemplate.load(model_dir)
    assert template is not None
    expected = load_tokenizer(model_dir).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages) == expected


def test_model_without_a_template_has_none() -> None:
    assert ChatTemplate.load(QUICKSTART) is None


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
