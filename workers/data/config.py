"""Settings of the data. Torch-free."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from asyncflow.settings import Settings


class DataConfig(Settings):
    """Tasks: a JSONL file (one object a line), or a class of yours that makes them."""

    path: str | None = None
    """JSONL file. Relative: beside the config file, else in the working directory."""
    source: str | None = None
    """Instead of `path`: `module:Class` with `task(seed, index) -> dict`, a row like a line of the file; the same
    arguments must give the same row. `len()` of it is an epoch; without one the tasks never end."""
    options: dict[str, Any] = Field({})
    """Arguments by name that `source` is made with."""
    sampler: str | None = None
    """`module:Class` that says which task comes next, and is told of rewards; null: each once an epoch."""
    sampler_options: dict[str, Any] = Field({})
    """Arguments by name that `sampler` is made with."""
    timeout_s: float = Field(30.0, gt=0, le=86400)
    """Deadline of one call of `source` or `sampler` (s)."""
    prompt_field: str = "prompt"
    """Field that holds the prompt's text (GSM8K: `question`; DeepScaleR: `problem`)."""
    answer_field: str = "answer"
    """Field that holds the reference answer, passed to the reward."""
    prompt_template: str = "{prompt}"
    """Text around the prompt, applied before the chat template; `{prompt}` stands for the field."""
    chat_template: bool = False
    """Wrap the prompt as one user message in the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message in front of the user's; needs `chat_template`."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt (tokens)."""
    overlong: Literal["reject", "skip"] = "skip"
    """Prompts beyond `max_prompt_tokens`: `reject` refuses the run, `skip` counts them and goes on. A source's are
    refused."""
    shuffle: bool = True
    """Visit the data in an order that is a pure function of (seed, epoch); else in file order."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give either path (a JSONL file) or source (module:Class), and not both")
        for name, of in (("options", "source"), ("sampler_options", "sampler")):
            if getattr(self, name) and getattr(self, of) is None:
                raise ValueError(f"{name} are for {of}, which is missing; set {of}, or remove {name}")
        return self

    @property
    def file(self) -> Path:
        """The JSONL file; there is one where `source` is null."""
        assert self.path is not None, "a source is asked for its tasks"
        return Path(self.path)

    def place(self, number: int) -> str:
        """Return where a row is, for messages: `FILE:LINE`, or which task of the source."""
        return f"{self.path}:{number}" if self.source is None else f"task {number} of {self.source}"
