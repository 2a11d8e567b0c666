"""Hints lead to keys that exist."""

import pytest

from launcher.config.key_reference import key_paths
from launcher.config.load_config import _OTHER_NUMBERS, _OTHER_WORDS, _key_hint, _meant_key


def test_other_words_stand_for_keys_that_exist_and_are_no_keys_themselves() -> None:
    keys = set(key_paths())
    assert not set(_OTHER_WORDS) - keys
    words = [word for words in _OTHER_WORDS.values() for word in words]
    words += _OTHER_NUMBERS
    assert len(words) == len(set(words))
    assert not set(words) & {key.rpartition(".")[2] for key in keys}


def test_key_that_was_renamed_names_its_new_one() -> None:
    here = ["num_mini_batches", "ppo_epochs", "lr"]
    assert _meant_key("num_updates_per_step", here, key_paths()) == "num_mini_batches"


@pytest.mark.parametrize(
    ("key", "section", "meant"),
    [
        ("save_steps", (), "checkpoint.interval"),
        ("save_freq", ("checkpoint",), "interval"),
        ("clip_ratio", ("actor",), "algorithm.eps_clip"),
        ("max_new_tokens", ("schedule",), "rollout.max_response_tokens"),
        ("stepz", (), "steps"),
        ("target", ("lora",), "targets"),
        ("pth", ("teacher", "sources", "math"), "path"),
        ("pth", ("evaluate", "sets", "math"), "path"),
        ("pth", ("data", "mixture", "0"), "path"),
        ("nam", ("loggers", "0"), "name"),
    ],
)
def test_what_another_system_calls_it_comes_before_what_looks_alike(
    key: str, section: tuple[str, ...], meant: str
) -> None:
    assert _key_hint((*section, key)) == f"did you mean {meant!r}?"


def test_another_system_s_number_is_told_as_ours() -> None:
    hint = _key_hint(("actor", "ppo_mini_batch_size"))
    assert hint == "set actor.num_mini_batches to schedule.rollout_batch_size / ppo_mini_batch_size"
