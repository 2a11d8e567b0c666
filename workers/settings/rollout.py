"""Settings of generating engines and rollouts. Torch-free."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings
from workers.settings.openai import check_address

_COLDEST = 0.01
_BORNE_DEAD_LETTERS = 8
"""So many prompts of a step may kill their processes, or fail, in however small a step."""


def _is_drawable(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError(f"give {_COLDEST:g} or more: vLLM draws at that instead, and others overflow")
    return temperature


Temperature = Annotated[float, AfterValidator(_is_drawable)]

ENGINES = Registry(
    "asyncflow.rollout_engines",
    {
        "hf": "workers.engines.hf.engine:HfEngine.of_run",
        "vllm": "workers.engines.vllm.engine:VllmEngine.of_run",
        "openai": "workers.engines.openai.engine:OpenAIEngine.of_run",
        "sim": "workers.engines.sim.engine:SimGenerateEngine.of_run",
    },
)
"""What `rollout.engine` and `evaluate.engine` may say."""
FUNCTIONS = Registry("asyncflow.rollouts", {"tools": "workers.agents.api:call_tools"}, "module:function")
"""What `rollout.function` may say."""


def of_rollout(what: str, failed: str) -> str:
    """Return why an attempt failed, with what makes rollouts (`RolloutConfig.own_name`)."""
    failed = failed.removeprefix("UserCodeFailed: ")
    return failed if failed.startswith("rollout.") else f"{what}: {failed}"


class SamplingConfig(Settings):
    """What a generating engine needs to know."""

    engine: Annotated[str, AfterValidator(ENGINES.resolve)] = "hf"
    """Generating engine; `hf`: transformers; `vllm`: see `vllm`; `openai`: servers of yours, see `openai`; `sim`:
    sleeps, see `sim`; a class of yours, `module:Class` (docs/engines.md)."""
    engine_options: dict[str, Any] = Field({})
    """Settings of an engine of yours, checked by its `Config`."""
    batch_size: int = Field(64, ge=1)
    """Responses generated at the same time by one instance; rounded down to whole groups, at least one."""
    max_response_tokens: int = Field(ge=1)
    """Longest response (tokens); a longer one is cut and flagged."""
    temperature: Temperature = Field(1.0, ge=0)
    """Sampling temperature; 0: the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int = Field(0, ge=0, lt=2**31)
    """Keep the k likeliest tokens; 0 keeps all."""
    on_swap: Literal["recompute", "keep", "finish"] = "recompute"
    """Responses that run when newer weights are due go on with them: their keys and values are computed again
    (`recompute`), or those of the old weights stay (`keep`, which costs nothing). `finish`: the weights wait until all
    that runs has ended, as they always do for `openai`."""


class ServedModelConfig(Settings):
    """A model that rollouts ask and that is not trained: a judge, an opponent."""

    base_url: str
    """Of OpenAI's API there, as its clients take it, e.g. `http://10.0.0.7:8000/v1`."""
    model: str
    """Name under which it is served."""
    api_key_variable: str = ""
    """Environment variable that holds the key; empty: none is sent."""
    options: dict[str, Any] = Field({})
    """More fields of every request, e.g. `{temperature: 0, max_tokens: 512}`."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time of one request (s)."""
    retries: int = Field(4, ge=0, le=1000)
    """How often one that failed (no connection, the deadline, 408, 429, 5xx) is sent again, after 1, 2, 4 ... 30 s."""

    @field_validator("base_url")
    @classmethod
    def _can_be_called(cls, url: str) -> str:
        check_address(url)
        return url


