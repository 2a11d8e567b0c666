"""Makes run directories as real runs leave them: dead letters, filtered groups, others that overtake, crashes, resumes.

Admission's own state machine says which groups there are; everything else is drawn at random.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncflow.checkpoint_files import CheckpointMeta, FileEntry, describe
from launcher.verify.records import ExpectedPrompts, Readers
from tq.refill import Refill, RemovalCause
from workers.admission.admission_state import AdmissionState
from workers.records.ledger_file import Ledger
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleConfig

Line = dict[str, Any]
NUM_PROMPTS = 7


def prompt_of(group: int) -> tuple[int, str]:
    """Return (epoch, prompt hash) of a group."""
    return group // NUM_PROMPTS, f"{group % NUM_PROMPTS:016x}"


def fake_readers(*, queue: Mapping[int, str] | None = None) -> Readers:
    """Return readers of what `MadeRun` writes."""

    def prompts(config: RunConfig, ledger: Ledger) -> ExpectedPrompts:
        return ExpectedPrompts({line.group: prompt_of(line.group) for _, line in ledger.trained})

    return Readers(
        saved_updates=lambda path: int((path / "updates").read_text()),
        saved_groups=lambda path: queue or {},
        prompts=prompts,
    )


@dataclass
class MadeRun:
    """A run that is made step by step.

    Attributes:
        schedule, num_updates: of the run.
        chance: decides everything that the schedule leaves open.
        ledger, metrics, updates: lines.
        checkpoints: step -> (lineage, updates).
        lineage, completed: where it stands.
    """

    schedule: ScheduleConfig
    num_updates: int
    chance: random.Random
    ledger: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)
    updates: list[Line] = field(default_factory=list)
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)
    lineage: int = 0
    completed: int = 0

    def start(self, num_steps: int) -> None:
        """Train so many steps, as one start of the run does."""
        trained = {line["group"] for line in self.ledger if "replaced_by" not in line}
        filtered = {line["group"] for line in self.ledger if "filtered" in line}
        state = AdmissionState(
            self.schedule, version=self.completed, last_step=10**6, trained=trained, filtered=filtered
        )
        open_groups: dict[int, int] = {}
        unwritten: list[Refill] = []
        for step in range(self.completed + 1, self.completed + num_steps + 1):
            for admitted in state.admit_steps():
                open_groups.update(dict.fromkeys((one.group for one in state.groups_of(admitted)), admitted))
            while self.chance.random() < 0.2:
                refill = self._dead_letter(state, open_groups, step)
                unwritten += [] if refill is None else [refill]
            groups = self._choose(step, open_groups)
            self._train(step, {group: open_groups.pop(group) for group in groups}, unwritten)
            unwritten = []
            state.note_published(step)
            if self.chance.random() < 0.3:
                self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        self.checkpoints[self.completed] = (self.lineage, len(self.updates))

    def resume(self) -> None:
        """Go back to some checkpoint, or to the beginning of everything when there is none."""
        step = self.chance.choice([*self.checkpoints])
        self.ledger, self.metrics, self.updates = (
            [line for line in lines if line["step"] <= step] for lines in (self.ledger, self.metrics, self.updates)
        )
        self.checkpoints = {saved: facts for saved, facts in self.checkpoints.items() if saved <= step}
        self.lineage, self.completed = self.lineage + 1, step

    def write(self, run_dir: Path) -> Path:
        """Write the run's directory; returns it."""
        run_dir.mkdir(parents=True, exist_ok=True)
        schedule = self.schedule.model_dump(mode="json")
        config = RunConfig(
            steps=1000,
            roles={"actor": 1},
            model={"path": "model"},
            data={"path": "data.jsonl"},
            schedule=schedule,
            rollout={"max_response_tokens": 4},
            algorithm={"name": "dapo"},
        )
        config.save(run_dir)
        for name, lines in (("ledger", self.ledger), ("metrics", self.metrics), ("updates", self.updates)):
            (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step, (lineage, updates) in self.checkpoints.items():
            saved = run_dir / "checkpoints" / f"step_{step:06d}" / "dcp"
            saved.mkdir(parents=True)
            (saved / "updates").write_text(str(updates))
            files = describe(saved.parent, ["dcp/updates"])
            _meta(step, lineage, files).write(saved.parent)
        return run_dir

    def _dead_letter(self, state: AdmissionState, open_groups: dict[int, int], step: int) -> Refill | None:
        late = self.schedule.lateness
        candidates = [group for group, admitted in open_groups.items() if admitted >= step - late]
        if not candidates:
            return None
        group = self.chance.choice(candidates)
        filtered = self.chance.random() < 0.6
        cause = RemovalCause("rewards", filtered=True) if filtered else RemovalCause("rewards", 5)
        admitted = state.refill_group(open_groups[group], group, cause)
        assert admitted is not None
        open_groups[admitted.group] = open_groups.pop(group)
        return state.list_refills()[-1]

    def _choose(self, step: int, open_groups: Mapping[int, int]) -> list[int]:
        batch = self.schedule.rollout_batch_size
        if not self.schedule.lateness:
            return [group for group, admitted in open_groups.items() if admitted == step]
        due = [group for group, admitted in open_groups.items() if admitted < step]
        others = [group for group in open_groups if group not in due]
        self.chance.shuffle(others)
        return due + others[: batch - len(due)]

    def _train(self, step: int, groups: Mapping[int, int], refills: list[Refill]) -> None:
        place = {"lineage": self.lineage, "step": step}
        for update in range(1, self.num_updates + 1):
            self.updates.append({**place, "update": update, "optimizer_updates": len(self.updates) + 1, "pid": 1})
        for refill in refills:
            self.ledger.append(
                {
                    **place, "admitted_step": refill.step, "group": refill.replaced,
                    "filtered" if refill.cause.filtered else "dead_letter": True,
                    "replaced_by": refill.group, "task": refill.cause.task, "deliveries": refill.cause.deliveries,
                    "time_s": 1.0,
                }
            )  # fmt: skip
        lines = [self._trained(step, group, admitted) for group, admitted in groups.items()]
        self.chance.shuffle(lines)
        self.ledger += [{**place, **line} for line in lines]
        self.metrics.append(
            {
                **place, "samples": self.schedule.step_rows, "num_updates": self.num_updates, "grad_norm": 1.0,
                "staleness_max": max(line["staleness"] for line in lines),
                "staleness_bound": self.schedule.staleness_bound,
            }
        )  # fmt: skip
        self.completed = step

    def _trained(self, step: int, group: int, admitted: int) -> Line:
        size = self.schedule.n_samples_per_prompt
        staleness = self.chance.randint(0, min(self.schedule.staleness_bound, step - 1))
        oldest = step - 1 - staleness
        epoch, prompt_hash = prompt_of(group)
        return {
            "admitted_step": admitted,
            "group": group,
            "epoch": epoch,
            "indices": list(range(group * size, (group + 1) * size)),
            "versions": [oldest, self.chance.randint(oldest, step - 1)],
            "staleness": staleness,
            "prompt_hash": prompt_hash,
            "token_hash": f"{self.chance.getrandbits(64):016x}",
            "time_s": 1.0,
        }


def make_run(seed: int, *, fill: str = "in_order", starts: int = 1, num_updates: int = 1) -> MadeRun:
    """Make a run of some steps; every start but the first goes on from a checkpoint."""
    chance = random.Random(seed)
    schedule = ScheduleConfig.model_validate(
        {
            "rollout_batch_size": chance.randint(2, 4),
            "n_samples_per_prompt": 2,
            "max_staleness": 2,
            "fill": fill,
        }
    )
    run = MadeRun(schedule, num_updates, chance)
    for number in range(starts):
        if number:
            run.resume()
        run.start(chance.randint(4, 6))
        run.save()
    return run


def _meta(step: int, lineage: int, files: dict[str, FileEntry]) -> CheckpointMeta:
    return CheckpointMeta(
        step=step,
        lineage=lineage,
        model_fingerprint="model",
        data_hash="data",
        num_ranks=1,
        saved_at=0.0,
        files=files,
    )
