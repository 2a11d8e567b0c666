"""A few groups of each step (`rollout.samples_per_step`), for people to read.

    samples/GANG.jsonl         prompts, responses, rewards: the rollout, as responses are put, and the evaluation
    trace/leases-GANG.jsonl    who got these rows of the queue, and when: its controllers
    trace/trained-RANK.jsonl   the trainer's log-probabilities of the same tokens: the actor, once a step is finished

Nothing in a run reads them back. A full disk or a missing directory costs lines, not the run.

Legend of shapes: A drawn tokens of a rollout.
"""

import contextlib
import itertools
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncflow.json_lines import open_spare
from asyncflow.run_files import SAMPLES, TRACE
from tq.columns import PackedBatch
from tq.messages import AckLost, LeaseGrant, OutputsWritten, Release
from workers.rewards.scorer import ScoredResponse
from workers.rows.finished import FinishedRollout
from workers.rows.packed_rows import ROW_DRAWN, SAMPLE_DRAWN
from workers.settings.run import RunConfig

MOST_TOKENS = 256
"""Only the first tokens of a row are kept with their log-probabilities: about 4 KB."""
# Most lines that wait in memory for the disk (later ones are dropped), and newest leased rows whose end is recognized.
_MOST_WAITING, _KNOWN_ROWS = 4096, 8192

_encoder = msgspec.json.Encoder()

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptGroups:
    """The groups that are written down: the first `shown` of each step. Group ids continue from step to step."""

    shown: int
    groups_per_step: int

    def find_places(self, groups: Sequence[int]) -> list[int]:
        """Return the places of rows of kept groups; `groups`: each row's."""
        size, shown = self.groups_per_step, self.shown
        return [place for place, group in enumerate(groups) if group % size < shown]


def kept_groups(config: RunConfig) -> KeptGroups:
    return KeptGroups(config.rollout.samples_per_step, config.schedule.rollout_batch_size)


class SampleLog:
    """Writes the responses of kept groups that this instance generated.

    Args:
        now: the lineage, and seconds since the command started, which a resumed run counts anew.
        tokenizer: None: do not show tokens.
    """

    def __init__(
        self,
        run_dir: Path,
        gang: str,
        *,
        kept: KeptGroups,
        now: Callable[[], tuple[int, float]],
        tokenizer: Any | None = None,
    ) -> None:
        self._now = now
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of tokens: asking the tokenizer for each took most of a line's time
        self._file = open_spare(run_dir / SAMPLES / f"{gang}.jsonl", what="samples", loss="shows none")
        self._kept = kept

    def write(
        self, rollouts: Sequence[FinishedRollout], scores: Sequence[ScoredResponse], groups: Sequence[int], *, step: int
    ) -> None:
        """Write those of kept groups, all at once; `groups`: each rollout's."""
        places = self._kept.find_places(groups)
        if not places or self._file.closed:
            return
        lineage, time_s = self._now()
        said = {"step": step, "lineage": lineage, "time_s": round(time_s, 3)}
        lines = [_encode({**said, **self._line(rollouts[k], scores[k], group=groups[k])}) for k in places]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            logger.warning("samples: %s; this process shows no more", error)
            self.close()

    def _line(self, rollout: FinishedRollout, scored: ScoredResponse, *, group: int) -> dict[str, Any]:
        versions = version_spans(rollout.versions_A)
        line: dict[str, Any] = {
            "group": group,
            "index": rollout.index,
            "version": versions[0][0] if versions else None,
            "versions": versions,
            "prompt": scored.prompt,
            "response": scored.response,
            "ground_truth": scored.ground_truth,
            "reward": scored.reward if math.isfinite(scored.reward) else None,
            "correct": scored.correct,
            **({"turn_rewards": list(scored.turn_rewards)} if scored.turn_rewards else {}),
            "response_tokens": rollout.log_probs_A.numel(),
            "truncated": rollout.truncated,
            "log_probs": rounded(rollout.log_probs_A[:MOST_TOKENS].tolist()),
        }
        if self._tokenizer is not None:
            line["tokens"] = [self._text_of(token) for token in rollout.drawn[:MOST_TOKENS].tolist()]
        if rollout.conversations:
            line |= {
                "conversations": list(rollout.conversations),
                "samples": [] if self._tokenizer is None else token_runs(rollout, self._tokenizer),
                "turns": rollout.turns,
                "tool_s": round(rollout.tool_s, 3),
                "metrics": dict(rollout.metrics),
            }
        return line

    def _text_of(self, token: int) -> str:
        if token not in self._texts:
            assert self._tokenizer is not None
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes the buffer, which may fail, too
            self._file.close()


