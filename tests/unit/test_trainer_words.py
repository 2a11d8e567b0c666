"""What actor and critic tell each other, over a store in this process."""

import pytest
from torch.distributed import HashStore

from asyncflow.errors import CheckpointError, SealBroken
from asyncflow.sealed_store import SealedStore
from workers.trainer_words import Kind, TrainerWords, Word

SAID = [Word(Kind.COMMIT, 1), Word(Kind.SAVE, 1), Word(Kind.COMMIT, 2), Word(Kind.END)]


def test_every_rank_hears_all_words_in_order() -> None:
    store = SealedStore(HashStore(), b"secret")
    actor = TrainerWords(store, lineage=0)
    ranks = [TrainerWords(store, lineage=0) for _ in range(2)]
    for word in SAID:
        actor.say(word)
    for rank in ranks:
        assert [rank.hear() for _ in SAID] == SAID


def test_words_of_an_abandoned_lineage_are_not_heard() -> None:
    store = SealedStore(HashStore(), b"secret")
    TrainerWords(store, lineage=0).say(Word(Kind.COMMIT, 7))
    TrainerWords(store, lineage=1).say(Word(Kind.COMMIT, 4))
    assert TrainerWords(store, lineage=1).hear() == Word(Kind.COMMIT, 4)


def test_a_save_begins_and_has_files_or_an_error() -> None:
    words = TrainerWords(SealedStore(HashStore(), b"secret"), lineage=0)
    words.tell_begun(3, begun=True)
    words.give_files(3, {"critic/__0_0.distcp": (17, "00ff")})
    words.tell_begun(4, begun=False)
    words.give_files(4, {}, "rank 1: OSError: full")
    assert (words.begun(3, timeout_s=1), words.begun(4, timeout_s=1)) == (True, False)
    assert words.files(3, timeout_s=1) == {"critic/__0_0.distcp": (17, "00ff")}
    with pytest.raises(CheckpointError, match="could not save step 4: rank 1: OSError: full"):
        words.files(4, timeout_s=1)


@pytest.mark.parametrize(
    "name", ["critic/../../step_000001/dcp/x", "/etc/passwd", "dcp/__0_0.distcp", "critic", "../x", ""]
)
def test_files_of_a_critic_lie_in_its_part_of_the_checkpoint(name: str) -> None:
    words = TrainerWords(SealedStore(HashStore(), b"secret"), lineage=0)
    words.give_files(3, {"critic/__0_0.distcp": (17, "00ff"), name: (17, "00ff")})
    with pytest.raises(CheckpointError, match=f"'{name}', which is not in critic/"):
        words.files(3, timeout_s=1)


def test_waiting_for_a_save_has_a_deadline() -> None:
    words = TrainerWords(SealedStore(HashStore(), b"secret"), lineage=0)
    with pytest.raises(CheckpointError, match=r"did not save step 3 within 0.05 s \(checkpoint.timeout_s\)"):
        words.files(3, timeout_s=0.05)


def test_reports_are_by_step() -> None:
    words = TrainerWords(SealedStore(HashStore(), b"secret"), lineage=0)
    words.report(2, {"critic_loss": 0.5})
    assert words.reported(2) == {"critic_loss": 0.5}


def test_word_of_a_stranger_ends_who_hears_it() -> None:
    store = HashStore()
    words = TrainerWords(SealedStore(store, b"secret"), lineage=0)
    store.set("critic/0/word/0", '["save", 3]')
    store.set("critic/0/begun/3", "true")
    with pytest.raises(SealBroken, match="'critic/0/word/0'"):
        words.hear()
    with pytest.raises(SealBroken, match="'critic/0/begun/3'"):
        words.begun(3, timeout_s=1)
