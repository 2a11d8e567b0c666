"""Prompts as tokens, and their order."""

import json
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import configs
from asyncflow.errors import ConfigError
from workers.data.model_files import load_raw_tokenizer
from workers.data.prompt_dataset import PromptDataset, epoch_order
from workers.data.prompt_rows import CHUNK, PromptRow, check_prompts
from workers.data.tokenizer import PROBES, load_tokenizer, says_all, strftime_of
from workers.settings.data import BLOCK, DataConfig

MODEL_DIR = Path(configs.__path__[0]) / "quickstart" / "model"
ROWS = [PromptRow(f"{i}+{i}=", str(2 * i), i + 1) for i in range(5)]
SEEDS = st.integers(0, 2**31 - 1)


def dataset(rows: list[PromptRow] = ROWS, *, seed: int = 0, **settings: object) -> PromptDataset:
    config = DataConfig.model_validate({"path": "rows.jsonl", **settings})
    return PromptDataset(rows, config, model_dir=MODEL_DIR, seed=seed)


@given(seed=SEEDS, epoch=st.integers(0, 10**6), num_prompts=st.integers(1, 200))
def test_every_epoch_visits_every_prompt_once(seed: int, epoch: int, num_prompts: int) -> None:
    order = epoch_order(seed, epoch, num_prompts)
    assert sorted(order.tolist()) == list(range(num_prompts))
    epoch_order.cache_clear()
    assert (epoch_order(seed, epoch, num_prompts) == order).all()


def test_order_differs_between_seeds_and_epochs_and_is_the_same_for_ever() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_order(1, 2, 8).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]


def test_groups_run_on_into_the_next_epoch() -> None:
    prompts = [dataset(seed=3).prompt_of_group(group) for group in range(12)]
    assert [prompt.epoch for prompt in prompts] == [0] * 5 + [1] * 5 + [2] * 2
    for epoch in (0, 1):
        assert Counter(prompt.position for prompt in prompts if prompt.epoch == epoch) == Counter(range(5))
    again = dataset(seed=3).prompt_of_group(7)
    assert (again.position, again.text) == (prompts[7].position, prompts[7].text)


def test_many_rows_are_tokenized_in_pieces_that_it_tells_of() -> None:
    """A start that says nothing for minutes counts as stuck."""
    rows = [PromptRow(f"{i % 9}+{i}=", str(i), i + 1) for i in range(2 * CHUNK + 1)]
    config, told = DataConfig(path="rows.jsonl", shuffle=False, overlong="skip", max_prompt_tokens=4), list[str]()
    made = PromptDataset(rows, config, model_dir=MODEL_DIR, seed=0, progress=told.append)
    assert told == [f"tokenized {done} of {len(rows)} rows" for done in (0, CHUNK, 2 * CHUNK)]
    short = [row for row in rows if len(row.prompt) <= 4]
    assert (len(made), made.num_skipped) == (len(short), len(rows) - len(short))
    assert [made.prompt_at(k).text for k in range(len(made))] == [row.prompt for row in short]


def test_without_shuffle_the_order_is_the_file_s() -> None:
    prompts = [dataset(shuffle=False).prompt_of_group(group) for group in range(7)]
    assert [prompt.position for prompt in prompts] == [0, 1, 2, 3, 4, 0, 1]
    assert [prompt.ground_truth for prompt in prompts] == ["0", "2", "4", "6", "8", "0", "2"]


def test_prompt_is_tokenized_with_its_template() -> None:
    prompt = dataset(shuffle=False, prompt_template="1+{prompt}").prompt_of_group(2)
    assert prompt.text == "1+2+2="
    assert prompt.tokens.dtype == torch.int64
    assert load_tokenizer(MODEL_DIR).decode(prompt.tokens.tolist()) == "1+2+2="


def test_overlong_prompts_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset([*ROWS, PromptRow("1+1+1=", "3", 6)], max_prompt_tokens=4, shuffle=False)
    assert (len(data), data.num_skipped) == (5, 1)
    assert "1 of 6 prompts" in caplog.text
    assert data.prompt_of_group(5).epoch == 1


def test_overlong_prompts_are_rejected_by_line() -> None:
    rows = [*ROWS, PromptRow("1+1+1=", "3", 6)]
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:6: the prompt has 6 tokens, more than data.max_prompt_tokens = 4"
    ):
        dataset(rows, max_prompt_tokens=4, overlong="reject")


