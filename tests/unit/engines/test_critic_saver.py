"""The critic's saver in a process group of one; whole checkpoints with a critic are in tests/runs/test_ppo.py."""

import contextlib
import threading
from pathlib import Path
from typing import cast

import pytest
import torch

from asyncflow.errors import CheckpointError, TransportError
from workers.engines.base import ValueEngine
from workers.rank.actor_critic_channel import ActorCriticChannel
from workers.trainer.actor import CriticSaver

pytestmark = pytest.mark.usefixtures("single_rank")


class Engine:
    """Has a state and nothing else."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `ValueEngine`."""
        return {"model": torch.zeros(2)}


class Channel:
    """The actor says whether to save when it is told to."""

    def __init__(self) -> None:
        self.says = threading.Event()

    def recv_begun(self, _step: int, *, timeout_s: float) -> bool:
        """See `ActorCriticChannel`; nothing is to be saved."""
        assert self.says.wait(30 * timeout_s + 30)
        return False

    def send_files(self, *_: object) -> None:
        """See `ActorCriticChannel`."""


def test_a_save_that_does_not_end_is_an_error_and_no_other_begins_beside_it() -> None:
    channel = Channel()
    saver = CriticSaver(
        cast(ValueEngine, Engine()),
        lambda: cast(ActorCriticChannel, channel),
        Path(),
        device=torch.device("cpu"),
        timeout_s=0.2,
    )
    saver.begin(3)
    for again in (saver.wait, lambda: saver.begin(4)):
        with pytest.raises(CheckpointError, match=r"checkpoint of step 3 is not written after 0\.2 s"):
            again()
    channel.says.set()
    wait_long(saver)
    saver.begin(4)
    wait_long(saver)  # its thread needs the process group, which goes with the test
    saver.close()


def test_actor_that_is_gone_when_a_save_ends_costs_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise TransportError("the job store is gone")

    channel = Channel()
    channel.says.set()
    monkeypatch.setattr(channel, "send_files", gone)
    saver = CriticSaver(
        cast(ValueEngine, Engine()),
        lambda: cast(ActorCriticChannel, channel),
        Path(),
        device=torch.device("cpu"),
        timeout_s=60.0,
    )
    saver.begin(3)
    saver.wait()
    saver.close()
    assert "the critic's part of step 3 is not saved" in caplog.text and "the job store is gone" in caplog.text


def wait_long(saver: CriticSaver) -> None:
    """Wait until the save is written, however many of its short deadlines that takes."""
    for _ in range(300):
        with contextlib.suppress(CheckpointError):
            saver.wait()
            return
    raise AssertionError("the save does not end")
