"""Base of all configuration models: frozen, unknown keys are errors, docstrings under fields describe them."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of the configuration; `launcher.config.load` turns its errors into one line with the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def as_advice(message: str) -> str:
    """Return pydantic's message as what is to be done."""
    return message.replace("Input should be", "it must be").removeprefix("Value error, ")
