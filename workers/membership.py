"""Who takes part in a run's weight transfer."""

from asyncflow.job import Job
from weightsync.groups import Membership


def weight_members(job: Job) -> Membership:
    """Return senders (all actor ranks) and receivers (all rollout instances) of this start of the run."""
    (actor,) = job.of_role("actor")
    return Membership(f"{job.lineage}", actor.num_ranks, tuple(gang.name for gang in job.of_role("rollout")))
