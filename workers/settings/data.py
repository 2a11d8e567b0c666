"""Settings of the data. Torch-free."""

import re
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings

# Value of `data.source` for a run whose rows come from processes outside.
FEED = "feed"
# Valid values of `data.source`.
SOURCES = Registry("asyncflow.data_sources", {FEED: "workers.data.feed_file:FeedFile"})
# Valid values of `evaluate.source`.
HELD_OUT_SOURCES = Registry(SOURCES.group, {})

# Arguments of transformers that the caller sets, not the user.
_NO_OPTIONS = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "padding",
     "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
     "return_assistant_tokens_mask", "strftime_now", "self")
)  # fmt: skip
# In `data.prompt_template`: where the prompt goes.
PLACEHOLDER = "{prompt}"
# Over each block of this many groups a mixture has exactly its weights.
BLOCK = 1000


def _local_time(given: object) -> object:
    if type(given) is date:  # YAML parses a bare day as a date
        given = datetime(given.year, given.month, given.day)
    try:
        when = datetime.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        when = None
    if not isinstance(when, datetime):
        return given if given is None else _refuse_time(given)
    return when.replace(tzinfo=None, microsecond=0).isoformat()


def _refuse_time(given: object) -> NoReturn:
    raise ValueError(f"{given!r} is not a time; write it like 2026-11-26T09:00:00")


class TemplateSettings(msgspec.Struct, frozen=True):
    """What chat templates receive besides the messages."""

    time: str | None = None  # `data.template_time`; None: the time of rendering
    options: dict[str, Any] = {}  # `data.chat_template_options`


def _checked_template(template: str) -> str:
    """Return the text around a prompt. Raises ValueError if it has no place for the prompt."""
    if PLACEHOLDER not in template:
        raise ValueError(f"it lacks {PLACEHOLDER}, where the prompt goes; put it in")
    return template


PromptTemplate = Annotated[str, AfterValidator(_checked_template)]


class HubPart(Settings):
    """Which part to use of a data set on the Hub, or of a directory of data files; not for a single file."""

    subset: str | None = None
    """Configuration of the data set, e.g. `main` of `openai/gsm8k`; null: it has only one."""
    split: str | None = None
    """E.g. `test`, `train[:10%]`; null: `train`."""
    revision: str | None = None
    """Branch, tag or commit; null: the newest commit of `main`. A run keeps the rows that it found."""

    @property
    def is_part(self) -> bool:
        return any((self.subset, self.split, self.revision))


class MixtureSource(HubPart):
    """One source of a mixture."""

    path: str
    """Like `data.path`."""
    name: str = ""
    """Name in the metrics, `source/NAME/reward_mean`; empty: its number, from 0."""
    weight: float = Field(1.0, gt=0, le=1e9)
    """Share of the prompts, relative to the other weights, however many rows the source has."""
    prompt_field: str | None = None
    """null: `data.prompt_field`."""
    ground_truth_field: str | None = None
    """null: `data.ground_truth_field`."""

    @field_validator("name")
    @classmethod
    def _is_a_word(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]*", name):
            raise ValueError("it must be made of letters, digits, _ . and -")
        return name


