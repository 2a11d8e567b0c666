"""A simulated worker of a role that only computes columns (`workers.tasks.task_worker`), in simulated time. Pure."""

from launcher.plan.world import World
from tq.policies import Item
from workers.settings.dataflow import PlacedTask


class ColumnWorker:
    """Fetch, compute, put."""

    def __init__(self, world: World, task: PlacedTask, number: int) -> None:
        """Args:
        world: it is in.
        task: that it serves.
        number: of the copy.
        """
        self._name = f"{task.role}-{number}-0"
        self._world = world
        self._task = task
        self._version = 0
        self._ready = 0
        self._needed = 0

    def start(self) -> None:
        """Ask for rows."""
        self._ask()

    def weights_arrived(self, version: int) -> None:
        """A version is ready to be loaded."""
        self._ready = version
        if self._needed > self._version and version >= self._needed:
            self._version = version
            self._ask()

    def _ask(self) -> None:
        want = self._world.scenario.rows_per_fetch[self._task.role]
        self._world.fetch(self._task.name, want, self._version, self._granted, self._outdated)

    def _outdated(self, version: int) -> None:
        self._needed = version
        if self._ready >= version:
            self._version = self._ready
            self._world.after(0.0, self._ask)

    def _granted(self, partition: int, items: list[Item]) -> None:
        world = self._world
        rows = [row for item in items for row in item.rows]
        start = world.now + world.scenario.latency.fetch_s
        seconds = sum(work_s(world, name, rows) for name in (*self._task.fused, self._task.name))

        def computed() -> None:
            world.span(self._name, self._task.name, start, world.now, step=partition, rows=len(rows))
            world.after(world.scenario.latency.put_s, done)

        def done() -> None:
            world.put(self._task.name, rows)
            self._ask()

        world.at(start, lambda: world.compute(seconds, computed))


def work_s(world: World, task: str, rows: list[int]) -> float:
    """Return the time of a task for rows, in one call (s)."""
    times = world.scenario.times
    work = times.tasks.get(task)
    if work is None or not rows:
        return 0.0
    lengths = [world.tokens[row] + times.prompt_tokens for row in rows]
    return work.seconds(sum(lengths), sum(length * length for length in lengths), len(rows))
