"""Rows of a run in the hands of a process outside: what it puts is checked before the run sees it."""

import contextlib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncflow.errors import ConfigError, LeaseFenced
from tq.client.arguments import check_rows_of
from tq.client.lease import Lease, LeaseCalls
from tq.columns import Column
from weightsync.version import Version
from workers.rewards.base import as_number
from workers.rows.rows import drawn_per_row, responses_of
from workers.settings.dataflow import DRAWN_COLUMNS, REWARD_PARTS, SAMPLE_COLUMNS, SCALAR_COLUMNS

_DTYPES = {
    **dict.fromkeys(DRAWN_COLUMNS, torch.float32),
    "tokens": torch.int64,
    "sample_lengths": torch.int32,
    "response_mask": torch.uint8,
    "versions": torch.int32,
    "correct": torch.bool,
    "truncated": torch.bool,
}
"""Element types; of all other columns float32."""


@dataclass(frozen=True)
class OutsideTask:
    """A task of the queue, as a process outside sees it.

    Attributes:
        inputs, outputs: columns that it reads, and that a put must have.
        needs_version: its rows are for consumers that say which weights they hold.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs_version: bool


class OutsideLease(Lease):
    """A lease whose puts are checked, so that a mistake outside costs an error there and not the run."""

    def __init__(self, calls: LeaseCalls, lease: Lease, task: OutsideTask, held: Version, *, bound: int) -> None:
        """Args:
        calls: the client's data plane.
        lease: as it was fetched.
        task: its own.
        held: weights that the rows were asked for with.
        bound: of staleness.
        """
        super().__init__(calls, lease.grant, lease.batch.columns)
        self._task = task
        self._held = held
        self._bound = bound

    @property
    def responses(self) -> list[Tensor]:
        """The drawn tokens of each row, int64; for tasks that read what was generated."""
        return responses_of(self.read(["tokens", "response_mask"]))

    def put(self, columns: Mapping[str, Any], rows: Sequence[int] | None = None) -> bool:
        """Write all output columns; see `Lease.put`.

        Args:
            columns: name -> a number per row, or a tensor or list per row of what has one per token; `reward_parts`: a
                dict per row, of names to finite numbers.
            rows: some of the lease's.

        Raises:
            ConfigError: a column is missing, is no output, or does not fit; nothing was put.
        """
        name, outputs = self.grant.task, self._task.outputs
        given = list(columns.keys())  # of a TensorDict, too
        if set(given) != set(outputs):
            raise ConfigError(f"{name}: a put of columns {' '.join(given) or 'none'}; give {' '.join(outputs)}")
        packed = {column: _packed(column, columns[column]) for column in outputs}
        rows = self.open_rows if rows is None else check_rows_of(self.grant, rows)
        if set(SAMPLE_COLUMNS) <= set(packed):
            self._check_samples(packed)
        elif rows and not set(packed).isdisjoint(DRAWN_COLUMNS):
            with contextlib.suppress(LeaseFenced):  # the put below is refused, too
                self._check_drawn(packed, self._drawn(rows))
        if "rewards" in packed and packed["rewards"].values.isinf().any():
            raise ConfigError(f"{name}: rewards are not finite as float32; give numbers, NaN where scoring failed")
        return super().put(packed, rows)

    def _check_samples(self, columns: Mapping[str, Column]) -> None:
        tokens, lengths, mask = (columns[name] for name in SAMPLE_COLUMNS)
        drawn = [int(row.sum()) for row in mask.rows()]
        sums = [int(row.sum()) for row in lengths.rows()]
        for name, numbers in (("response_mask", mask.lengths.tolist()), ("sample_lengths (their sums)", sums)):
            self._check_numbers(name, numbers, tokens.lengths.tolist(), of="tokens")
        if (lengths.values < 1).any():
            raise ConfigError(f"{self.grant.task}: sample_lengths are less than 1; a sample has tokens")
        self._check_drawn(columns, drawn)
        if not all(drawn):
            raise ConfigError(f"{self.grant.task}: a row has no drawn token; response_mask is 1 where one was drawn")
        oldest, newest = (int(of(columns["versions"].values)) for of in (torch.min, torch.max))
        least = max(0, self.partition - 1 - self._bound)
        if oldest < least or newest > self._held.step:
            raise ConfigError(
                f"{self.grant.task}: versions {oldest} to {newest} for step {self.partition}, which takes {least} to "
                f"{self._held.step} (what the rows were asked for with); generate with newer weights"
            )

    def _drawn(self, rows: Sequence[int]) -> list[int]:
        """Return how many tokens were drawn in each of these rows, which others generated."""
        place = {row: number for number, row in enumerate(self.rows)}
        return drawn_per_row(self.read(["response_mask"]).select([place[row] for row in rows])).tolist()

    def _check_drawn(self, columns: Mapping[str, Column], drawn: list[int]) -> None:
        for name in DRAWN_COLUMNS:
            if name in columns:
                self._check_numbers(name, columns[name].lengths.tolist(), drawn, of="drawn tokens")
                if not columns[name].values.isfinite().all():
                    raise ConfigError(f"{self.grant.task}: {name} are not finite; were the weights loaded?")

    def _check_numbers(self, name: str, numbers: list[int], wanted: list[int], *, of: str) -> None:
        if numbers != wanted:
            raise ConfigError(f"{self.grant.task}: {name} of {numbers} for {wanted} {of}; give one for each")


def _packed(name: str, values: Any) -> Column:
    dtype = _DTYPES.get(name, torch.float32)
    try:
        if name == REWARD_PARTS:
            return Column.of_values([_reward_parts(row) for row in values])
        if name in (*SAMPLE_COLUMNS, *DRAWN_COLUMNS):
            rows = [torch.as_tensor(row) for row in values]
            if name == "response_mask" and any((row != row.bool()).any() for row in rows):
                raise ValueError("it has values besides 0 and 1")  # seen before they are cut to bytes
            return Column.of_rows([row.to("cpu", dtype).reshape(-1) for row in rows])
        return Column.of_scalars(torch.as_tensor(values).to("cpu", dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        per = "a number per row" if name in SCALAR_COLUMNS else "a tensor or list per row"
        raise ConfigError(f"column {name}: {error}; give {per} ({dtype})") from error


def _reward_parts(row: Any) -> dict[str, float]:
    """Return a row's parts as plain numbers, which the trainer adds up.

    Raises:
        ConfigError: they are none.
    """
    try:
        parts = {name: as_number(value) for name, value in row.items()}
    except Exception:  # noqa: BLE001  the boundary to a user's objects
        parts = {"": math.nan}
    if not all(isinstance(name, str) and math.isfinite(value) for name, value in parts.items()):
        raise ConfigError(f"column {REWARD_PARTS}: {reprlib.repr(row)}; give a dict of names to finite numbers per row")
    return parts
