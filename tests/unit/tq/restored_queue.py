"""A run from a start to a crash, as random tests see it: admission, units, a controller, and those who work on rows.

Real states, no processes. A checkpoint is what the trainer had done by a step and a snapshot of the units that was cut
somewhat later; another life goes on from it, with another number of units.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from asyncflow.process import ServiceThreads
from tq import Column, TaskSpec
from tq.backends.backend import MemoryBackend
from tq.control.events import Answer, DeadlinePassed, Instruction
from tq.control.state import ControlState
from tq.messages import (
    FetchRound,
    FetchRows,
    LeaseGrant,
    NoRows,
    NoRowsReason,
    OpenPartition,
    OutputsWritten,
    PublishVersion,
    RowsAccepted,
    RowsCreated,
)
from tq.policies import StepSpec
from tq.snapshot import write_manifest
from tq.unit.block import Block, BlockStore
from tq.unit.snapshots import SnapshotWriter
from tq.unit.unit_state import UnitState
from tq.wire import describe
from workers.admission.admission_state import AdmissionState, AdmittedGroup
from workers.admission.admitter import KeepRule, PromptAdmitter, SavedRows
from workers.settings.schedule import ScheduleConfig

FIRST = frozenset({"prompts"})
GENERATED = frozenset({"responses", "versions"})
JUDGED = frozenset({"score"})
LIVES = 100
"""A response is its row times this, plus the life that generated it."""


def tasks_of(schedule: ScheduleConfig) -> tuple[TaskSpec, ...]:
    steps = StepSpec(schedule.step_rows, schedule.lateness) if schedule.lateness else None
    return (
        TaskSpec("rollout", FIRST, GENERATED, whole_groups=True, max_staleness=schedule.gate_staleness),
        TaskSpec("judge", FIRST | GENERATED, JUDGED),
        TaskSpec("train", FIRST | GENERATED | JUDGED, whole_groups=True, keeps_leases=True, steps=steps),
    )


@dataclass(frozen=True)
class Saved:
    """A checkpoint: lines (step, group) of the ledger up to its step, and a snapshot, if the units were cut in time."""

    step: int
    ledger: tuple[tuple[int, int], ...]
    snapshot: Path


class Unit:
    """A storage unit's rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = UnitState()
        self.store = BlockStore(MemoryBackend(), None, prefix=name, token_columns=())

    def block(self, rows: Sequence[int], columns: Mapping[str, Column]) -> Block | None:
        headers, payload = describe(columns, narrow=True)
        data = torch.zeros(payload.num_bytes, dtype=torch.uint8)
        payload.write(data)
        return self.store.add_block(rows, headers, data)

    def snapshot(self, directory: Path, *, after_partition: int) -> list[str]:
        cut = self.state.cut_rows(after_partition=after_partition, forget_acks_of=["train"])
        files = SnapshotWriter(directory, self.name, self.store).write(cut.rows, threading.Event())[0]
        self.state.accounting.unpin_blocks(cut.blocks)
        return files


