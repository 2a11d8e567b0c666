"""Which rows the ranks of a gang get, round by round. Pure."""

from collections.abc import Callable

from tq.control.rounds import RankSlice, Round, Rounds
from tq.control.task_state import TaskState
from tq.messages import Held
from tq.policies import Fifo, Offer, Want, choose


class RoundAssigner:
    """Assigns the rounds of one task to the ranks of a gang.

    A step is a partition, unless the task's steps take rows of several partitions (`TaskSpec.steps`). A round has rows
    of one partition. It is chosen once; all ranks get the same round, however often they ask. After a restart of the
    controller the ranks say what they hold: the step and round, and how large that round was. Slices that no rank holds
    are assigned again before anything new is.
    """

    def __init__(self, task: TaskState) -> None:
        self.ranks: dict[str, int] = {}  # consumer -> the newest step of which it got a slice
        self._task = task
        self._spec = task.spec.steps
        self._version = 0
        self._steps: dict[int, Rounds] = {}
        self._restored = False  # whether slices of an earlier incarnation may be missing

    def published(self, version: int) -> None:
        """Weights of step `version` exist, so that step is over."""
        self._version = max(self._version, version)
        for step in [step for step in self._steps if step <= self._version]:
            del self._steps[step]
        if self._spec is not None:
            self._task.changed.add(version)  # wake ranks that wait for its rounds: it is over

    def over(self, step: int) -> bool:
        """Whether the step was trained, or all rows of the partition are done."""
        return self._task.over(step) if self._spec is None else step <= self._version

    def exhausted(self, step: int) -> bool:
        """Whether all rows of the step were handed out."""
        if self._spec is None:
            return self._task.exhausted(step)
        return self.over(step) or (step in self._steps and self._steps[step].num_rows >= self._spec.num_rows)

    def rounds(self, step: int) -> Rounds:
        return self._task.partition(step).rounds if self._spec is None else self._steps.setdefault(step, Rounds())

    def known_rounds(self, step: int) -> Rounds | None:
        """Return the step's rounds, or None if nothing is known of the step."""
        if self._spec is not None:
            return self._steps.get(step)
        part = self._task.partitions.get(step)
        return None if part is None else part.rounds

    def restore(self, one: Held, owner: str) -> None:
        """A rank says that it holds a slice that an earlier incarnation assigned."""
        self.ranks[owner] = max(one.step, self.ranks.get(owner, one.step))
        step = one.partition if self._spec is None else one.step
        if not self.over(step):
            self.rounds(step).restore(one)
            self._restored = True

    def keeps_leases(self, owner: str) -> bool:
        """Whether a consumer's leases, or its slices of an unfinished step, outlive its channel."""
        if not self._task.spec.keeps_leases:
            return False
        step = self.ranks.get(owner)
        held = next(self._task.leases.of(owner), None)
        return held is not None or (step is not None and not self.over(step))

    def round(self, step: int, index: int, want: Want, token: Callable[[], int]) -> Round | None:
        """Return round `index`, at most one beyond the formed ones; None: it can neither be full nor hold the rest yet.

        `want` is that of all ranks together; `token` makes a lease token.
        """
        rounds = self.rounds(step)
        assert index <= len(rounds.formed), "the caller checks that no round is skipped"
        whole = not self._restored or self._assign_missing(token)
        if index < len(rounds.formed):
            return rounds.formed[index]
        if not whole:
            return None
        if self._spec is None:
            return self._round_of_partition(step, rounds, want, token)
        chosen = choose(self._spec, step, rounds.num_rows, self._offers(), want.num_rows)
        if chosen is None:
            return None
        formed = self._form(rounds, chosen.partition, Want(chosen.num_ready, 0, want.num_ranks), token)
        formed.last = rounds.num_rows >= self._spec.num_rows
        return formed

    def _round_of_partition(self, number: int, rounds: Rounds, want: Want, token: Callable[[], int]) -> Round | None:
        task, queue = self._task, self._task.partition(number).queue
        rest = task.rest_ready(number)
        full = queue.num_rows >= want.num_rows or 0 < want.token_budget <= queue.num_tokens
        if not queue.num_rows or not (rest or (full and not task.spec.barrier)):
            return None
        if task.spec.in_order and not task.front_ready(number, want.num_rows):
            return None
        formed = self._form(rounds, number, want, token)
        formed.last = rest and not queue.num_rows
        return formed

    def _form(self, rounds: Rounds, partition: int, want: Want, token: Callable[[], int]) -> Round:
        """Add a round of what a partition has ready."""
        items = self._task.partition(partition).queue.pick(self._task.picking, want)
        rank_slices = self._task.spec.policy.assign(items, rounds.loads(want.num_ranks))
        formed = rounds.form(rank_slices, token, partition=partition)
        for rank_slice in formed.rank_slices:
            self._hold(rank_slice, partition)
        return formed

    def _hold(self, rank_slice: RankSlice | None, partition: int) -> None:
        if rank_slice is not None and rank_slice.rows:
            self._task.lease(rank_slice.token, partition, rank_slice.rows)

    def _offers(self) -> list[Offer]:
        """Return what partitions have to give, oldest first."""
        assert self._spec is not None
        offers = []
        trained = self._version - self._spec.lateness
        for number, part in sorted(self._task.partitions.items()):
            ready = part.queue.num_rows
            # Of old partitions only ready rows count: a restarted controller may have forgotten that the others were
            # trained.
            left = ready if number <= trained else self._task.num_unassigned(number)
            if left:
                offers.append(Offer(number, ready, left))
        return offers

    def _assign_missing(self, token: Callable[[], int]) -> bool:
        """Complete the rounds of an earlier incarnation, the oldest first; returns whether all are complete."""
        steps = self._steps if self._spec is not None else {k: part.rounds for k, part in self._task.partitions.items()}
        waiting: set[int] = set()  # partitions whose rows an older round waits for
        for _, rounds in sorted(steps.items()):
            for known in rounds.formed:
                if known.missing and (known.partition in waiting or not self._assign_round(known, token)):
                    waiting.add(known.partition)
        self._restored = bool(waiting)
        return not waiting

    def _assign_round(self, known: Round, token: Callable[[], int]) -> bool:
        """Assign the missing slices of a round once its rows are ready again; returns whether none is missing."""
        queue, missing = self._task.partition(known.partition).queue, known.missing
        left = known.total_rows - sum(rank_slice.num_rows for rank_slice in known.rank_slices if rank_slice is not None)
        if queue.num_rows < left:
            if not self._task.rest_ready(known.partition):
                return False
            left = queue.num_rows  # the other rows left the partition with their group
        for position, rank in enumerate(missing):
            size = -(-left // (len(missing) - position))
            rank_slice = RankSlice.of(token(), queue.pick(Fifo(), Want(size)) if size > 0 else [])
            left -= rank_slice.num_rows
            known.rank_slices[rank] = rank_slice
            known.round_rows = max(known.round_rows, rank_slice.num_rows)
            self._hold(rank_slice, known.partition)
        self._task.changed.add(known.partition)  # a rank that is a round ahead waits for this
        return True
