"""How the actor and a critic in a role of its own stay in step and save together: messages in the job store.

    actor rank 0    commit 1 | commit 2, save 2 | commit 3 ... commit N, save N, end   every critic rank gets them all
    critic rank 0   rows 1, report 1 | rows 2, report 2 | ...                           whether all are there; metrics
    saving threads  begun 2 -> the critic's shards are written beside checkpoint 2 -> files 2

A critic makes a step's first update once the actor committed to the step. All rows have arrived by then, so only a
death, which takes both back, can keep the actor from finishing it. (A critic whose advantages are computed by another
role gets its rows beside the actor, so a stop may reach it between two of them: then it says first whether it has all,
`rows`, and if not, the actor abandons the step, too.) And since a `save` comes before the next `commit`,
the critic's state is then still that of the saved step. So both always have the same step.

Keys begin with the lineage, which increases with every restart of the two.
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from torch.distributed import DistStoreError

from asyncflow.checkpoint_files import CRITIC
from asyncflow.errors import CheckpointError
from asyncflow.sealed_store import SealedStore

# A store's wait has a deadline, but waiting for the other trainer has none here: the launcher detects one that does not
# come.
_NO_DEADLINE_S = timedelta(days=20).total_seconds()


class Kind(StrEnum):
    COMMIT = "commit"
    SAVE = "save"
    END = "end"


@dataclass(frozen=True)
class ActorMessage:
    """A message of the actor; step 0 means none."""

    kind: Kind
    step: int = 0


class ActorCriticChannel:
    """One thread's end of the channel, with a store client that no other thread uses."""

    def __init__(self, store: SealedStore, *, lineage: int) -> None:
        self._keys = store.with_prefix(f"critic/{lineage}")
        self._next = 0

    def send(self, message: ActorMessage) -> None:
        """Send to all ranks of the critic; only from the actor's rank 0, in one thread."""
        self._set_key(f"message/{self._next}", [message.kind, message.step])
        self._next += 1

    def recv(self) -> ActorMessage:
        kind, step = self._wait_for_key(f"message/{self._next}")
        self._next += 1
        return ActorMessage(Kind(kind), step)

    def send_report(self, step: int, figures: dict[str, float]) -> None:
        self._set_key(f"report/{step}", figures)

    def recv_report(self, step: int) -> dict[str, float]:
        """Wait until the critic finished a step; returns its metrics."""
        figures: dict[str, float] = self._wait_for_key(f"report/{step}")
        return figures

    def send_rows(self, step: int, *, complete: bool) -> None:
        """Tell the actor whether all of a step's rows arrived, or a stop came first."""
        self._set_key(f"rows/{step}", complete)

    def recv_rows(self, step: int) -> bool:
        """Wait for `send_rows`."""
        complete: bool = self._wait_for_key(f"rows/{step}")
        return complete

    def send_begun(self, step: int, *, begun: bool) -> None:
        """Tell the critic that it may write its part of a save, or that the save failed (`begun` False)."""
        self._set_key(f"begun/{step}", begun)

    def recv_begun(self, step: int, *, timeout_s: float) -> bool:
        """Wait for `send_begun`. Raises CheckpointError if nothing arrived within `timeout_s`."""
        begun: bool = self._wait_for_key(
            f"begun/{step}", timeout_s=timeout_s, what=f"the actor did not begin to save {step}"
        )
        return begun

    def send_files(self, step: int, files: dict[str, tuple[int, str]], error: str = "") -> None:
        """Report what the critic wrote (path in the checkpoint -> size, checksum), or why it could not."""
        self._set_key(f"files/{step}", [files, error])

    def recv_files(self, step: int, *, timeout_s: float) -> dict[str, tuple[int, str]]:
        """Wait for `send_files`. Raises CheckpointError if the critic failed, did not answer within `timeout_s`, or
        names files that are not its own."""
        files, error = self._wait_for_key(
            f"files/{step}", timeout_s=timeout_s, what=f"the critic did not save step {step}"
        )
        if error:
            raise CheckpointError(f"the critic could not save step {step}: {error}")
        for name in files:
            parts = PurePosixPath(name).parts
            if len(parts) < 2 or parts[0] != CRITIC or ".." in parts:
                raise CheckpointError(f"the critic says that it wrote {name!r}, which is not in {CRITIC}/")
        return {name: (num_bytes, digest) for name, (num_bytes, digest) in files.items()}

    def _set_key(self, key: str, value: Any) -> None:
        self._keys.set(key, json.dumps(value))

    def _wait_for_key(self, key: str, *, timeout_s: float = _NO_DEADLINE_S, what: str = "") -> Any:
        try:
            self._keys.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            raise CheckpointError(f"{what} within {timeout_s:g} s (checkpoint.timeout_s)") from error
        return json.loads(self._keys.get(key))
