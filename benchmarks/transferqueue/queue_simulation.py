"""A discrete-event simulation of many clients on a queue, with service times measured on a real one. Pure.

    client: put --unit--> every controller hears of it --> fetch --controller--> get --unit--> ack --unit--> controllers
                          (the put waits for all)                                                (the ack too)

Clients start cycles at random (Poisson) at a given rate. Every service is one server with a queue, first come first
served; service times are exponential around the measured means, which is harsher than what was measured. Each service
has a core of its own here; on a machine with fewer cores the busy shares add up on them.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.transferqueue.samples import percentile


@dataclass(frozen=True)
class ServiceTimes:
    """Processor time per request (s).

    Attributes:
        unit_put, unit_get, unit_ack: at a storage unit.
        controller_notice: at every controller, per put and per ack (units tell all of them).
        controller_fetch: at the controller that serves the task.
    """

    unit_put: float
    unit_get: float
    unit_ack: float
    controller_notice: float
    controller_fetch: float


@dataclass(frozen=True)
class Load:
    """Clients and services.

    Attributes:
        num_clients: clients.
        rate: cycles (put, fetch, get, ack of one micro-batch) per client and second.
        num_units, num_controllers: services.
    """

    num_clients: int
    rate: float
    num_units: int
    num_controllers: int


@dataclass(frozen=True)
class Outcome:
    """What a simulated run showed.

    Attributes:
        offered, completed: cycles per second.
        mean_s, median_s, p99_s: time of a whole cycle.
        unit_busy, controller_busy: share of the time that the busiest one worked.
    """

    offered: float
    completed: float
    mean_s: float
    median_s: float
    p99_s: float
    unit_busy: float
    controller_busy: float


@dataclass
class _Server:
    """One service with one queue: first come, first served."""

    free_at: float = 0.0
    busy_s: float = 0.0

    def serve(self, now: float, service_s: float) -> float:
        """Return when a request that arrives now is done."""
        self.free_at = max(now, self.free_at) + service_s
        self.busy_s += service_s
        return self.free_at


@dataclass
class _World:
    """Services, clock and what comes next."""

    load: Load
    times: ServiceTimes
    random: random.Random
    units: list[_Server] = field(default_factory=list)
    controllers: list[_Server] = field(default_factory=list)
    events: list[tuple[float, int, int, float]] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.units = [_Server() for _ in range(self.load.num_units)]
        self.controllers = [_Server() for _ in range(self.load.num_controllers)]

    def at(self, when: float, stage: int, began: float) -> None:
        """Let a cycle that began then enter a stage."""
        self.number += 1
        heapq.heappush(self.events, (when, self.number, stage, began))

    def unit(self, now: float, mean_s: float) -> float:
        """A request to some unit."""
        return self.random.choice(self.units).serve(now, self._draw(mean_s))

    def controller(self, now: float) -> float:
        """A fetch at the controller of some task."""
        return self.random.choice(self.controllers).serve(now, self._draw(self.times.controller_fetch))

    def tell_all(self, now: float) -> float:
        """A notice to every controller; done when the last one has confirmed."""
        return max(server.serve(now, self._draw(self.times.controller_notice)) for server in self.controllers)

    def _draw(self, mean_s: float) -> float:
        return self.random.expovariate(1 / mean_s) if mean_s else 0.0


Stage = Callable[[_World, float], float]


def _put(world: _World, now: float) -> float:
    return world.unit(now, world.times.unit_put)


def _get(world: _World, now: float) -> float:
    return world.unit(now, world.times.unit_get)


def _ack(world: _World, now: float) -> float:
    return world.unit(now, world.times.unit_ack)


PUT, GET, ACK = (_put, _World.tell_all), (_World.controller, _get), (_ack, _World.tell_all)
CYCLE: Sequence[Stage] = (*PUT, *GET, *ACK)
"""What a client does with a micro-batch; a row of a run with a reference passes `GET + PUT + GET + PUT + GET + ACK`."""


def simulate(
    load: Load, times: ServiceTimes, *, seconds: float = 10.0, seed: int = 0, stages: Sequence[Stage] = CYCLE
) -> Outcome:
    """Run the clients for some simulated seconds.

    Args:
        load: clients and services.
        times: of the services.
        seconds: in which cycles may begin; those that are not over by then do not count as completed.
        seed: of arrivals and service times.
        stages: of a cycle.
    """
    world = _World(load, times, random.Random(seed))
    offered = load.num_clients * load.rate
    arrival = world.random.expovariate(offered)
    while arrival < seconds:
        world.at(arrival, 0, arrival)
        arrival += world.random.expovariate(offered)
    cycles = []
    while world.events:
        now, _, stage, began = heapq.heappop(world.events)
        if now > seconds:
            break
        done = stages[stage](world, now)
        if stage + 1 < len(stages):
            world.at(done, stage + 1, began)
        elif done <= seconds:
            cycles.append(done - began)
    taken = cycles or [float("inf")]
    return Outcome(
        offered=offered,
        completed=len(cycles) / seconds,
        mean_s=sum(taken) / len(taken),
        median_s=percentile(taken, 0.5),
        p99_s=percentile(taken, 0.99),
        unit_busy=max(min(server.busy_s, seconds) / seconds for server in world.units),
        controller_busy=max(min(server.busy_s, seconds) / seconds for server in world.controllers),
    )


def fewest_services(
    num_clients: int, rate: float, times: ServiceTimes, *, busy: float = 0.7, most: int = 256
) -> Load | None:
    """Return the smallest number of units and controllers that keeps each of them at most `busy` on average.

    Units and controllers do not share work, so each number is found on its own. More controllers share the fetches but
    each hears every notice; so there is a rate beyond which no number is enough and requests must carry more rows.

    Returns:
        The load with those numbers; None: no number up to `most` is enough.
    """
    cycles = num_clients * rate
    at_units = cycles * (times.unit_put + times.unit_get + times.unit_ack)
    notices = cycles * 2 * times.controller_notice
    fetches = cycles * times.controller_fetch
    units = next((n for n in range(1, most + 1) if at_units / n <= busy), None)
    controllers = next((n for n in range(1, most + 1) if notices + fetches / n <= busy), None)
    if units is None or controllers is None:
        return None
    return Load(num_clients, rate, units, controllers)
