"""What a step takes at least: bounds that prune the planner's candidates. Pure.

Work of the busiest role, spread evenly, with nothing else in the way; or the longest responses, each with what must
follow it, one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

from launcher.plan.cost_model import Workload
from launcher.plan.scenario import Times, Work, training_of, workers_of
from workers.settings.engines import ActorConfig
from workers.settings.run import RunConfig
from workers.settings.schedule import ScheduleConfig, ScheduleMode


def longest_tokens(schedule: ScheduleConfig, tokens: Callable[[int], int], *, steps: int, skip: int) -> float:
    """Return the tokens of the longest response that a step waits for.

    A response may take 1 + staleness steps, so in a simulated run of `steps` the longest ones of steps that far apart
    follow each other; the first `skip` steps do not count.
    """
    rows, late, apart = schedule.step_rows, schedule.lateness, 1 + schedule.staleness_bound
    ends = [(step - late) * rows for step in range(steps, skip + apart - 1, -apart)]
    return sum(max(map(tokens, range(end - rows, end))) for end in ends) / (steps - skip)


@dataclass(frozen=True)
class Bounds:
    """Bounds of one run, whatever its layout and split.

    Attributes:
        workload: its tokens.
        longest_tokens: see there.
        scores: there is a reference.
        at_full_speed: see `Scenario`.
    """

    workload: Workload
    longest_tokens: float
    scores: bool
    at_full_speed: float

    def step_s(self, config: RunConfig, times: Times, slots: int) -> float:
        """Return what a step takes at least (s).

        Args:
            config: with its roles.
            times: of its engines.
            slots: responses that fit an instance.
        """
        work, workers = self.work_s(config, times, slots), workers_of(config)
        computing_s = sum(seconds * workers[role] for role, seconds in work.items())
        longest_s = self.longest_tokens * times.decode_s(1)
        critic_s = work.pop("critic", 0.0)  # it trains beside the actor, and beside the next rollout
        if config.schedule.mode is ScheduleMode.SYNC:
            least_s = sum(work.values()) + max(0.0, longest_s - work["rollout"])
        else:
            least_s = max(*work.values(), longest_s + self._behind_s(config, times))
        least_s = max(least_s, critic_s)
        return max(least_s, computing_s / self.at_full_speed) if self.at_full_speed else least_s

    def _behind_s(self, config: RunConfig, times: Times) -> float:
        """Return what follows a step's longest response before the next one that waits for it may begin, a step (s):
        it is scored and trained, and weights are updated."""
        apart = 1 + config.schedule.staleness_bound
        tokens = times.prompt_tokens + self.longest_tokens * apart
        works = [times.train["actor"], *([times.tasks["ref_log_probs"]] if self.scores else [])]
        behind_s = sum(work.seconds(round(tokens), tokens * tokens) for work in works)
        return (behind_s + config.actor.num_updates * times.update_s["actor"]) / apart

    def work_s(self, config: RunConfig, times: Times, slots: int) -> dict[str, float]:
        """Return how long each role works on a step at least, all its workers alike (s)."""
        workers, schedule, mean = workers_of(config), config.schedule, self.workload
        rows = schedule.step_rows
        in_flight = rows * (1 + schedule.staleness_bound)
        # On devices of their own even shares are best; a machine that all share does least with few full batches.
        together = min(slots, in_flight if self.at_full_speed else -(-in_flight // workers["rollout"]))
        fastest = min(times.decode_s(number) / number for number in {1, together})
        work = {"rollout": rows * mean.mean_tokens * fastest / workers["rollout"]}
        scored = rows * (
            times.tasks["ref_log_probs"].token_s * (mean.mean_tokens + times.prompt_tokens)
            + times.tasks["ref_log_probs"].squared_s * mean.mean_square
        )
        for role, training in training_of(config).items():
            pass_s = self._train_s(config, training, times, times.train[role], rows / workers[role])
            work[role] = training.ppo_epochs * pass_s + training.num_updates * times.update_s[role]
        if "ref" in config.roles:
            work["ref"] = scored / workers["ref"]
        elif self.scores:
            work["actor"] += scored / workers["actor"]
        return work

    def _train_s(self, config: RunConfig, training: ActorConfig, times: Times, work: Work, rows: float) -> float:
        """Return the least time of a pass over a replica's rows, in as few micro-batches as can be (s)."""
        mean, group_size = self.workload, config.schedule.n_samples_per_prompt
        tokens = rows * (mean.mean_tokens + times.prompt_tokens / (group_size if training.shared_prompt else 1))
        number = rows / training.micro_batch_size
        if training.max_tokens_per_micro_batch:
            # A sample that is longer than the budget is alone; no micro-batch is larger than a round.
            most = max(training.max_tokens_per_micro_batch, times.prompt_tokens + config.rollout.max_response_tokens)
            number = max(rows / max(training.micro_batch_size, group_size), tokens / most)
        computing_s = number * work.call_s + work.token_s * tokens + work.squared_s * rows * mean.mean_square
        return max(computing_s, number * work.floor_s)
