"""What ends a rollout, and what a session answers to an agent's bad request: the gateway turns that into an HTTP
status."""

from typing import ClassVar

from asyncflow.errors import AsyncFlowError


class BudgetSpent(Exception):
    """The rollout has had its turns, tokens, context or time; let through, it ends a finished, truncated rollout."""


class TaskSkipped(Exception):
    """Raised by `Context.skip`."""


class AgentError(AsyncFlowError):
    """Base of errors that go back to the agent; the run goes on.

    Attributes:
        status: of HTTP.
        code: in the body of the HTTP answer, if it has one.
    """

    status: ClassVar[int] = 400
    code: ClassVar[str | None] = None


class SessionGone(AgentError):
    """The session has ended, or the run was restored since it began."""

    status = 410
    code = "session_gone"


class ContextLengthExceeded(AgentError):
    """The conversation leaves no room for a reply."""

    code = "context_length_exceeded"


class BadAgentRequest(AgentError):
    """A field of the request cannot be used.

    Attributes:
        field: its name.
    """

    def __init__(self, field: str, why: str) -> None:
        """Args:
        field: name of the field.
        why: what is wrong with it, and what to do.
        """
        super().__init__(f"{field}: {why}")
        self.field = field