class LeaseLog:
    """Writes the leases of kept groups; a `tq.control.controller.LeaseObserver`, with a thread of its own.

    `now`: seconds since the command started, which a resumed run counts anew, with another `lineage`.
    """

    def __init__(
        self, run_dir: Path, gang: str, *, kept: KeptGroups, now: Callable[[], float], lineage: int = 0
    ) -> None:
        self._file = open_spare(run_dir / TRACE / f"leases-{gang}.jsonl", what="leases", loss="writes none")
        self._kept = kept
        self._now = now
        self._lineage = lineage
        # (task, kept row) -> its lease's token, the newest last; any thread, under the lock
        self._tokens: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write_until_closed, name="leases", daemon=True)
        self._thread.start()

    def note_lease(self, grant: LeaseGrant, owner: str) -> None:
        rows = [grant.rows[place] for place in self._kept.find_places(grant.groups)]
        if not rows:
            return
        with self._lock:
            self._tokens.update(dict.fromkeys(((grant.task, row) for row in rows), grant.token))
            for leased in list(itertools.islice(self._tokens, max(0, len(self._tokens) - _KNOWN_ROWS))):
                del self._tokens[leased]
        self._add({"task": grant.task, "token": grant.token, "step": grant.partition, "rows": rows, "to": owner})

    def note_end(self, event: Release | OutputsWritten | AckLost) -> None:
        with self._lock:
            rows = [row for row in event.rows if (event.task, row) in self._tokens]
            tokens = [self._tokens.pop((event.task, row)) for row in rows]
        if rows:
            self._add({"task": event.task, "token": tokens[0], "rows": rows, "ended": _how_ended(event)})

    def close(self) -> None:
        """Write what waits; idempotent."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=1.0)
        self._thread.join(timeout=5.0)

    def _add(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(queue.Full):  # a disk that hangs must not hold up the queue
            self._waiting.put_nowait({**line, "lineage": self._lineage, "time_s": round(self._now(), 3)})

    def _write_until_closed(self) -> None:
        try:
            while (line := self._waiting.get()) is not None:
                self._file.write(_encode(line))
                self._file.flush()
        except OSError as error:
            logger.warning("leases: %s; this process writes no more", error)
        with contextlib.suppress(OSError):
            self._file.close()


def _how_ended(event: Release | OutputsWritten | AckLost) -> str:
    if isinstance(event, Release):
        return "filtered" if event.filtered else "failed" if event.failures else "released"
    return "put" if isinstance(event, OutputsWritten) and event.columns else "acked"


@dataclass(frozen=True)
class TrainedRows:
    """What the trainer computed for the kept rows of a micro-batch before the step's first update."""

    indices: Sequence[int]
    lengths: Sequence[int]  # tokens of each, at most MOST_TOKENS
    log_probs_A: Tensor  # float32 [A], one row after the other, on the device


class TrainedLog:
    """Writes the trainer's log-probabilities of kept rows; one per rank of the actor."""

    def __init__(self, run_dir: Path, rank: int, *, kept: KeptGroups) -> None:
        self._file = open_spare(run_dir / TRACE / f"trained-{rank}.jsonl", what="log-probabilities", loss="writes none")
        self.kept = kept

    def find_rows(self, batch: PackedBatch, log_probs_A: Tensor) -> list[TrainedRows]:
        """Return the kept rows of a micro-batch of samples, if there are any, without waiting for the device.

        A row of several samples is left out: these may be in several micro-batches, in any order.
        """
        if not (places := self.kept.find_places(batch.groups)):
            return []
        drawn, of_row = batch[SAMPLE_DRAWN].values.tolist(), batch[ROW_DRAWN].values.tolist()
        places = [place for place in places if 0 < drawn[place] == of_row[place]]
        if not places:
            return []
        begins = list(itertools.accumulate(drawn, initial=0))
        lengths = [min(drawn[place], MOST_TOKENS) for place in places]
        parts = [log_probs_A[begins[place] : begins[place] + size] for place, size in zip(places, lengths, strict=True)]
        # A copy: a compiled model may write its next results where these are.
        return [TrainedRows([batch.indices[place] for place in places], lengths, torch.cat(parts))]

    def write(self, found: Sequence[TrainedRows], *, step: int, lineage: int, time_s: float) -> None:
        if not found or self._file.closed:
            return
        values = iter(rounded(torch.cat([rows.log_probs_A for rows in found]).tolist()))  # one transfer
        said = {"step": step, "lineage": lineage, "time_s": round(time_s, 3)}
        lines = [
            _encode({"index": index, **said, "log_probs": list(itertools.islice(values, size))})
            for rows in found
            for index, size in zip(rows.indices, rows.lengths, strict=True)
        ]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            logger.warning("log-probabilities: %s; this process writes no more", error)
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _encode(line: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(line) + b"\n"
    except (TypeError, UnicodeEncodeError):  # what users' code returned: a subclass of str, half a surrogate pair
        plain = json.dumps(line, ensure_ascii=False).encode(errors="replace")
        return _encoder.encode(json.loads(plain)) + b"\n"  # without what no reader takes, such as NaN


# Rows are short and many: in plain Python these take a tenth of the time of operations on small tensors.


def rounded(log_probs: Sequence[float]) -> list[float | None]:
    """Return log-probabilities with four decimals; None: not a number."""
    return [round(value * 1e4) / 1e4 if abs(value) < 1e8 else None for value in log_probs]


def version_spans(versions_A: Tensor) -> list[list[int]]:
    """Return [version, tokens] of each run of drawn tokens (int32 [A]) from the same weights, in response order."""
    return [[version, len(list(run))] for version, run in itertools.groupby(versions_A.tolist())]


def token_runs(rollout: FinishedRollout, tokenizer: Any) -> list[list[tuple[int, str]]]:
    """Return, per sample, (mask, text) of each run of tokens with one mask (1: trained), special tokens visible."""
    runs: list[list[tuple[int, str]]] = []
    drawn = zip(rollout.response_mask_T.tolist(), rollout.tokens_T.tolist(), strict=True)
    for length in rollout.sample_lengths:
        found = []
        for bit, part in itertools.groupby(itertools.islice(drawn, length), key=itemgetter(0)):
            found.append((bit, str(tokenizer.decode([token for _, token in part]))))
        runs.append(found)
    return runs
