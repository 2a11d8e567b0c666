"""A simulated role that trains: rounds, micro-batches, mini-batches of `workers.trainer`, in simulated time. Pure.

ask for rounds (two ahead of the one in work) -> columns, micro-batches -> the last round -> updates -> publish

A critic in a role of its own puts advantages after a round's columns, updates once the actor's last round is there,
and publishes nothing; the actor begins its next step when both are done with this one.
"""

from collections.abc import Callable, Sequence
from functools import partial

from launcher.plan.columns import work_s
from launcher.plan.task_queue import Formed
from launcher.plan.world import World
from tq.policies import Item, Want
from workers.rows import micro_batches
from workers.rows.micro_batches import MiniBatchAssigner
from workers.settings.dataflow import CRITIC_TRAIN, PlacedTask

_AHEAD = 2
"""Rounds that a rank asks for beyond those that it took: one that is read, one that waits (`ReadAhead`)."""


class Gang:
    """All replicas of the actor, or of a critic. Replicas that wait for each other at every micro-batch go as one."""

    def __init__(self, world: World, task: PlacedTask) -> None:
        """Args:
        world: it is in.
        task: that it serves.
        """
        self.task = task
        self._world = world
        scenario = world.scenario
        self._role = task.role
        self._replicas = scenario.workers[task.role]
        self._training = scenario.training[task.role]
        settings = self._training.settings
        self._together = task.role in scenario.times.in_step or not self._training.streams
        self._fused = [name for name in task.fused if name != CRITIC_TRAIN]
        rows = max(settings.micro_batch_size, scenario.schedule.n_samples_per_prompt)
        self._want = Want(rows * self._replicas, self._training.round_tokens * self._replicas, self._replicas)
        self._formed: list[Formed] = []
        self._asking_for = 1
        num_walkers = 1 if self._together else self._replicas
        self._walkers = [list(range(self._replicas))] if self._together else [[rank] for rank in range(self._replicas)]
        self._taken = [0] * num_walkers
        self._idle = [False] * num_walkers
        self._at_end = 0
        self._step = 0
        self.num_arrived = 0
        """Steps whose last round is there."""
        self.num_updated = 0
        """Steps whose updates are made."""
        self._arriving = self._assigner(0)
        self._kept: list[tuple[Formed, int]] = []

    def look(self) -> None:
        """Rows came: form the rounds that are asked for."""
        world = self._world
        queue = world.queues[self.task.name]
        while self._asking_for <= world.steps and len(self._formed) < max(self._taken) + _AHEAD:
            formed = queue.form(self._asking_for, self._want, world.now)
            if formed is None:
                return
            self._formed.append(formed)
            world.request(self._replicas)
            if formed.last:
                self._asking_for += 1
            for walker, idle in enumerate(self._idle):
                if idle and self._taken[walker] == len(self._formed) - 1:
                    self._idle[walker] = False
                    world.after(world.scenario.latency.fetch_s, partial(self._take, walker))

    def begin(self) -> None:
        """Begin the next step."""
        self._step += 1
        if self._step > self._world.steps:
            return
        self._at_end = 0
        self._kept = []
        self._arriving = self._assigner(0)
        for walker in range(len(self._walkers)):
            self._next(walker)

    def _next(self, walker: int) -> None:
        if self._taken[walker] < len(self._formed):
            formed = self._formed[self._taken[walker]]
            ready = formed.time + self._world.scenario.latency.fetch_s
            self._world.at(ready, lambda: self._take(walker))
        else:
            self._idle[walker] = True

    def _take(self, walker: int) -> None:
        """Compute a round."""
        world = self._world
        formed = self._formed[self._taken[walker]]
        self._taken[walker] += 1
        self.look()
        ranks = self._walkers[walker]
        slices = [_rows(formed.slices[rank]) for rank in ranks]
        columns_s = max(sum(self._column_s(name, rows) for name in self._fused) for rows in slices)
        train_s = 0.0
        if self._trains_now(walker, formed):
            train_s = self._train_s(slices)

        def columns() -> None:
            self._compute(ranks, self._fused[0] if self._fused else "", columns_s, train)

        def train() -> None:
            for rows in slices if self.task.outputs else ():
                world.after(world.scenario.latency.put_s, partial(world.put, self.task.name, rows))
            self._compute(ranks, "forward_backward", train_s, lambda: self._after_round(walker, formed.last))

        world.compute(world.scenario.latency.round_s, columns, workers=len(ranks))

    def _compute(self, ranks: Sequence[int], name: str, seconds: float, done: Callable[[], None]) -> None:
        world, begin = self._world, self._world.now
        if not seconds:
            done()
            return

        def ended() -> None:
            for rank in ranks:
                world.span(f"{self._role}-{rank}", name, begin, world.now, step=self._step)
            done()

        world.compute(seconds, ended, workers=len(ranks))

    def _trains_now(self, walker: int, formed: Formed) -> bool:
        """Whether a round is of the first mini-batch; the others are kept, or all."""
        if self._training.streams:
            return True
        total = sum(len(item.rows) for part in formed.slices for item in part)
        self._kept.append((formed, total))
        return self._arriving.assign(total) == 0 and not self._training.whole_step

    def _after_round(self, walker: int, last: bool) -> None:
        if not last:
            self._next(walker)
            return
        self._at_end += 1
        if self._at_end == len(self._walkers):
            self.num_arrived = self._step
            self._world.arrived(self)

    def update(self) -> None:
        """All rounds are there: the updates of the step, one after the other."""
        settings = self._training.settings
        num_mini_batches = settings.num_mini_batches
        total_s = 0.0
        for number in range(settings.ppo_epochs if self._kept else 1):
            assigner = self._assigner(number)
            seconds = [0.0] * num_mini_batches
            for formed, total in self._kept:
                place = assigner.assign(total)
                if (number, place) != (0, 0) or self._training.whole_step:
                    seconds[place] += self._train_s([_rows(part) for part in formed.slices])
            total_s += sum(seconds) + num_mini_batches * self._world.scenario.times.update_s[self._role]
        done = self._publish if self._role == "actor" else self._updated
        self._compute(range(self._replicas), "optimizer", total_s, done)

    def _publish(self) -> None:
        world = self._world
        published = world.now + world.scenario.latency.publish_s
        world.span("actor-0", "publish weights", world.now, published, step=self._step)
        world.at(published, self._published)

    def _published(self) -> None:
        world = self._world
        rows = [row for formed in self._formed[: self._taken[0]] for part in formed.slices for row in _rows(part)]
        world.trained.append(sum(world.tokens[row] - world.scenario.turns.read_tokens for row in rows))
        world.publish(self._step)
        self._updated()

    def _updated(self) -> None:
        self._formed = self._formed[self._taken[0] :]
        self._taken = [0] * len(self._taken)
        self.num_updated = self._step
        self._world.updated(self)

    def _column_s(self, task: str, rows: list[int]) -> float:
        size = self._training.rows_per_call
        return sum(work_s(self._world, task, rows[start : start + size]) for start in range(0, len(rows), size))

    def _train_s(self, slices: Sequence[list[int]]) -> float:
        """Return how long the micro-batches of a round take, each as long as its slowest replica (s)."""
        cuts = [self._micro_batches(rows) for rows in slices]
        return sum(
            max((part[number] for part in cuts if number < len(part)), default=0.0)
            for number in range(max(map(len, cuts)))
        )

    def _micro_batches(self, rows: list[int]) -> list[float]:
        """Return how long each micro-batch of a replica takes (s)."""
        world = self._world
        training, times = self._training.settings, world.scenario.times
        size, prompt = world.scenario.schedule.n_samples_per_prompt, times.prompt_tokens
        if not training.max_tokens_per_micro_batch:
            cuts = micro_batches.cut_by_rows(range(len(rows)), len(rows), training.micro_batch_size) if rows else []
        else:
            shared = training.shared_prompt
            prompts = [row // size if shared else row for row in rows]
            lengths = [(max(1, prompt), world.tokens[row]) for row in rows]
            cuts = list(micro_batches.cut_by_tokens(prompts, lengths, training.max_tokens_per_micro_batch))
        seconds = []
        for cut in cuts:
            lengths = [(prompt, world.tokens[rows[position]]) for position in cut]
            groups = {rows[position] // size for position in cut} if training.shared_prompt else cut
            tokens = prompt * len(groups) + sum(length for _, length in lengths)
            squares = sum((prompt + length) ** 2 for _, length in lengths)
            seconds.append(times.train[self._role].seconds(tokens, squares))
        return seconds

    def _assigner(self, pass_number: int) -> MiniBatchAssigner:
        scenario = self._world.scenario
        number = self._training.settings.num_mini_batches
        seed = f"{scenario.seed}/{self._step}/{pass_number}"
        return MiniBatchAssigner(num_mini_batches=number, size=scenario.schedule.step_rows // number, seed=seed)


def _rows(items: Sequence[Item]) -> list[int]:
    return [row for item in items for row in item.rows]
