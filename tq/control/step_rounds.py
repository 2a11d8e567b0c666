"""The rounds of a gang whose steps are not partitions: `StepFill` says where each one comes from. Pure.

A round has rows of one partition. It is chosen once; all ranks, and whoever asks again, get the same. After a restart
of the controller the ranks say what they hold: with which step and round it came, and how large that round was. Shares
that nobody came for are dealt again before anything new is.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tq.control.rounds import Round, Rounds, Share
from tq.control.step_fill import Offer, StepFill
from tq.messages import Held
from tq.policies import Fifo, Want
from tq.task_spec import StepSpec

if TYPE_CHECKING:
    from tq.control.task_state import TaskState


class StepRounds:
    """Part of a `TaskState`; stands in for it where rounds are asked for by step."""

    def __init__(self, task: "TaskState", spec: StepSpec) -> None:
        """Args:
        task: whose partitions and leases.
        spec: of the steps.
        """
        self._task = task
        self._spec = spec
        self._fill = StepFill(spec)
        self._version = 0
        self._steps: dict[int, Rounds] = {}
        self._restored = False
        """Whether shares of an earlier incarnation may be missing."""

    def published(self, version: int) -> None:
        """Weights of step `version` exist, so that step is over."""
        self._version = max(self._version, version)
        for step in [step for step in self._steps if step <= self._version]:
            del self._steps[step]

    def over(self, step: int) -> bool:
        """Whether the step was trained."""
        return step <= self._version

    def exhausted(self, step: int) -> bool:
        """Whether all rows of the step were handed out."""
        return self.over(step) or (step in self._steps and self._steps[step].num_rows >= self._spec.num_rows)

    def rounds(self, step: int) -> Rounds:
        """Return the rounds of a step."""
        return self._steps.setdefault(step, Rounds())

    def known_rounds(self, step: int) -> Rounds | None:
        """Return them if there are any."""
        return self._steps.get(step)

    def restore_round(self, one: Held) -> None:
        """A rank says that it holds a share that an earlier incarnation dealt."""
        if not self.over(one.step):
            self.rounds(one.step).restore(one)
            self._restored = True

    def round(self, step: int, index: int, want: Want, token: Callable[[], int]) -> Round | None:
        """Return a round, formed when a partition has enough for it; see `TaskState.round`."""
        rounds = self.rounds(step)
        if index < len(rounds.formed):
            return rounds.formed[index]
        assert index == len(rounds.formed), "the caller checks that no round is skipped"
        if self._restored and not self._deal_missing(token):
            return None
        chosen = self._fill.choose(step, rounds.num_rows, self._offers(), want.num_rows)
        if chosen is None:
            return None
        formed = self._task.form(rounds, chosen.partition, Want(chosen.num_ready, 0, want.num_ranks), token)
        formed.last = rounds.num_rows >= self._spec.num_rows
        return formed

    def deal_again(self, step: int, index: int, num_rows: int, token: Callable[[], int]) -> None:
        """Give ranks that an earlier incarnation gave nothing their shares; see `TaskState.deal_again`."""
        self._deal_round(self.rounds(step).formed[index], token)

    def _offers(self) -> list[Offer]:
        """Return what partitions have to give, oldest first.

        Of old ones only what is ready counts: a restarted controller may have forgotten that their rows were trained.
        """
        offers = []
        trained = self._version - self._spec.lateness
        for number, part in sorted(self._task.partitions.items()):
            ready = part.queue.num_rows
            left = ready if number <= trained else self._task.num_undealt(number)
            if left:
                offers.append(Offer(number, ready, left))
        return offers

    def _deal_missing(self, token: Callable[[], int]) -> bool:
        """Complete the rounds of an earlier incarnation; returns whether all are."""
        formed = [round_ for _, rounds in sorted(self._steps.items()) for round_ in rounds.formed]
        self._restored = not all(self._deal_round(round_, token) for round_ in formed if round_.missing)
        return not self._restored

    def _deal_round(self, known: Round, token: Callable[[], int]) -> bool:
        """Deal the missing shares of a round once what they had is ready again; returns whether none is missing."""
        part = self._task.partition(known.partition)
        missing = known.missing
        left = known.total_rows - sum(share.num_rows for share in known.shares if share is not None)
        if part.queue.num_rows < left:
            return False
        for position, rank in enumerate(missing):
            size = -(-left // (len(missing) - position))
            share = Share.of(token(), part.queue.pick(Fifo(), Want(size)) if size > 0 else [])
            left -= share.num_rows
            known.shares[rank] = share
            known.round_rows = max(known.round_rows, share.num_rows)
            self._task.hold(share, known.partition)
        return True