class RolloutConfig(SamplingConfig):
    """Generation."""

    temperature: Temperature = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities, here and in training, are those of the tempered distribution."""
    truncated: Literal["train", "mask"] = "train"
    """Responses cut at `max_response_tokens`: `train` on them, or `mask` their loss."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, with one response to each prompt: the token that completes one is the last, is
    trained and scored, and the response counts as whole. In evaluations, too. Special tokens count as their text."""
    samples_per_step: int = Field(8, ge=0)
    """Prompts with their responses written to `samples/` per step."""
    function: Annotated[str, AfterValidator(FUNCTIONS.resolve)] | None = None
    """A rollout of yours, of any turns and samples: `async def` as `module:function`, an environment as
    `module:Class`, or `tools`, which calls `rollout.tools` until a reply calls none; null: one response to each prompt
    (docs/agents.md)."""
    agent: str | None = None
    """Instead: `async def agent(task, base_url, api_key)` as `module:function`, which speaks OpenAI's API."""
    agent_command: tuple[str, ...] = ()
    """Instead: a program with its arguments, which finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY."""
    tools: tuple[str, ...] = ()
    """Typed functions of yours as `module:function`, which the policy may call."""
    timeout_s: float = Field(600.0, gt=0, le=86400)
    """Longest time of a rollout (s); then what was drawn is the rollout, truncated."""
    stall_timeout_s: float = Field(10.0, ge=1, le=86400)
    """Longest time for which one step of a rollout's code may hold the event loop of its process (s); then the process
    is killed: that rollout has failed, and the others of the process begin again. Code that blocks goes into
    `context.run`, or a thread."""
    max_turns: int = Field(0, ge=0)
    """Most replies in a rollout; then it is truncated. 0: no limit."""
    max_drawn_tokens: int = Field(0, ge=0)
    """Most tokens that the policy draws in a rollout, all replies together; then it is truncated. 0: no limit."""
    max_context_tokens: int = Field(0, ge=0)
    """Longest prompt and reply together, of one turn; then the rollout is truncated. 0: the model's positions, or
    `vllm.max_model_len`."""
    max_attempts: int = Field(3, ge=1)
    """How often a rollout whose function raised or died is begun."""
    on_failure: Literal["dead_letter", "zero", "absent"] = "dead_letter"
    """What then: its group leaves, and the next prompt takes its place; it has reward 0; or the group does without
    it."""
    max_failures_in_a_row: int = Field(100, ge=0)
    """The run ends with an error when so many attempts in a row failed in one instance, and no rollout came to its end
    meanwhile; with many at a time, not before two times `max_attempts` for each of them: failures are quick. 0:
    never."""
    max_failed_share: float = Field(0.5, ge=0, le=1)
    """So does it when more than this share of the groups that are made for a step become dead letters, beyond chance
    (four standard deviations in one step) and whatever the reason; one rollout that fails costs its group. And when
    more of the last 1,000 rollouts that it trains on failed (`zero`, `absent`). 1: never."""
    trial: bool = True
    """One rollout is made before the start, with the first row of the data and its ground truth as every reply, so that
    code which always fails is told at once."""
    num_workers: int = Field(1, ge=1, le=256)
    """Processes of an instance that run functions of yours, many rollouts in each."""
    models: dict[str, ServedModelConfig] = Field({})
    """Models that are not trained, by the name under which `context.models` has them."""
    max_memory_gb: float = Field(0.0, ge=0)
    """Most memory that each process of functions, and of `agent_command`, allocates (GiB); 0: no limit."""
    max_file_gb: float = Field(0.0, ge=0)
    """Longest file that such a process writes (GiB); 0: no limit."""

    @property
    def is_own(self) -> bool:
        """Whether rollouts are functions or agents of the user's, not one response to each prompt."""
        return self.function is not None or self.agent is not None or bool(self.agent_command)

    @property
    def own_name(self) -> str:
        """What makes rollouts, for messages: the setting and what it names."""
        given = next((name for name in ("function", "agent", "agent_command") if getattr(self, name)), "engine")
        named = getattr(self, given)
        return f"rollout.{given}: {named if isinstance(named, str) else ' '.join(named)}"

    def max_dead_letters(self, batch: int) -> int | None:
        """Return how many groups of a step with so many may be dead letters where the largest share of all groups
        fails: the mean, and four standard deviations for chance; None: any number."""
        share = self.max_failed_share
        if share == 1:
            return None
        mean, deviation = batch * share / (1 - share), math.sqrt(batch * share) / (1 - share)
        return int(max(_BORNE_DEAD_LETTERS, mean + 4 * deviation))

    @property
    def longest_rollout(self) -> int:
        """Most tokens that are drawn in a rollout; one reply's, where nothing limits several."""
        return (self.is_own and self.max_drawn_tokens) or self.max_response_tokens

    @field_validator("stop")
    @classmethod
    def _can_be_found(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if wrong := unusable_stop(text):
                raise ValueError(f"{text!r} {wrong}")
        return texts

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        given = [name for name in ("function", "agent", "agent_command") if getattr(self, name)]
        if given and self.stop:
            raise ValueError(
                f"stop is for one response to each prompt, and {given[0]} has calls of its own; give each call its "
                f"`stop`, and leave this out"
            )
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; keep one")
        if self.tools and self.function is None:
            raise ValueError("tools are given, but no rollout.function to use them; add `function: tools`")
        if self.models and self.function is None:
            raise ValueError("models are given, but no rollout.function to ask them; agents have clients of their own")
        return self


def unusable_stop(text: object) -> str:
    """Return what is wrong with a stop string, "" if nothing is."""
    if not isinstance(text, str) or not text:
        return "must be a text that is not empty"
    if any(each == "\ufffd" or "\ud800" <= each <= "\udfff" for each in text):
        return "must be whole characters: no half of one, and no U+FFFD, which stands for such"
    return ""
