"""`detect_s_max recover_s_max`: one of four rollouts is killed, another one stopped (SIGSTOP); the others go on.

Engines are `sim`, so that rollouts are what the run waits for and two cores are not; queue, weights, launcher and
processes are real. The throughput is the responses that the queue got, as `asyncflow status` counts them.

    detect_s     from the signal to the launcher's record that the gang is gone
    recover_s    from then until two seconds' responses are 70 % of what they were before
    back_s       from then until the new instance serves the newest version of the weights
    idle_s       longest time in which one of the others generated nothing, from the signal until the new one serves
"""

import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from benchmarks.chaos.launched_run import LaunchedRun, overrides, pause
from benchmarks.chaos.live_run import LiveRun
from benchmarks.chaos.options import Options
from benchmarks.chaos.throughput import Throughput
from benchmarks.transferqueue.part import Result
from launcher.timeline.run_timeline import RunTimeline, Span

NUM_ROLLOUTS = 4
SHARE = 0.7
_SETTINGS = {
    "rollout__engine": "sim",
    "actor__engine": "sim",
    "ref__engine": "sim",
    "rollout__batch_size": 16,
    "rollout__max_response_tokens": 400,
    "rollout__samples_per_step": 0,
    "schedule__rollout_batch_size": 32,
    "schedule__n_samples_per_prompt": 4,
    "schedule__max_staleness": 4,
    "schedule__mode": "substep",
    "sim__mean_tokens": 100,
    "sim__decode_s_per_token": 0.008,
    "checkpoint__interval": 0,
}
_STEPS = 100_000
_WARM_UP_STEPS = 4
_POLL_S = 0.25
_RATE_S, _SHORT_RATE_S = 8.0, 3.0
"""How long the throughput is measured before and after (s)."""
_WINDOW_S = 2.0
_DEADLINE_S = 120.0


@dataclass
class Loss:
    """What the loss of one rollout did.

    Attributes:
        victim, signal: who got what.
        detect_s, recover_s, back_s, idle_s: see the module.
        rate_before, rate_after: responses per second before, and after the throughput was back.
        others_kept: whether the other instances are the processes that they were.
    """

    victim: str
    signal: str
    detect_s: float
    recover_s: float
    back_s: float
    rate_before: float
    rate_after: float
    others_kept: bool
    idle_s: float = 0.0


class _Watched:
    """A run that is asked for its status all the time."""

    def __init__(self, run: LaunchedRun, live: LiveRun, *, rate_s: float) -> None:
        self._run = run
        self._live = live
        self._rate_s = rate_s
        self._responses = Throughput()

    def lose(self, name: str, number: signal.Signals) -> tuple[Loss, float, float]:
        """Send a signal to one rollout and wait until all is well again.

        Returns:
            The loss, and from when to when it lasted (unix time, s).
        """
        rate = self._rate()
        before, logged = self._pids(), self._run.log_size()
        sent = time.time()
        self._run.send(before[name], number)
        recovered = back = None
        while recovered is None or back is None:
            newest, now = self._look(), time.time()
            if now - sent > _DEADLINE_S:
                raise RuntimeError(f"{name} after {number.name}: not back within {_DEADLINE_S:g} s")
            detected = self._run.logged_at(f"GangExited(gang='{name}'", logged)
            if detected is not None:
                recovered = recovered or self._responses.back_at(detected, rate=SHARE * rate, window_s=_WINDOW_S)
                back = back or (now if self._serves(name, newest, but=before[name]) else None)
        assert detected is not None
        rate_after, after = self._rate(), self._pids()
        loss = Loss(
            victim=name,
            signal=number.name,
            detect_s=detected - sent,
            recover_s=recovered - detected,
            back_s=back - detected,
            rate_before=rate,
            rate_after=rate_after,
            others_kept=all(after.get(other) == pid for other, pid in before.items() if other != name),
        )
        return loss, sent, max(back, recovered)

    def _rate(self) -> float:
        """Look for a while; return the responses per second."""
        self._look()
        began = time.time()
        while time.time() < began + self._rate_s:
            self._look()
        return self._responses.rate(began, time.time())

    def _look(self) -> int:
        """Count the responses, after a moment; returns the step of the newest weights."""
        pause(_POLL_S)
        responses, newest = self._live.progress("actor_rollout")
        self._responses.add(time.time(), responses)
        return newest

    def _serves(self, name: str, newest: int, *, but: int) -> bool:
        """Return whether another process generates with the newest weights, or those of the step before."""
        rank = self._live.status(name)
        return rank.pid not in (0, but) and rank.at_work and rank.version >= newest - 1

    def _pids(self) -> dict[str, int]:
        """Return the process ids of the rollouts."""
        return {one.name: one.pid for one in self._run.members() if one.name.startswith("rollout-")}


def run(options: Options) -> Result:
    """Kill one, stop another."""
    arguments = ["quickstart", "--roles", f"rollout:{NUM_ROLLOUTS},actor:1,ref:1", "--steps", str(_STEPS)]
    losses = []
    with LaunchedRun(options.directory / "rollout") as launched:
        launched.start(*arguments, *overrides(**_SETTINGS))
        launched.wait_for_step(_WARM_UP_STEPS, deadline_s=_DEADLINE_S)
        with LiveRun(launched.run_dir) as live:
            watched = _Watched(launched, live, rate_s=_SHORT_RATE_S if options.short else _RATE_S)
            for name, number in (("rollout-1", signal.SIGKILL), ("rollout-2", signal.SIGSTOP)):
                loss, start, end = watched.lose(name, number)
                spans = RunTimeline.read(launched.run_dir).spans
                others = [f"rollout-{k}-0" for k in range(NUM_ROLLOUTS) if f"rollout-{k}" != name]
                loss.idle_s = max(longest_gap(_generating(spans[other]), start, end) for other in others)
                options.say(f"rollout: {loss}")
                losses.append(loss)
    figures = {
        "detect_s_max": max(loss.detect_s for loss in losses),
        "recover_s_max": max(loss.recover_s for loss in losses),
    }
    problems = [f"{loss.victim}: another instance was started again" for loss in losses if not loss.others_kept]
    return Result(figures, {"rollout": {"losses": [asdict(loss) for loss in losses], "problems": problems}})


def longest_gap(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the longest time between `start` and `end` that no span covers.

    Args:
        spans: (from, to), in any order; they may overlap.
        start, end: on the same clock.
    """
    longest, covered = 0.0, start
    for begin, stop in sorted(spans):
        longest = max(longest, min(begin, end) - covered)
        covered = min(end, max(covered, stop))
    return max(longest, end - covered)


def _generating(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in spans if span.name == "generate"]
