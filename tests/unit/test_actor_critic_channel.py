"""What actor and critic tell each other, over a store in this process."""

import pytest
from torch.distributed import HashStore

from asyncflow.errors import CheckpointError, SealBroken
from asyncflow.sealed_store import SealedStore
from workers.rank.actor_critic_channel import ActorCriticChannel, ActorMessage, Kind

SENT = [ActorMessage(Kind.COMMIT, 1), ActorMessage(Kind.SAVE, 1), ActorMessage(Kind.COMMIT, 2), ActorMessage(Kind.END)]


def test_every_rank_receives_all_messages_in_order() -> None:
    store = SealedStore(HashStore(), b"secret")
    actor = ActorCriticChannel(store, lineage=0)
    ranks = [ActorCriticChannel(store, lineage=0) for _ in range(2)]
    for message in SENT:
        actor.send(message)
    for rank in ranks:
        assert [rank.recv() for _ in SENT] == SENT


def test_messages_of_an_abandoned_lineage_are_not_received() -> None:
    store = SealedStore(HashStore(), b"secret")
    ActorCriticChannel(store, lineage=0).send(ActorMessage(Kind.COMMIT, 7))
    ActorCriticChannel(store, lineage=1).send(ActorMessage(Kind.COMMIT, 4))
    assert ActorCriticChannel(store, lineage=1).recv() == ActorMessage(Kind.COMMIT, 4)


def test_a_save_begins_and_has_files_or_an_error() -> None:
    channel = ActorCriticChannel(SealedStore(HashStore(), b"secret"), lineage=0)
    channel.send_begun(3, begun=True)
    channel.send_files(3, {"critic/__0_0.distcp": (17, "00ff")})
    channel.send_begun(4, begun=False)
    channel.send_files(4, {}, "rank 1: OSError: full")
    assert (channel.recv_begun(3, timeout_s=1), channel.recv_begun(4, timeout_s=1)) == (True, False)
    assert channel.recv_files(3, timeout_s=1) == {"critic/__0_0.distcp": (17, "00ff")}
    with pytest.raises(CheckpointError, match="could not save step 4: rank 1: OSError: full"):
        channel.recv_files(4, timeout_s=1)


@pytest.mark.parametrize(
    "name", ["critic/../../step_000001/dcp/x", "/etc/passwd", "dcp/__0_0.distcp", "critic", "../x", ""]
)
def test_files_of_a_critic_lie_in_its_part_of_the_checkpoint(name: str) -> None:
    channel = ActorCriticChannel(SealedStore(HashStore(), b"secret"), lineage=0)
    channel.send_files(3, {"critic/__0_0.distcp": (17, "00ff"), name: (17, "00ff")})
    with pytest.raises(CheckpointError, match=f"'{name}', which is not in critic/"):
        channel.recv_files(3, timeout_s=1)


def test_waiting_for_a_save_has_a_deadline() -> None:
    channel = ActorCriticChannel(SealedStore(HashStore(), b"secret"), lineage=0)
    with pytest.raises(CheckpointError, match=r"did not save step 3 within 0.05 s \(checkpoint.timeout_s\)"):
        channel.recv_files(3, timeout_s=0.05)


def test_reports_are_by_step() -> None:
    channel = ActorCriticChannel(SealedStore(HashStore(), b"secret"), lineage=0)
    channel.send_report(2, {"critic_loss": 0.5})
    assert channel.recv_report(2) == {"critic_loss": 0.5}


def test_message_of_a_stranger_ends_its_receiver() -> None:
    store = HashStore()
    channel = ActorCriticChannel(SealedStore(store, b"secret"), lineage=0)
    store.set("critic/0/message/0", '["save", 3]')
    store.set("critic/0/begun/3", "true")
    with pytest.raises(SealBroken, match="'critic/0/message/0'"):
        channel.recv()
    with pytest.raises(SealBroken, match="'critic/0/begun/3'"):
        channel.recv_begun(3, timeout_s=1)


def test_the_actor_hears_whether_the_critic_has_a_steps_rows() -> None:
    channel = ActorCriticChannel(SealedStore(HashStore(), b"secret"), lineage=0)
    channel.send_rows(2, complete=True)
    channel.send_rows(3, complete=False)
    assert (channel.recv_rows(2), channel.recv_rows(3)) == (True, False)
