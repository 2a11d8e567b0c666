"""What the gateway needs of a translated API: `chat_completions`, `anthropic_messages` and `responses` implement it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from workers.agents.turns import ChatRequest, Reply

Body = dict[str, Any]

_PIECE_CHARACTERS = 200


@dataclass(frozen=True)
class FinishedTurn:
    """A finished turn."""

    id: str  # random; a retry gets the same
    created: int  # unix time (s)
    body: Body  # the client's, with checked fields
    # request, reply: translated
    request: ChatRequest
    reply: Reply


@dataclass
class SessionMemory:
    """What later requests of a session may refer to."""

    # Finished turns by id, for APIs whose requests name them
    answers: dict[str, FinishedTurn] = field(default_factory=dict)
    # Of each tool call by its id, verbatim as the model drew them
    arguments: dict[str, str] = field(default_factory=dict)

    def add_answer(self, answer: FinishedTurn, *, named: bool) -> None:
        """Remember a finished turn; `named`: later requests may name it."""
        if named:
            self.answers[answer.id] = answer
        self.arguments.update((call["id"], call["function"]["arguments"]) for call in answer.reply.tool_calls)


class Dialect(Protocol):
    """Translates one API; `NAMES_ANSWERS`: its requests refer to earlier answers by id."""

    NAMES_ANSWERS: bool

    def read(self, body: Body, memory: SessionMemory) -> ChatRequest:
        """Return the turn that a request asks for; raises BadAgentRequest."""

    def write(self, answer: FinishedTurn) -> Body:
        """Return the whole answer."""

    def events(self, answer: FinishedTurn) -> Iterator[bytes]:
        """Return the answer as server-sent events."""

    def error(self, message: str, *, kind: str, param: str | None, code: str | None) -> Body:
        """Return an error's body.

        Args:
            kind: e.g. `invalid_request_error`.
            param: the field at fault.
            code: e.g. `context_length_exceeded`.
        """


def event(value: Body) -> bytes:
    """Encode a server-sent event, named after its `type` if it has one."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return b"".join((name, b"data: ", msgspec.json.encode(value), b"\n\n"))


def pieces(text: str) -> Iterator[str]:
    """Cut a finished text into the chunks that a streaming client receives."""
    return (text[start : start + _PIECE_CHARACTERS] for start in range(0, len(text), _PIECE_CHARACTERS))
