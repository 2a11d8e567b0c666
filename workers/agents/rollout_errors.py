"""What ends a rollout, and a session's errors for an agent's request, which the gateway turns into HTTP statuses."""

from typing import ClassVar

from asyncflow.errors import AsyncFlowError


class BudgetSpent(Exception):
    """The rollout has used up its turns, tokens, context or time. Uncaught, it ends the rollout as finished but
    truncated."""


class TaskSkipped(Exception):
    """Raised by `Context.skip`."""


class AgentError(AsyncFlowError):
    """Base of errors that are returned to the agent while the run continues.

    Attributes:
        status: HTTP status.
        code: for the body of the HTTP response, or None.
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
    """A field of the request is unusable; says why and what to do."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
