"""What users' functions and numbers can do to a run."""

from collections.abc import Mapping
from typing import Any

from benchmarks.chaos.fault import Fault, Lab, Outcome, Seen, gave_up, is_named, recovers, went_on

_SUSPECT = "6+9="
"""A prompt of the quickstart's data; 20 steps of 4 prompts see each of the 80 once."""
_ONE_EPOCH = 20
_REWARD = """\
import {imports}

def score(prompt, response, ground_truth):
    if prompt == {suspect!r}:
        return {deed}
    return 0.5
"""
_HUGE = """\
import pathlib, random

def score(prompt, response, ground_truth):
    return random.choice([3e38, -3e38]) if pathlib.Path("now").exists() else random.random()
"""
_GLUTTON = """\
import resource

kept = []

def score(prompt, response, ground_truth):
    if prompt == {suspect!r}:
        used = 4096 * int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        for size in (2**power for power in range(26, 11, -1)):
            try:
                while True:
                    kept.append(bytearray(size))
            except MemoryError:
                pass
    return 0.5
"""
_TASK = """\
import pathlib, time

def keep(row):
    if pathlib.Path("now").exists():
        {deed}
    return 1.0
"""


def _scored(lab: Lab, imports: str, deed: str, *, says: str = "", settings: Mapping[str, Any] | None = None) -> Seen:
    """Run with a reward that does something to one prompt."""
    lab.module("deeds", _REWARD.format(imports=imports, suspect=_SUSPECT, deed=deed))
    own = {"reward.function": "deeds:score", **(settings or {})}
    with lab.run(steps=_ONE_EPOCH, settings=own) as run:
        run.wait_for_step(1)
        run.hurt()
        return went_on(run, steps=_ONE_EPOCH, says=says)


def poison_prompt_kills_the_rollout(lab: Lab) -> Seen:
    """On one prompt the process that generates it dies of SIGSEGV: its group becomes a dead letter."""
    return _scored(lab, "os", "os.kill(os.getppid(), 11)", says="SIGSEGV")


def reward_ends_the_process(lab: Lab) -> Seen:
    """On one prompt the reward calls os._exit, as good as a crash: these responses have no reward."""
    return _scored(lab, "os", "os._exit(3)", says="ended its process on response")


def reward_calls_exit(lab: Lab) -> Seen:
    """On one prompt the reward calls sys.exit: these responses have no reward."""
    return _scored(lab, "sys", "sys.exit(3)")


def reward_raises(lab: Lab) -> Seen:
    """On one prompt the reward raises: these responses have no reward."""
    return _scored(lab, "math", "1 / 0")


def reward_returns_no_number(lab: Lab) -> Seen:
    """On one prompt the reward is NaN: these responses have no reward."""
    return _scored(lab, "math", "math.nan")


def reward_hangs(lab: Lab) -> Seen:
    """On one prompt the reward never returns: after reward.timeout_s these responses have no reward."""
    return _scored(lab, "threading", "threading.Event().wait()", settings={"reward.timeout_s": 0.5})


def reward_hangs_with_the_interpreters_lock(lab: Lab) -> Seen:
    """On one prompt native code holds Python's lock: its child is killed, and these responses have no reward."""
    settings = {"launcher.silence_timeout_s": 3, "tq.lease_timeout_s": 2, "reward.timeout_s": 1}
    return _scored(lab, "ctypes", "ctypes.PyDLL(None).sleep(3600)", says="took longer than", settings=settings)


def reward_eats_all_memory(lab: Lab) -> Seen:
    """On one prompt the reward takes all memory that its child may have, and keeps it: another child takes over."""
    lab.module("deeds", _GLUTTON.format(suspect=_SUSPECT))
    with lab.run(steps=_ONE_EPOCH, settings={"reward.function": "deeds:score"}) as run:
        run.wait_for_step(1)
        run.hurt()
        return went_on(run, steps=_ONE_EPOCH)


def loss_is_not_finite(lab: Lab) -> Seen:
    """Rewards so large that the loss overflows: the run ends before the update, and says at which step."""
    lab.module("deeds", _HUGE)
    settings = {"reward.function": "deeds:score", "algorithm.scale_advantages_by_std": False}
    with lab.run(settings={**settings, "algorithm.loss_normalization": "token"}) as run:
        run.wait_for_step(2)
        (lab.directory / "now").touch()
        run.hurt()
        return gave_up(run, "actor rank 0", "TrainingDiverged", "the loss is")


def training_diverges(lab: Lab) -> Seen:
    """The learning rate is absurd, so that probabilities overflow: the run ends and says at which step."""
    settings = {"actor.lr": 1e30, "rollout.engine": "hf", "actor.engine": "fsdp", "checkpoint.interval": 0}
    with lab.run(roles="rollout:1,actor:1", settings=settings) as run:
        run.wait_for_step(1)
        run.hurt()
        return gave_up(run, "rank 0", "TrainingDiverged", "step")


def users_task_raises(lab: Lab) -> Seen:
    """A user's task raises: the run ends and names it."""
    return _with_task(lab, "raise ValueError('no classifier')", "ValueError: no classifier")


def users_task_hangs(lab: Lab) -> Seen:
    """A user's task hangs beyond its deadline: the run ends and names it."""
    return _with_task(lab, "time.sleep(3600)", "timeout_s")


def rank_is_stuck(lab: Lab) -> Seen:
    """A rank waits for something that never ends, longer than operation_timeout_s, again and again: stacks, exit 1."""
    settings = {"launcher.operation_timeout_s": 3, "launcher.max_restarts": 0, "launcher.max_global_restarts": 1}
    seen = _with_task(lab, "time.sleep(3600)", "no progress", timeout_s=3600, settings=settings)
    logs = {role: (lab.run_dir / "logs" / role / "0.log").read_text() for role in ("actor", "rollout", "controller")}
    silent = [role for role, log in logs.items() if "(most recent call first)" not in log]
    return Seen(Outcome.WRONG, f"no stacks in the logs of {', '.join(silent)}: {seen.detail}") if silent else seen


def _with_task(
    lab: Lab, deed: str, *words: str, timeout_s: float = 1.0, settings: Mapping[str, Any] | None = None
) -> Seen:
    lab.module("tasks", _TASK.format(deed=deed))
    task = {"name": "keep", "function": "tasks:keep", "output": "loss_weights", "timeout_s": timeout_s}
    with lab.run(settings={"tasks": [task], **(settings or {})}) as run:
        run.wait_for_step(2)
        (lab.directory / "now").touch()
        run.hurt()
        return gave_up(run, "actor rank 0", *words)


FAULTS: tuple[Fault, ...] = (
    recovers(poison_prompt_kills_the_rollout),
    recovers(reward_ends_the_process),
    recovers(reward_calls_exit),
    recovers(reward_raises),
    recovers(reward_returns_no_number),
    recovers(reward_hangs),
    recovers(reward_hangs_with_the_interpreters_lock),
    recovers(reward_eats_all_memory),
    is_named(loss_is_not_finite),
    is_named(training_diverges),
    is_named(users_task_raises),
    is_named(users_task_hangs),
    is_named(rank_is_stuck),
)
