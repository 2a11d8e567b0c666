"""Which versions of the weights are evaluated, and by which instance. Pure: nobody has to be asked.

interval = 4, last step 10, two instances      due    0   4   8   10
                                               by     0   1   0   0
"""

from collections.abc import Collection


def due_steps(*, interval: int, last: int) -> list[int]:
    """Return the steps whose weights are due: 0, every `interval` steps, and the last one."""
    return sorted({*range(0, last, interval), last})


def own_steps(
    *, interval: int, last: int, first: int, instance: int, num_instances: int, done: Collection[int]
) -> list[int]:
    """Return the due steps that one instance evaluates, in order.

    Due step k * interval is instance k mod `num_instances`'s. The last step is instance 0's, so that there is one that
    stays to the end.

    Args:
        interval: `evaluate.interval`.
        last: step of the run.
        first: step of the weights that this start begins with.
        instance, num_instances: whose; of how many.
        done: steps that were evaluated before.
    """
    return [
        step
        for step in due_steps(interval=interval, last=last)
        if step >= first and step not in done and (0 if step == last else step // interval % num_instances) == instance
    ]
