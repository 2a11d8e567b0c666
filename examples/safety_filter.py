"""A task of your own: reads every response, writes how much it counts in the loss.

    cd examples && asyncflow-launch safety_filter.yaml                                      # inside the actor
    cd examples && asyncflow-launch safety_filter.yaml --roles rollout:1,actor:1,safety:2   # two processes of its own

Called for every response with a `workers.tasks.row.TaskRow`: `prompt`, `response`, `ground_truth` as text, `columns`
with the numbers among the task's inputs. What it returns is the response's value in the task's output column; what it
raises ends the run. Here a real one would ask a classifier.
"""

from workers.tasks.row import TaskRow

UNWANTED = "13"


def keep(row: TaskRow) -> float:
    """Return 0 for a response that is not to be learnt from, good or bad; a half for one without reward; else 1."""
    if UNWANTED in row.response:
        return 0.0
    return 1.0 if row.columns["rewards"] > 0 else 0.5
