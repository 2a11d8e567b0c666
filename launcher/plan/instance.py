"""A simulated generating instance: what `workers.rollout.loop` does, in simulated time. Pure."""

import heapq
from collections import deque
from dataclasses import dataclass

from launcher.plan.world import World
from tq.policies import Item
from workers.engines.sim.decoding import Decoding
from workers.rollout.room import room

_RETRY_S = 0.05
"""As `workers.rollout.loop`: after a refused turn."""


@dataclass
class _Lease:
    """Rows that came together; their responses are put so many at a time."""

    partition: int
    left: int
    finished: list[int]


class Instance:
    """A simulated rollout instance."""

    def __init__(self, world: World, task: str, number: int) -> None:
        """Args:
        world: it is in.
        task: that it fetches.
        number: of the instance.
        """
        self.name = f"rollout-{number}-0"
        self._world = world
        self._task = task
        times = world.scenario.times
        self._decoding = Decoding(times.decode_s)
        self._alone_s = times.decode_s(1)
        self._waiting: deque[tuple[_Lease, int]] = deque()
        self._running: dict[int, _Lease] = {}
        self._turns: dict[int, list[tuple[float, float]]] = {}
        """Row -> its turns to come, the last one first: tokens of the prompt, and how long drawing takes alone (s)."""
        self._calls: list[int] = []
        """Rows whose next turn waits for a place, a heap: what began earlier goes first."""
        self._replied: deque[int] = deque()
        """Rows whose replies the session service has still to pass on."""
        self._num_drawing = 0
        self._entered_until = 0.0
        """End of the engine's step that the last prompts entered (s of work)."""
        self._ready = self._version = -1
        self._needed = -1
        self._step = 0
        self._asked = self._draining = self._swapping = False
        self._looks = 0
        self._busy_since: float | None = None
        self._computing = False

    def weights_arrived(self, version: int) -> None:
        """A version is ready to be loaded."""
        self._ready = max(self._ready, version)
        self.look()

    def look(self) -> None:
        """Go on: responses that ended, newer weights, free places."""
        world = self._world
        if self._swapping:
            return
        ended = self._decoding.ended(world.worked)
        for row in ended:
            self._drawn(row)
        self._swap_if_due()
        if self._swapping:
            return
        self._fill()
        if ended and not self._running:
            self.note_idle()
        if self._computing != bool(self._num_drawing):
            self._computing = bool(self._num_drawing)
            world.computing(1 if self._computing else -1)
        self._looks += 1
        end, number = self._decoding.next_end, self._looks
        if end is not None:
            world.at_work(end, lambda: self._look_again(number))

    def _look_again(self, number: int) -> None:
        if number == self._looks:  # else the end is another one by now
            self.look()

    def note_idle(self) -> None:
        """Nothing runs: the span of the timeline ends."""
        if self._busy_since is not None:
            if self._world.now > self._busy_since:
                self._world.span(self.name, "generate", self._busy_since, self._world.now, step=self._step)
            self._busy_since = None

    def _drawn(self, row: int) -> None:
        """A turn ended; behind it come the session service, tools, then the next one."""
        self._num_drawing -= 1
        if not self._world.scenario.most_live:
            self._end(row)
            return
        self._replied.append(row)
        if len(self._replied) == 1:
            self._serve()

    def _serve(self) -> None:
        """The service passes a reply on, then the next."""
        world, turns = self._world, self._world.scenario.turns

        def served() -> None:
            row = self._replied.popleft()
            world.after(max(0.0, turns.tool_s - turns.cpu_s) / turns.replies, lambda: self._go_on(row))
            if self._replied:
                self._serve()

        world.compute(turns.cpu_s / turns.replies, served)

    def _go_on(self, row: int) -> None:
        """Resume a rollout after its tool call."""
        if self._turns[row]:
            heapq.heappush(self._calls, row)
        else:
            self._end(row)
            if not self._running:
                self.note_idle()
        self.look()

    def _end(self, row: int) -> None:
        world = self._world
        lease = self._running.pop(row)
        del self._turns[row]
        lease.finished.append(row)
        if len(lease.finished) >= min(world.scenario.rows_per_put, lease.left):
            rows, lease.finished = lease.finished, []
            lease.left -= len(rows)
            world.after(world.scenario.latency.put_s, lambda: world.put(self._task, rows))

    def _swap_if_due(self) -> None:
        self._draining = False
        if self._ready <= self._version:
            return
        world = self._world
        scenario = world.scenario
        newest = self._waiting[-1][0].partition if self._waiting else 0
        boundary = newest > self._step or self._needed > self._version
        mode, running = scenario.schedule.mode, self._num_drawing
        due = mode.may_swap(interruptible=scenario.interruptible, num_running=running, boundary=boundary)
        self._draining = not due and mode.may_swap(interruptible=True, num_running=running, boundary=boundary)
        if not due:
            return
        if world.turns.ask(self, self, None):
            self._swapping = True
            world.after(scenario.latency.swap_s, self._swapped)
        else:
            world.after(_RETRY_S, self.look)

    def _swapped(self) -> None:
        self._swapping = False
        self._version = self._ready
        self._world.turns.end(self)
        self.look()

    def _fill(self) -> None:
        world = self._world
        scenario = world.scenario
        turns, times, waiting = scenario.turns, scenario.times, self._waiting
        begun = min(self._room(), len(waiting)) if waiting else 0
        for _ in range(begun):
            lease, row = waiting.popleft()
            self._running[row] = lease
            if lease.partition > self._step:
                self.note_idle()
                self._step = lease.partition
            tokens, number = scenario.tokens(row), turns.of(row)
            world.tokens[row] = tokens + turns.read_tokens
            share_s = self._alone_s * tokens / number
            self._turns[row] = [(times.later_tokens, share_s)] * (number - 1) + [(times.first_tokens, share_s)]
            heapq.heappush(self._calls, row)
        if begun and self._busy_since is None:
            self._busy_since = world.now
        self._enter()
        if self._asked or self._version < max(0, self._needed):
            return
        want = self._room() - len(waiting)
        if want > 0:
            self._asked = True
            world.fetch(self._task, want, self._version, self._granted, self._outdated)

    def _enter(self) -> None:
        """Begin turns that wait, in free places. Their prompts cost a call, or join the engine's step that others
        entered, which have paid for it."""
        scenario, now = self._world.scenario, self._world.worked
        begun: list[tuple[int, float, float]] = []
        while self._calls and self._num_drawing < scenario.slots and not self._draining:
            row = heapq.heappop(self._calls)
            begun.append((row, *self._turns[row].pop()))
            self._num_drawing += 1
        if not begun:
            return
        prefill = scenario.times.prefill
        seconds = prefill.seconds(sum(tokens for _, tokens, _ in begun), rows=len(begun))
        if now < self._entered_until:
            seconds -= prefill.call_s
            self._entered_until += seconds
        else:
            self._entered_until = now + seconds + scenario.times.decode_s(self._num_drawing)
        self._decoding.stall(seconds, now)
        for row, _, drawing_s in begun:
            self._decoding.begin(row, drawing_s, now)

    def _room(self) -> int:
        scenario, live = self._world.scenario, len(self._running)
        if live and (scenario.deterministic or self._draining):
            return 0
        if not (most := scenario.most_live):
            return scenario.slots - live
        return room(places=scenario.slots, drawing=self._num_drawing, calls=len(self._calls), live=live, most=most)

    def _granted(self, partition: int, items: list[Item]) -> None:
        rows = [row for item in items for row in item.rows]
        lease = _Lease(partition, len(rows), [])

        def came() -> None:
            self._asked = False
            self._waiting.extend((lease, row) for row in rows)
            self.look()

        self._world.after(self._world.scenario.latency.fetch_s, came)

    def _outdated(self, version: int) -> None:
        self._asked = False
        self._needed = version
        self._world.after(0.0, self.look)
