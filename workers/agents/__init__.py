"""Rollouts of several turns, with tools or any agent; what users' functions are written against."""

from workers.agents.api import Chat, Context, Model, Reply, Sample, Task
from workers.agents.environment import Environment, tool
from workers.agents.errors import BudgetSpent
from workers.agents.other_model import OtherModel, Utterance
from workers.agents.tools import Tool

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
