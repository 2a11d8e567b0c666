"""Multi-turn rollouts with tools or any agent: what user functions are written against."""

from workers.agents.api import Chat, Context, Environment, Model, Sample, Task, Tool, tool
from workers.agents.other_model import OtherModel
from workers.agents.rollout_errors import BudgetSpent
from workers.agents.turns import Reply, Utterance

__all__ = [
    "BudgetSpent",
    "Chat",
    "Context",
    "Environment",
    "Model",
    "OtherModel",
    "Reply",
    "Sample",
    "Task",
    "Tool",
    "Utterance",
    "tool",
]
