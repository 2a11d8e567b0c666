"""Base of all configuration models: frozen, unknown keys are errors, docstrings under fields describe them."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of the configuration; `launcher.config.load` turns its errors into one line with the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