class Life:
    """A run from its start, or from a checkpoint, until it is dropped."""

    def __init__(
        self, random: Random, schedule: ScheduleConfig, root: Path, *, last_step: int, saved: Saved, starts: list[int]
    ) -> None:
        """Args:
        random, schedule, last_step, root: of the run; snapshots go into `root`.
        saved: the checkpoint.
        starts: steps that all lives so far began after, this one's at the end.
        """
        self.random = random
        self.starts = starts
        self.schedule = schedule
        self.tasks = tasks_of(schedule)
        self.units = {f"u{k}": Unit(f"u{k}") for k in range(random.randint(1, 4))}
        self.unit_of: dict[int, Unit] = {}
        self.state = ControlState(self.tasks, version=saved.step, row_limit=schedule.live_rows)
        self.requests = 0
        self.answers: dict[int, Any] = {}
        self.version = self.held_version = saved.step
        self.ledger = list(saved.ledger)
        self.versions: dict[int, tuple[int, int]] = {}
        self.born: dict[int, int] = {}
        self.leases: list[tuple[LeaseGrant, int]] = []
        self.round = 0
        self.due: tuple[Saved, int] | None = None
        self.num_kept = 0
        self.root = root
        trained = {group for _, group in self.ledger}
        rule = KeepRule(saved.step, schedule.gate, self.tasks, "rollout", FIRST, lambda *_: FIRST | GENERATED | JUDGED)
        kept = SavedRows(saved.snapshot, rule, warn=self.warned) if saved.snapshot.exists() else None
        self.admitter = PromptAdmitter(
            AdmissionState(schedule, version=saved.step, last_step=last_step, trained=trained),
            self,  # type: ignore[arg-type]
            self,
            num_units=len(self.units),
            save=lambda mark: None,
            threads=ServiceThreads("controller-0"),  # it never starts
            saved=kept,
        )
        self.admitter._admit_steps()

    # What admission calls

    def columns(self, groups: Sequence[AdmittedGroup]) -> Mapping[str, Column]:
        rows = [row for group in groups for row in group.rows]
        return {"prompts": Column.of_scalars(torch.tensor(rows))}

    def open_partition(self, partition: int, num_rows: int) -> None:
        self.apply(OpenPartition(partition, num_rows))

    def put_rows(self, columns: Mapping[str, Column], *, partition: int, rows: Sequence[int], **fields: Any) -> None:
        unit = self.random.choice(list(self.units.values()))
        assert columns["prompts"].values.tolist() == list(rows), "a row came back as another one"
        commits = fields.get("commits", {})
        if commits:
            self.num_kept += len(rows)
            for row, response in zip(rows, columns["responses"].values.tolist(), strict=True):
                assert response // LIVES == row
                self.born[row] = response % LIVES
            oldest, newest = columns["versions"].extremes()
            self.versions.update(zip(rows, zip(oldest.tolist(), newest.tolist(), strict=True), strict=True))
        groups, size = fields["groups"], fields["group_size"]
        block = unit.block(rows, columns)
        assert (
            unit.state.create_rows(rows, block, partition=partition, groups=groups, group_size=size, commits=commits)
            is None
        )
        created = RowsCreated(
            unit.name, partition, list(rows), list(groups), sorted(columns), [1] * len(rows), 1, size, 60, dict(commits)
        )
        reply = self.ask(created)
        assert isinstance(reply, RowsAccepted) and not reply.commits, reply
        unit.state.confirm(rows)
        self.unit_of.update(dict.fromkeys(rows, unit))

    @staticmethod
    def warned(text: str) -> None:
        raise AssertionError(text)

    # What happens

    def act(self) -> None:
        """Something happens, of what can."""
        often, seldom = [self.generate, self.finish, self.judge], [self.train, self.train, self.train, self.cut]
        self.random.choice(often * 3 + seldom)()

    def generate(self) -> None:
        """An instance leases prompts, with weights that may be old."""
        reply = self.ask(FetchRows("rollout", "r", self.random.randint(1, 6), self.held_version, 60.0))
        if isinstance(reply, LeaseGrant):
            self.leases.append((reply, self.held_version))
        elif reply.reason is NoRowsReason.NEWER_VERSION or self.random.random() < 0.3:
            self.held_version = self.version

    def finish(self) -> None:
        """Some responses of a lease end; the weights may have been swapped meanwhile."""
        if not self.leases:
            return
        lease, version = self.leases.pop(self.random.randrange(len(self.leases)))
        if any(group % 3 == 0 for group in lease.groups) and self.random.random() < 0.9:
            self.leases.append((lease, version))  # long responses
            return
        self.random.shuffle(lease.rows)
        done = lease.rows[: self.random.randint(1, len(lease.rows))]
        newest = {row: self.random.randint(version, self.held_version) for row in done}
        life = len(self.starts) - 1
        self.born.update(dict.fromkeys(done, life))
        self.write(
            "rollout",
            lease.token,
            done,
            lambda rows: {
                "responses": Column.of_scalars(torch.tensor([row * LIVES + life for row in rows])),
                "versions": Column.of_rows([torch.tensor([version, newest[row]]) for row in rows]),
            },
        )
        self.versions.update({row: (version, newest[row]) for row in done})
        lease.rows = lease.rows[len(done) :]
        if lease.rows:
            self.leases.append((lease, version))

    def judge(self) -> None:
        """Another task reads responses."""
        reply = self.ask(FetchRows("judge", "j", self.random.randint(1, 6), 0, 60.0))
        if isinstance(reply, LeaseGrant):
            self.write("judge", reply.token, reply.rows, lambda rows: {"score": Column.of_scalars(torch.tensor(rows))})

    def train(self) -> None:
        """The trainer takes a round of its step; with the last one the step is done."""
        step, size = self.version + 1, self.schedule.n_samples_per_prompt
        reply = self.ask(FetchRound("train", "t", step, self.round, size, 0, 1, 60.0))
        if isinstance(reply, NoRows):
            assert reply.reason is NoRowsReason.DEADLINE, reply.reason
            return
        self.round += 1
        for row in reply.rows:
            oldest, newest = self.versions[row]
            assert newest < step and step - 1 - oldest <= self.schedule.staleness_bound
            assert newest <= min(self.starts[self.born[row] + 1 :], default=step), "of weights that were abandoned"
        self.write("train", reply.token, reply.rows, lambda _: {})
        self.ledger += [(step, group) for group in sorted(set(reply.groups))]
        if reply.last:
            self.finish_step(step)

    def finish_step(self, step: int) -> None:
        self.version, self.round = step, 0
        self.apply(PublishVersion(step))
        self.admitter._handle_event(step)
        if self.random.random() < 0.5:
            path = self.root / f"{len(list(self.root.iterdir()))}"
            self.due = Saved(step, tuple(self.ledger), path), step - self.schedule.lateness

    def cut(self) -> None:
        """The snapshot of a checkpoint that is due is taken, while all go on; then the checkpoint is there."""
        if self.due is None:
            return
        (saved, after), self.due = self.due, None
        saved.snapshot.mkdir()
        files = [file for unit in self.units.values() for file in unit.snapshot(saved.snapshot, after_partition=after)]
        write_manifest(saved.snapshot, files, num_rows=0)
        self.saved = saved

    saved: Saved | None = None
    """The newest checkpoint."""

    # Plumbing

    def write(self, task: str, token: int, rows: Sequence[int], columns: Any) -> None:
        by_unit: dict[Unit, list[int]] = {}
        for row in rows:
            by_unit.setdefault(self.unit_of[row], []).append(row)
        for unit, part in by_unit.items():
            values = columns(part)
            assert unit.state.commit_outputs(task, token, part, unit.block(part, values) if values else None) is None
            self.apply(OutputsWritten(unit.name, task, part, sorted(values), [1] * len(part), 1))
        for unit in by_unit:
            unit.state.set_tasks([spec.name for spec in self.tasks])

    def ask(self, event: Any) -> Any:
        """Return the answer; who would have to wait gives up."""
        self.requests += 1
        self.apply(event, self.requests)
        if self.requests not in self.answers:
            self.apply(DeadlinePassed(self.requests))
        return self.answers.pop(self.requests)

    def apply(self, event: Any, request: int = 0) -> None:
        instructions: list[Instruction] = self.state.handle(event, request)
        for instruction in instructions:
            assert isinstance(instruction, Answer), instruction
            self.answers[instruction.request] = instruction.reply
