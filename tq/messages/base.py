"""What all messages have in common."""

import msgspec


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag."""


class Done(Message):
    """Carried out."""