def test_a_data_set_of_overlong_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: all 5 prompts of rows.jsonl are longer than 3"):
        dataset(max_prompt_tokens=3)


def test_missing_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.chat_template: the tokenizer of .* has none"):
        dataset(chat_template=True)


def test_chat_template_frames_the_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    framed = "{% for m in messages %}{{ m['role'] | length }}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = framed + "{% if add_generation_prompt %}={% endif %}"
    tokenizer.save_pretrained(tmp_path)
    config = DataConfig(path="r", chat_template=True, system_prompt="7", prompt_template="{prompt}0", shuffle=False)
    prompt = PromptDataset(ROWS, config, model_dir=tmp_path, seed=0).prompt_of_group(1)
    assert prompt.text == "6741+1=0="
    assert prompt.tokens.numel() == len(prompt.text)


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: cannot load the tokenizer of"):
        load_tokenizer(tmp_path)


def mixed(*weights: float, seed: int = 0, shuffle: bool = True) -> PromptDataset:
    """Sources of 2, 3, 4, ... rows."""
    mixture = [{"path": f"{part}.jsonl", "weight": weight} for part, weight in enumerate(weights)]
    config = DataConfig.model_validate({"mixture": mixture, "shuffle": shuffle})
    rows = [
        PromptRow(f"{part}+{k}=", str(part), k + 1, {}, part) for part in range(len(weights)) for k in range(part + 2)
    ]
    return PromptDataset(rows, config, model_dir=MODEL_DIR, seed=seed)


