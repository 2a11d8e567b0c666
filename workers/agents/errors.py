"""Why a turn was refused; each has a status of the gateway's."""

from asyncflow.errors import AsyncFlowError


class SessionGone(AsyncFlowError):
    """The session has ended, or its record was lost with a process (410)."""


class ContextLengthExceeded(AsyncFlowError):
    """The conversation leaves no room for a response in the model's context (400 context_length_exceeded)."""


class BadAgentRequest(AsyncFlowError):
    """A request that sessions do not serve (400).

    Attributes:
        field, why: the request's field, e.g. `messages[2].content`, and what to do.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why
