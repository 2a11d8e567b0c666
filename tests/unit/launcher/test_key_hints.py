"""Hints lead to keys that exist."""

from launcher.config.errors import _OTHER_WORDS, _meant_key
from launcher.config.reference import key_paths


def test_other_words_stand_for_keys_that_exist_and_are_no_keys_themselves() -> None:
    keys = set(key_paths())
    assert not set(_OTHER_WORDS) - keys
    words = [word for words in _OTHER_WORDS.values() for word in words]
    assert len(words) == len(set(words))
    assert not set(words) & {key.rpartition(".")[2] for key in keys}


def test_key_that_was_renamed_names_its_new_one() -> None:
    here = ["num_mini_batches", "ppo_epochs", "lr"]
    assert _meant_key("num_updates_per_step", here, key_paths()) == "num_mini_batches"
