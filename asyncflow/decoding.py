"""Decoders of message types, created one at a time.

msgspec reads a Struct's annotations when the first decoder for it is created; if two threads do that at the same time,
the process crashes (seen with 0.22). So every typed decoder of the project comes from here; ruff bans the other way.
"""

import threading
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

# What msgspec raises for bytes that are not a message, including text that is not UTF-8 and endless nesting.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_making = threading.Lock()


@overload
def msgpack_decoder(message: type[T]) -> "msgspec.msgpack.Decoder[T]": ...
@overload
def msgpack_decoder(message: Any) -> "msgspec.msgpack.Decoder[Any]": ...
def msgpack_decoder(message: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Return the decoder of a type, e.g. a tagged union of Structs; any thread may use it."""
    with _making:
        return _msgpack_decoder(message)


@overload
def json_decoder(message: type[T]) -> "msgspec.json.Decoder[T]": ...
@overload
def json_decoder(message: Any) -> "msgspec.json.Decoder[Any]": ...
def json_decoder(message: Any) -> "msgspec.json.Decoder[Any]":
    """Return the JSON decoder of a type; any thread may use it."""
    with _making:
        return _json_decoder(message)


@cache
def _msgpack_decoder(message: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(message)


@cache
def _json_decoder(message: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(message)


json_object = json_decoder(dict[str, Any]).decode
"""Decodes a line that must be a JSON object; raises one of `UNREADABLE`."""


def json_step(data: bytes) -> dict[str, Any]:
    """Decode a line about a step, a JSON object with a whole `step`; raises one of `UNREADABLE`."""
    line = json_object(data)
    if type(step := line.get("step")) is not int:
        raise msgspec.ValidationError(f"step {step!r} is not a whole number")
    return line
