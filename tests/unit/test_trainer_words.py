"""What actor and critic tell each other, over a store in this process."""

import pytest
from torch.distributed import HashStore

from asyncflow.errors import CheckpointError
from workers.trainer_words import Kind, TrainerWords, Word

SAID = [Word(Kind.COMMIT, 1), Word(Kind.SAVE, 1), Word(Kind.COMMIT, 2), Word(Kind.END)]


def test_every_rank_hears_all_words_in_order() -> None:
    store = HashStore()
    actor = TrainerWords(store, lineage=0)
    ranks = [TrainerWords(store, lineage=0) for _ in range(2)]
    for word in SAID:
        actor.say(word)
    for rank in ranks:
        assert [rank.hear() for _ in SAID] == SAID


def test_words_of_an_abandoned_lineage_are_not_heard() -> None:
    store = HashStore()
    TrainerWords(store, lineage=0).say(Word(Kind.COMMIT, 7))
    TrainerWords(store, lineage=1).say(Word(Kind.COMMIT, 4))
    assert TrainerWords(store, lineage=1).hear() == Word(Kind.COMMIT, 4)


def test_a_save_has_a_place_and_files_or_an_error() -> None:
    words = TrainerWords(HashStore(), lineage=0)
    words.give_place(3, "/somewhere")
    words.give_files(3, {"critic/__0_0.distcp": (17, "00ff")})
    words.give_place(4, "")
    words.give_files(4, {}, "rank 1: OSError: full")
    assert (words.place(3, timeout_s=1), words.place(4, timeout_s=1)) == ("/somewhere", "")
    assert words.files(3, timeout_s=1) == {"critic/__0_0.distcp": (17, "00ff")}
    with pytest.raises(CheckpointError, match="could not save step 4: rank 1: OSError: full"):
        words.files(4, timeout_s=1)


def test_waiting_for_a_save_has_a_deadline() -> None:
    words = TrainerWords(HashStore(), lineage=0)
    with pytest.raises(CheckpointError, match=r"did not save step 3 within 0.05 s \(checkpoint.timeout_s\)"):
        words.files(3, timeout_s=0.05)


def test_reports_are_by_step() -> None:
    words = TrainerWords(HashStore(), lineage=0)
    words.report(2, {"critic_loss": 0.5})
    assert words.reported(2) == {"critic_loss": 0.5}