@given(seed=SEEDS, weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), shuffle=st.booleans())
def test_mixture_has_its_weights_in_every_block_and_visits_each_source_evenly(
    seed: int, weights: list[int], shuffle: bool
) -> None:
    data = mixed(*weights, seed=seed, shuffle=shuffle)
    draws: dict[int, list[tuple[int, int]]] = {part: [] for part in range(len(weights))}
    for block in range(2):
        for group in range(block * BLOCK, (block + 1) * BLOCK):
            draws[int(data.prompt_of_group(group).ground_truth)].append(data.place(group))
        for part, weight in enumerate(weights):
            assert abs(len(draws[part]) - (block + 1) * BLOCK * weight / sum(weights)) < block + 1
    for part, places in draws.items():
        size = part + 2
        assert [epoch for epoch, _ in places] == [k // size for k in range(len(places))]
        for k in range(0, len(places) - size, size):
            assert len(set(places[k : k + size])) == size


def test_place_in_a_mixture_is_a_pure_function_of_the_seed() -> None:
    data = mixed(3, 1, seed=7)
    assert [data.place(group) for group in range(40)] == [mixed(3, 1, seed=7).place(group) for group in range(40)]
    assert len({tuple(mixed(3, 1, seed=seed).place(group) for group in range(40)) for seed in range(4)}) == 4


def test_mixture_without_shuffle_takes_turns() -> None:
    data = mixed(3, 1, shuffle=False)
    assert [data.prompt_of_group(group).source for group in range(8)] == ["0", "0", "1", "0", "0", "0", "1", "0"]
    assert [data.prompt_of_group(group).text for group in range(8)] == [
        "0+0=", "0+1=", "1+0=", "0+0=", "0+1=", "0+0=", "1+1=", "0+1=",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "a", "mixture": [{"path": "b"}]}, "give one of path"),
        ({}, "give one of path"),
        ({"mixture": [{"path": "a"}, {"path": "b", "weight": 5000}]}, "a weight is under 1/1000 of their sum"),
        ({"mixture": [{"path": "a"}], "sampler": "m:C"}, "both say which row comes next"),
        ({"mixture": [{"path": "a"}], "split": "test"}, "subset, split and revision are for path"),
    ],
)
def test_mixtures_that_contradict_themselves(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate(settings)


def test_a_source_of_a_mixture_of_which_nothing_fits_is_named() -> None:
    config = DataConfig.model_validate({"mixture": [{"path": "a"}, {"path": "long"}], "max_prompt_tokens": 4})
    rows = [*ROWS, PromptRow("1+1+1=", "3", 1, {}, 1)]
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: the only prompt of long is longer than 4"):
        PromptDataset(rows, config, model_dir=MODEL_DIR, seed=0)
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: the only prompt of long is longer than 4"):
        check_prompts(rows, config, model_dir=MODEL_DIR)


def digits_one_by_one(tmp_path: Path, tokenizer_class: str) -> Path:
    """A byte-level model whose class builds another tokenizer than its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    raw.train_from_iterator(["What is the sum of 12 and 30? The answer is 42.", "12 30 42"] * 50, trainer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    raw.pre_tokenizer = pre_tokenizers.Sequence([digits, raw.pre_tokenizer])
    raw.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "pad_token": "<pad>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 400, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_tokenizer_json_is_the_tokenizer_whatever_class_is_named(tmp_path: Path, tokenizer_class: str) -> None:
    model_dir = digits_one_by_one(tmp_path, tokenizer_class)
    raw, tokenizer = load_raw_tokenizer(model_dir), load_tokenizer(model_dir)
    assert raw is not None
    for text in PROBES:
        assert tokenizer(text)["input_ids"] == raw.encode(text).ids
        assert tokenizer.decode(raw.encode(text).ids) == text, "spaces included"
    config = DataConfig(path="rows.jsonl")
    rows = [PromptRow("What is  the sum of 12 and 30?", "42", 1)]
    made = PromptDataset(rows, config, model_dir=model_dir, seed=0).prompt_of_group(0)
    assert check_prompts(rows, config, model_dir=model_dir).num_tokens == made.tokens.numel()
    assert [raw.id_to_token(token) for token in made.tokens.tolist()][-3:] == ["3", "0", "?"]


def test_other_tokens_than_were_checked_are_refused(tmp_path: Path) -> None:
    model_dir = digits_one_by_one(tmp_path, "PreTrainedTokenizerFast")
    other = load_tokenizer(model_dir)
    other.backend_tokenizer.pre_tokenizer = other.backend_tokenizer.pre_tokenizer[1]
    with pytest.raises(ConfigError, match=r"that transformers .* gives .*12.* where tokenizer.json gives .*'1', '2'"):
        PromptDataset(ROWS, DataConfig(path="r"), model_dir=model_dir, seed=0, tokenizer=other)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"bos_token": "<s>"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<|call|>"}}}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<|call|>"]}),
        ("added_tokens.json", {"<|call|>": 400}),
    ],
)
def test_settings_beside_tokenizer_json_are_looked_at(tmp_path: Path, file: str, settings: dict[str, object]) -> None:
    model_dir = digits_one_by_one(tmp_path, "GPT2Tokenizer")
    assert says_all(model_dir)
    before = json.loads((model_dir / file).read_text()) if (model_dir / file).exists() else {}
    (model_dir / file).write_text(json.dumps({**before, **settings}))
    assert not says_all(model_dir)


@pytest.mark.parametrize("when", ["2024-02-29T00:03:09", "2026-11-26T13:45:00", "1999-12-31T12:59:59"])
def test_time_of_a_template_is_what_the_wall_showed(when: str) -> None:
    told, wall = strftime_of(when), datetime.fromisoformat(when)
    names = "aAbBcdDeFgGHIjmMnpPrRStTuUVwWxXyYhC%"
    for name in names:
        assert told(f"<%{name}>") == wall.strftime(f"<%{name}>"), name
    assert told("%-d %B %Y, 100%% %%d") == wall.strftime("%-d %B %Y, 100%% %%d")


def test_time_of_a_template_has_no_locale_and_no_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = strftime_of("2026-11-26T13:45:00")
    texts = [told("%A %d %B %c %s %Z%z")]
    for zone in ("Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        texts.append(told("%A %d %B %c %s %Z%z"))
    monkeypatch.undo()
    time.tzset()
    assert {*texts} == {"Thursday 26 November Thu Nov 26 13:45:00 2026 1795700700 "}


@pytest.mark.parametrize("given", ["2026-11-26 13:45", "2026-11-26T13:45:00.5+01:00", datetime(2026, 11, 26, 13, 45)])
def test_time_of_a_template_is_a_local_time(given: object) -> None:
    config = DataConfig.model_validate({"path": "r", "template_time": given})
    assert config.template_time == "2026-11-26T13:45:00"


@pytest.mark.parametrize("given", ["noon", 7, ["2026-11-26"]])
def test_time_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="is not a time; write it like 2026-11-26T09:00:00"):
        DataConfig.model_validate({"path": "r", "template_time": given})