class DataConfig(HubPart):
    """The tasks: a file, a data set on the Hub, a mixture of several, or a class of your own that makes them."""

    path: str | None = None
    """JSONL, JSON (an array of objects), CSV, TSV or Parquet (extra `data`); OWNER/NAME on the Hugging Face Hub, or a
    directory of such files (extra `data`). A relative path is looked up beside the config file, then in the working
    directory."""
    mixture: tuple[MixtureSource, ...] = ()
    """Instead of `path`: several sources with weights."""
    source: Annotated[str, AfterValidator(SOURCES.resolve_name)] | None = None
    """Instead of `path`: `module:Class` with `task(seed, index) -> dict`, which returns a row like a line of the file;
    the same arguments must give the same row. Its `len()` is an epoch; without `len()` the tasks never end. `feed`:
    processes outside put the rows during the run (docs/outside.md)."""
    options: dict[str, Any] = Field({})
    """Keyword arguments for `source`; checked by its `Config` if it has one."""
    sampler: str | None = None
    """`module:Class` that chooses the next task and is told the rewards; null: each task once per epoch."""
    sampler_options: dict[str, Any] = Field({})
    """Keyword arguments for `sampler`; checked by its `Config` if it has one."""
    timeout_s: float = Field(30.0, gt=0, le=86400)
    """Deadline of one call of `source` or `sampler` (s)."""
    prompt_field: str = "prompt"
    """Field that holds the prompt (GSM8K: `question`; DeepScaleR: `problem`), `a.b` for a nested field: a text, or,
    with `chat_template`, a list of messages, `{role, content}` each."""
    ground_truth_field: str | None = "answer"
    """Field that holds the ground truth (verl: `reward_model.ground_truth`), which is passed to the reward; null: there
    is none, and the reward needs none."""
    completion_field: str | None = None
    """For algorithm `sft`: field that holds what is trained (TRL: `completion`, `messages`; verl: `answer`): a text or
    the assistant's messages that follow the prompt, or a whole conversation, whose assistant's messages are trained
    (docs/sft.md)."""
    prompt_template: PromptTemplate = "{prompt}"
    """Text around the prompt, applied before the chat template; `{prompt}` stands for the field or its last message."""
    chat_template: bool = False
    """Wrap the prompt as one user message in the tokenizer's chat template; a list of messages is rendered as it is."""
    system_prompt: str | None = None
    """System message put first if the messages have none; needs `chat_template`."""
    template_time: Annotated[str | None, BeforeValidator(_local_time)] = None
    """Local time that chat templates see (`strftime_now`), e.g. 2026-11-26T09:00:00; null: the time of the start, which
    is written to the run's `config.yaml`. All processes of a run see the same time, and a resumed run keeps it."""
    chat_template_options: dict[str, Any] = Field({})
    """Named values for the chat template, e.g. `{enable_thinking: false}`; one that the template does not use is
    refused."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt (tokens); for algorithm `sft`, which generates nothing, the longest row with its completion."""
    overlong: Literal["reject", "skip"] = "skip"
    """Prompts longer than `max_prompt_tokens`: `reject` refuses the run, `skip` leaves them out and says how many.
    Those of a `source` are always refused."""
    shuffle: bool = True
    """Visit the data in an order that is a pure function of (seed, epoch); else in file order."""
    _section: str = PrivateAttr("data")

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
        if self.system_prompt is not None and not self.chat_template:
            raise self.refusal("system_prompt", "data.chat_template is false; set that to true or remove this")
        return self

    @field_validator("chat_template_options")
    @classmethod
    def _are_options_of_templates(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(options.keys() & _NO_OPTIONS):
            raise ValueError(f"{taken[0]} is set by AsyncFlow itself; remove it")
        return options

    def of_section(self, section: str, **changed: Any) -> "DataConfig":
        """Return how to read the rows of another section, whose settings of the same names errors then name."""
        config = self.model_copy(update=changed)
        config._section = section
        return config

    def key(self, name: str) -> str:
        """Return what the user calls a setting, for messages."""
        return f"{self._section}.{name}"

    @property
    def is_held_out(self) -> bool:
        """Whether these are an evaluation's rows; what is null in its section is as in `data`."""
        return self._section != "data"

    @property
    def templates(self) -> TemplateSettings:
        return TemplateSettings(self.template_time, self.chat_template_options)

    @property
    def is_feed(self) -> bool:
        return self.source == FEED

    @property
    def name(self) -> str:
        return self.path or self.source or f"a mixture of {len(self.mixture)}"

    @property
    def file(self) -> Path:
        """The file; only without `mixture` and `source`."""
        assert self.path is not None, "a source is asked for its tasks"
        return Path(self.path)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(one.name or str(number) for number, one in enumerate(self.mixture))

    @property
    def block(self) -> tuple[int, ...]:
        """How many of `BLOCK` groups each source of the mixture gets: its weight, by largest remainders."""
        total = sum(one.weight for one in self.mixture)
        exact = [one.weight / total * BLOCK for one in self.mixture]
        rest = BLOCK - sum(map(int, exact))
        rounded_up = sorted(range(len(exact)), key=lambda k: int(exact[k]) - exact[k])[:rest]
        return tuple(int(share) + (k in rounded_up) for k, share in enumerate(exact))

    def parts(self) -> tuple["DataConfig", ...]:
        """Return how to read each source of the mixture; without a mixture, this configuration alone."""
        named = [one.model_dump(exclude={"weight", "name"}, exclude_none=True) for one in self.mixture]
        return tuple(self.model_copy(update={"mixture": (), **one}) for one in named) or (self,)

    def place(self, number: int, part: int = 0) -> str:
        """Return where a row is, for messages: `FILE:LINE` (of file `part` of a mixture), the number of the source's
        task, or the row of a feeder's put."""
        if self.is_feed:
            return f"row {number} of the put"
        path = self.mixture[part].path if self.mixture else self.path
        return f"{path}:{number}" if self.source is None else f"task {number} of {self.source}"
