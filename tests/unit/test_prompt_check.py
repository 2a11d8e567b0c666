"""What is refused before a run starts is what its prompts would be refused for."""

import json
import logging
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import configs
from asyncflow.errors import ConfigError
from workers.agents.rendering import load_renderer
from workers.calls.pool import Entry
from workers.data.prompt_dataset import PromptDataset, PromptTokens
from workers.data.prompt_rows import PromptRow, ShownPrompt, check_prompts
from workers.data.tokenizer import ModelTokenizer, load_tokenizer, tokenizer_in_child
from workers.settings.data import DataConfig

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


@pytest.mark.parametrize(
    ("number", "said"), [(10, "data: 2 of 10 rows are longer"), (1000, "data: 52 of the first 256 of 1000 rows are")]
)
def test_rows_that_are_left_out_are_counted_as_far_as_they_are_checked(
    number: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [PromptRow("1+1+1=" if line % 5 == 1 else "1+1=", "2", line) for line in range(1, number + 1)]
    check_prompts(rows, data(max_prompt_tokens=4), model_dir=QUICKSTART)
    assert said in caplog.text and "max_prompt_tokens = 4 and are left out" in caplog.text


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
        assert template.render_conversations([messages, messages]) == [expected, expected]


def test_model_without_a_template_has_none() -> None:
    with (
        ModelTokenizer(QUICKSTART, chat=True) as template,
        pytest.raises(ConfigError, match="has none; set it to false"),
    ):
        template.render_conversations([])


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


def test_tokenizer_that_loses_the_spaces_is_refused(model_dir: Path) -> None:
    with_letters(model_dir)
    edit_config(model_dir, vocab_size=100)
    check_prompts([PromptRow("what is 1 and 2?", "3", 1)], data(), model_dir=model_dir)
    file = model_dir / "tokenizer.json"
    file.write_text(file.read_text().replace("\\u0120", "_").replace("\u0120", "_"))
    with pytest.raises(
        ConfigError, match=r"loses 4 of the 4 spaces of rows.jsonl:1: 'what is 1 .*'whatis1and2\?'; copy"
    ):
        check_prompts([PromptRow("what is 1 and 2?", "3", 1)], data(), model_dir=model_dir)


class HerePool:
    """Asks this process what a child would be asked: transformers is loaded already."""

    def __init__(self, entry: Entry, **_: object) -> None:
        self._answer = tokenizer_in_child(**entry.settings).function

    def until_ready(self) -> None:
        """It is."""

    def call_and_wait(self, *question: Any, on: str) -> Any:
        return json.loads(json.dumps(self._answer(*question)))

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.data.tokenizer.CallPool", HerePool)


def surround_every_text(model_dir: Path, *, begin: str = "", end: str = "") -> None:
    """Have the post-processor put tokens around every text."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    parts = [{"SpecialToken": {"id": begin, "type_id": 0}}, *parts] if begin else parts
    parts = [*parts, {"SpecialToken": {"id": end, "type_id": 0}}] if end else parts
    file = model_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (begin, end) if name}
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": pair,
        "special_tokens": special,
    }
    file.write_text(json.dumps(tokenizer))


@pytest.mark.usefixtures("here")
def test_tokenizer_that_ends_every_prompt_is_refused(model_dir: Path) -> None:
    surround_every_text(model_dir, end="<eos>")
    with pytest.raises(
        ConfigError, match=r"puts <eos> \(1\) behind rows.jsonl:1, which ends a response.*post_processor"
    ):
        check_prompts(ROWS, data(), model_dir=model_dir)
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)  # then the template alone says what is around it


def test_flags_beside_tokenizer_json_count_for_the_check_as_for_the_run(model_dir: Path) -> None:
    edit_settings(model_dir, add_eos_token=True, add_bos_token=True, bos_token="<pad>")
    made = PromptDataset(ROWS, data(shuffle=False), model_dir=model_dir, seed=0).prompt_of_group(0)
    assert check_prompts(ROWS, data(), model_dir=model_dir).num_tokens == len(made.tokens) == 4


@pytest.mark.usefixtures("here")
def test_tokens_that_transformers_adds_are_checked_as_the_run_makes_them(model_dir: Path) -> None:
    edit_settings(model_dir, bos_token="<call>")  # tokenizer.json has no such one
    edit_config(model_dir, vocab_size=100)
    rows = [PromptRow("<call>1+1=", "2", 1)]
    made = PromptDataset(rows, data(), model_dir=model_dir, seed=0).prompt_of_group(0)
    assert check_prompts(rows, data(), model_dir=model_dir).num_tokens == len(made.tokens) == 5


@pytest.mark.usefixtures("here")
def test_tokenizer_without_a_tokenizer_json_is_checked_as_the_run_has_it(model_dir: Path) -> None:
    file = model_dir / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    file.unlink()
    (model_dir / "vocab.json").write_text(json.dumps(model["vocab"]))
    (model_dir / "merges.txt").write_text("")
    made = PromptDataset(ROWS, data(shuffle=False), model_dir=model_dir, seed=0).prompt_of_group(0)
    shown = check_prompts(ROWS, data(), model_dir=model_dir)
    assert (shown.num_tokens, shown.text) == (len(made.tokens), made.text) == (4, "0+0=")
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the prompt has 4 tokens"):
        check_prompts(ROWS, data(overlong="reject", max_prompt_tokens=3), model_dir=model_dir)


def test_prompt_that_begins_twice_is_refused(model_dir: Path) -> None:
    edit_settings(model_dir, bos_token="<pad>")
    surround_every_text(model_dir, begin="<pad>")
    assert check_prompts(ROWS, data(), model_dir=model_dir).num_tokens == 5
    with pytest.raises(ConfigError, match=r"which adds one, begins rows.jsonl:1 with two <pad> \(0\); take one out"):
        check_prompts([PromptRow("<pad>1+1=", "2", 1)], data(), model_dir=model_dir)


def test_text_that_ends_itself_is_refused_by_line(model_dir: Path) -> None:
    rows = [*ROWS, PromptRow("1+1=2<eos>", "2", 6)]
    with pytest.raises(ConfigError, match=r"rows.jsonl:6: the prompt's text ends with <eos> \(1\), .*out of the text"):
        check_prompts(rows, data(), model_dir=model_dir)
    check_prompts([*ROWS, PromptRow("1+1=2<eos>1+2=", "3", 6)], data(), model_dir=model_dir)  # an example before it
    later = [*ROWS * 100, PromptRow("1+1=2<eos>", "2", 501)]  # in a chunk that is not tokenized before the start
    with pytest.raises(ConfigError, match=r"rows.jsonl:501: the prompt's text ends with <eos> \(1\), .*of the text"):
        check_prompts(later, data(), model_dir=model_dir)
    tokens = PromptTokens(data(), model_dir=model_dir, own_rollout=False)
    with pytest.raises(ConfigError, match=r"rows.jsonl:6: the prompt's text ends with <eos> \(1\), .*of the text"):
        tokens.check_end(rows[-1], tokens.tokenize_rows(rows[-1:])[1][0])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("behind", ["<eos>", "<eos>\\n"])
def test_template_that_begins_no_answer_is_refused(model_dir: Path, behind: str) -> None:
    edit_settings(model_dir, bos_token="<pad>")
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content + '" + behind + "' }}")
    with pytest.raises(ConfigError, match=r"ends rows.jsonl:1 with <eos> \(1\), .*where add_generation_prompt is true"):
        check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)
    (model_dir / "chat_template.jinja").write_text("{{ '<pad><pad>' + messages[0].content }}")
    with pytest.raises(ConfigError, match=r"the chat template of .* begins rows.jsonl:1 with two <pad> \(0\)"):
        check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)


def edit_generation(model_dir: Path, eos: object) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def test_response_that_could_not_end_is_refused(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(model_dir, vocab_size=40)  # some are padded
    edit_generation(model_dir, [30, 31])
    with pytest.raises(
        ConfigError, match=r"^model.path: eos_token_id 30, 31 of .* is not a token of its tokenizer, so no "
    ):
        check_prompts(ROWS, data(), model_dir=model_dir)
    assert not caplog.records
    edit_generation(model_dir, [1, 30])
    check_prompts(ROWS, data(), model_dir=model_dir)
    assert "eos_token_id 30 of" in caplog.text
    assert "ends no response" in caplog.text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("chat", [False, True])
def test_end_that_the_model_may_mean_otherwise_is_told(
    model_dir: Path, caplog: pytest.LogCaptureFixture, chat: bool
) -> None:
    edit_generation(model_dir, 2)
    if chat:
        template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<pad>{% endif %}{% endfor %}"
        (model_dir / "chat_template.jinja").write_text(template)
    check_prompts(ROWS, data(chat_template=chat), model_dir=model_dir)
    (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert ("ends an answer with <pad> (0)" if chat else "eos_token is <eos> (1)") in record.getMessage()
    assert "is 2 (<unk>)" in record.getMessage()


@pytest.mark.usefixtures("here")
def test_messages_that_hold_marks_of_the_template_are_told(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}1")
    rows = [*ROWS, PromptRow("1+1=<pad>1", "2", 6)]
    check_prompts(rows, data(chat_template=True), model_dir=model_dir)
    assert "the messages of 1 of the first 6 rows hold special tokens in their text, <pad> of rows.jsonl:6" in (
        caplog.text
    )


@pytest.mark.usefixtures("here")
def test_template_that_draws_is_refused(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}{{ range(99999) | random }}=")
    with pytest.raises(
        ConfigError, match=r"renders rows.jsonl:1 as '0\+0=\d+=', then as '0\+0=\d+='; take out what it"
    ):
        check_prompts(ROWS, data(chat_template=True), model_dir=model_dir)


def test_template_is_told_the_time_of_the_start(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ strftime_now('%Y%m%d') }}+{{ messages[0].content }}")
    config = data(chat_template=True, template_time="2001-02-03 04:05", shuffle=False)
    assert check_prompts(ROWS, config, model_dir=model_dir).text == "20010203+0+0="
    assert PromptDataset(ROWS, config, model_dir=model_dir, seed=0).prompt_of_group(0).text == "20010203+0+0="


def test_template_is_told_the_options_of_the_run_and_only_such_as_it_uses(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ '1+' if thinking is true else '2+' }}{{ messages[0].content }}")
    for thinking, text in ((True, "1+0+0="), (False, "2+0+0=")):
        config = data(chat_template=True, chat_template_options={"thinking": thinking}, shuffle=False)
        assert check_prompts(ROWS, config, model_dir=model_dir).text == text
        assert PromptDataset(ROWS, config, model_dir=model_dir, seed=0).prompt_of_group(0).text == text
        renderer = load_renderer(model_dir, None, config.templates)
        assert renderer.render([{"role": "user", "content": "0+0="}], None) == load_tokenizer(model_dir).encode(text)
    wrong = data(chat_template=True, chat_template_options={"enable_thinking": False})
    with pytest.raises(
        ConfigError, match=r"data.chat_template_options: the chat template of .* does not use 'enable_th"
    ):
        check_prompts(ROWS, wrong, model_dir=model_dir)
    for name in ("tools", "self"):
        with pytest.raises(ValidationError, match=f"{name} is set by AsyncFlow itself"):
            data(chat_template=True, chat_template_options={name: []})


@pytest.mark.parametrize(
    ("template", "used"),
    [
        ("{% if x is not defined %}{% set x = true %}{% endif %}{{ x }}", True),
        ("{%- set x = x | default(1) %}{% generation %}{{ x }}{% endgeneration %}", True),
        ("{% set x = 1 %}{{ x }}", False),
        ("{# x #}x{{ messages[0].x }}{{ 'x' }}", False),
        ("{% for x in messages %}{{ x.content }}{% endfor %}", False),
        ([{"name": "default", "template": "'"}, {"name": "tool_use", "template": "{{ x }}"}], True),
        ("{% if %}", True),  # what is broken is told where it is rendered
    ],
)
def test_an_option_counts_where_the_template_takes_it_from_outside(
    model_dir: Path, template: object, used: bool
) -> None:
    edit_settings(model_dir, chat_template=template)
    settings = data(chat_template=True, chat_template_options={"x": True}).templates
    if used:
        load_tokenizer(model_dir, settings)
    else:
        with pytest.raises(ConfigError, match="does not use 'x'; remove it"):
            load_tokenizer(model_dir, settings)
