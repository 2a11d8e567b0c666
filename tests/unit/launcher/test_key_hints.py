"""Hints lead to keys that exist."""

from launcher.config_errors import all_keys
from launcher.key_hints import _OTHER_WORDS
from workers.algorithms.config import ALGORITHMS


def test_other_words_stand_for_keys_that_exist_and_are_no_keys_themselves() -> None:
    keys = {*all_keys(), *(f"algorithm.{key}" for settings in ALGORITHMS.values() for key in settings.model_fields)}
    assert not set(_OTHER_WORDS) - keys
    words = [word for words in _OTHER_WORDS.values() for word in words]
    assert len(words) == len(set(words))
    assert not set(words) & {key.rpartition(".")[2] for key in keys}
