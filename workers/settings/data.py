"""Settings of the data. Torch-free."""

import re
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings

FEED = "feed"
"""`data.source` of a run whose rows come from processes outside."""
SOURCES = Registry("asyncflow.data_sources", {FEED: "workers.data.feed_file:FeedFile"})
"""What `data.source` may say."""
HELD_OUT_SOURCES = Registry(SOURCES.group, {})
"""What `evaluate.source` may say."""

_NO_OPTIONS = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "padding",
     "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
     "return_assistant_tokens_mask", "strftime_now", "self")
)  # fmt: skip
"""Arguments of transformers that a caller gives, not the user."""
BLOCK = 1000
"""Groups in which a mixture has its weights exactly."""


def _local_time(given: object) -> object:
    """Return a time as its text to the second, without a zone: what the wall shows."""
    if type(given) is date:  # what YAML makes of a day
        given = datetime(given.year, given.month, given.day)
    try:
        when = datetime.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        when = None
    if not isinstance(when, datetime):
        return given if given is None else _refuse_time(given)
    return when.replace(tzinfo=None, microsecond=0).isoformat()


def _refuse_time(given: object) -> NoReturn:
    raise ValueError(f"{given!r} is no time; write one as 2026-11-26T09:00:00")


class TemplateSettings(msgspec.Struct, frozen=True):
    """What chat templates are told besides the messages.

    Attributes:
        time: `data.template_time`; None: the time at which they are rendered.
        options: `data.chat_template_options`.
    """

    time: str | None = None
    options: dict[str, Any] = {}


class HubPart(Settings):
    """Which part of a data set of the Hub, or of a directory of data files; not for a single file."""

    subset: str | None = None
    """Its configuration, e.g. `main` of `openai/gsm8k`; null: it has but one."""
    split: str | None = None
    """E.g. `test`, `train[:10%]`; null: `train`."""
    revision: str | None = None
    """Branch, tag or commit; null: the newest of `main`. A run keeps the rows that it found."""

    @property
    def is_part(self) -> bool:
        """Whether it names any."""
        return any((self.subset, self.split, self.revision))


class MixtureSource(HubPart):
    """Rows of a mixture."""

    path: str
    """As `data.path`."""
    name: str = ""
    """In the metrics, `source/NAME/reward_mean`; empty: its number, from 0."""
    weight: float = Field(1.0, gt=0, le=1e9)
    """Share of the prompts, in proportion to the other weights, however many rows there are."""
    prompt_field: str | None = None
    """Null: `data.prompt_field`."""
    ground_truth_field: str | None = None
    """Null: `data.ground_truth_field`."""

    @field_validator("name")
    @classmethod
    def _is_a_word(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]*", name):
            raise ValueError("it must be made of letters, digits, _ . and -")
        return name


class DataConfig(HubPart):
    """Tasks: a file, a data set of the Hub, several of these, or a class of yours that makes them."""

    path: str | None = None
    """JSONL, JSON (an array of objects), CSV, TSV or Parquet (extra `data`); OWNER/NAME on the Hugging Face Hub, or a
    directory of such files (extra `data`). Relative: beside the config file, else in the working directory."""
    mixture: tuple[MixtureSource, ...] = ()
    """Instead of `path`: several, with weights."""
    source: Annotated[str, AfterValidator(SOURCES.resolve)] | None = None
    """Instead of `path`: `module:Class` with `task(seed, index) -> dict`, a row like a line of the file; the same
    arguments must give the same row. `len()` of it is an epoch; without one the tasks never end. `feed`: processes
    outside put the rows while the run goes on (docs/outside.md)."""
    options: dict[str, Any] = Field({})
    """Arguments by name that `source` is made with; checked by its `Config` if it has one."""
    sampler: str | None = None
    """`module:Class` that says which task comes next, and is told of rewards; null: each once an epoch."""
    sampler_options: dict[str, Any] = Field({})
    """Arguments by name that `sampler` is made with; checked by its `Config` if it has one."""
    timeout_s: float = Field(30.0, gt=0, le=86400)
    """Deadline of one call of `source` or `sampler` (s)."""
    prompt_field: str = "prompt"
    """Field that holds the prompt (GSM8K: `question`; DeepScaleR: `problem`), `a.b` for one inside of another: a text,
    or, with `chat_template`, a list of messages, `{role, content}` each."""
    ground_truth_field: str | None = "answer"
    """Field that holds the ground truth (verl: `reward_model.ground_truth`), passed to the reward; null: there is none,
    and the reward needs none."""
    prompt_template: str = "{prompt}"
    """Text around the prompt, applied before the chat template; `{prompt}` stands for the field or its last message."""
    chat_template: bool = False
    """Wrap the prompt as one user message in the tokenizer's chat template; messages are rendered as they are."""
    system_prompt: str | None = None
    """System message in front of the others, where there is none; needs `chat_template`."""
    template_time: Annotated[str | None, BeforeValidator(_local_time)] = None
    """Local time that chat templates are told (`strftime_now`), e.g. 2026-11-26T09:00:00; null: that of the start,
    which is written to the run's `config.yaml`. All processes of a run are told it, and a run that goes on, too."""
    chat_template_options: dict[str, Any] = Field({})
    """What the chat template is told by name, e.g. `{enable_thinking: false}`; one that it does not use is refused."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt (tokens)."""
    overlong: Literal["reject", "skip"] = "skip"
    """Prompts beyond `max_prompt_tokens`: `reject` refuses the run, `skip` counts them and goes on. A source's are
    refused."""
    shuffle: bool = True
    """Visit the data in an order that is a pure function of (seed, epoch); else in file order."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if sum((self.path is not None, bool(self.mixture), self.source is not None)) != 1:
            raise ValueError("give one of path (a file, or OWNER/NAME on the Hub), mixture and source (module:Class)")
        if self.is_part and not self.path:
            raise ValueError(
                "subset, split and revision are for path; remove them (a mixture's sources have their own)"
            )
        if self.mixture and self.sampler:
            raise ValueError("sampler and the weights of mixture both say which row comes next; remove one of them")
        if 0 in self.block:
            raise ValueError(f"mixture: a weight is under 1/{BLOCK} of their sum; raise it, or leave that source out")
        if len({*self.source_names}) < len(self.mixture):
            raise ValueError(f"mixture: the sources' names are {' '.join(self.source_names)}; rename one")
        if self.is_feed and (self.options or self.sampler):
            raise ValueError("options and sampler are not for source: feed, whose rows are taken as they come")
        for name, of in (("options", "source"), ("sampler_options", "sampler")):
            if getattr(self, name) and getattr(self, of) is None:
                raise ValueError(f"{name} are for {of}, which is missing; set {of}, or remove {name}")
        return self

    @field_validator("chat_template_options")
    @classmethod
    def _are_options_of_templates(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(options.keys() & _NO_OPTIONS):
            raise ValueError(f"{taken[0]} is what AsyncFlow itself says of a conversation; remove it")
        return options

    @property
    def templates(self) -> TemplateSettings:
        """What chat templates are told besides the messages."""
        return TemplateSettings(self.template_time, self.chat_template_options)

    @property
    def is_feed(self) -> bool:
        """Whether processes outside put the rows."""
        return self.source == FEED

    @property
    def name(self) -> str:
        """What messages call these data."""
        return self.path or self.source or f"a mixture of {len(self.mixture)}"

    @property
    def file(self) -> Path:
        """The file; there is one where neither `mixture` nor `source` is given."""
        assert self.path is not None, "a source is asked for its tasks"
        return Path(self.path)

    @property
    def source_names(self) -> tuple[str, ...]:
        """What metrics call the sources of the mixture."""
        return tuple(one.name or str(number) for number, one in enumerate(self.mixture))

    @property
    def block(self) -> tuple[int, ...]:
        """How many of `BLOCK` groups each source of the mixture has: its weight, by largest remainders."""
        total = sum(one.weight for one in self.mixture)
        exact = [one.weight / total * BLOCK for one in self.mixture]
        rest = BLOCK - sum(map(int, exact))
        rounded_up = sorted(range(len(exact)), key=lambda k: int(exact[k]) - exact[k])[:rest]
        return tuple(int(share) + (k in rounded_up) for k, share in enumerate(exact))

    def parts(self) -> tuple["DataConfig", ...]:
        """Return how each source of the mixture is read; this one without a mixture."""
        named = [one.model_dump(exclude={"weight", "name"}, exclude_none=True) for one in self.mixture]
        return tuple(self.model_copy(update={"mixture": (), **one}) for one in named) or (self,)

    def place(self, number: int, part: int = 0) -> str:
        """Return where a row is, for messages: `FILE:LINE`, of a mixture's file `part`, or which task of the source,
        or row of a feeder's put."""
        if self.is_feed:
            return f"row {number} of the put"
        path = self.mixture[part].path if self.mixture else self.path
        return f"{path}:{number}" if self.source is None else f"task {number} of {self.source}"
