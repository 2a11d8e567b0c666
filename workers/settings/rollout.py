"""Settings of generating engines and rollouts. Torch-free."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings
from workers.settings.openai import check_address

_COLDEST = 0.01
# However small a step is, this many of its prompts may fail or kill their processes.
_BORNE_DEAD_LETTERS = 8


def _is_drawable(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError(f"give {_COLDEST:g} or more: vLLM raises lower ones to that, and other engines overflow")
    return temperature


Temperature = Annotated[float, AfterValidator(_is_drawable)]

# Valid values of `rollout.engine` and `evaluate.engine`.
ENGINES = Registry(
    "asyncflow.rollout_engines",
    {
        "hf": "workers.engines.hf.engine:HfEngine.of_run",
        "vllm": "workers.engines.vllm.engine:VllmEngine.of_run",
        "openai": "workers.engines.openai.engine:OpenAIEngine.of_run",
        "sim": "workers.engines.sim.engine:SimGenerateEngine.of_run",
    },
)
# Valid values of `rollout.function`.
FUNCTIONS = Registry("asyncflow.rollouts", {"tools": "workers.agents.api:call_tools"}, "module:function")


def of_rollout(what: str, failed: str) -> str:
    """Return why an attempt failed, with the setting that makes rollouts (`RolloutConfig.own_name`) in front."""
    failed = failed.removeprefix("UserCodeFailed: ")
    return failed if failed.startswith("rollout.") else f"{what}: {failed}"


class SamplingConfig(Settings):
    """What a generating engine needs to know."""

    engine: Annotated[str, AfterValidator(ENGINES.resolve_name)] = "hf"
    """Generating engine; `hf`: transformers; `vllm`: see `vllm`; `openai`: your own servers, see `openai`; `sim`:
    sleeps, see `sim`; a class of your own, `module:Class` (docs/engines.md)."""
    engine_options: Annotated[dict[str, Any], AfterValidator(ENGINES.options)] = Field({})
    """Settings of an engine of your own, checked by its `Config`."""
    batch_size: int = Field(64, ge=1)
    """Responses that one instance generates at the same time; rounded down to whole groups, at least one."""
    max_response_tokens: int = Field(ge=1)
    """Longest response (tokens); a longer one is cut and flagged."""
    temperature: Temperature = Field(1.0, ge=0)
    """Sampling temperature; 0: the most likely token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int = Field(0, ge=0, lt=2**31)
    """Keep the k most likely tokens; 0 keeps all."""
    on_swap: Literal["recompute", "keep", "finish"] = "recompute"
    """What happens to running responses when newer weights are due. `recompute`: they continue with the new weights,
    and their keys and values are computed again; `keep`: they continue, and keep the keys and values of the old
    weights, which costs nothing; `finish`: the weights wait until all running responses have ended, as always with
    `openai`."""

    @property
    def keeps_mask(self) -> bool:
        """Whether each token comes with the tokens that it was drawn from."""
        return False

    @property
    def draws_by(self) -> tuple[float, float, int]:
        """Temperature, top-p and top-k; those of greedy responses are all the same."""
        return (self.temperature, self.top_p, self.top_k) if self.temperature else (0.0, 1.0, 0)


class ServedModelConfig(Settings):
    """A model that rollouts call and that is not trained: a judge, an opponent."""

    base_url: str
    """Base URL of its OpenAI API, as OpenAI clients take it, e.g. `http://10.0.0.7:8000/v1`."""
    model: str
    """Name under which it is served."""
    api_key_variable: str = ""
    """Environment variable that holds the key; empty: no key is sent."""
    options: dict[str, Any] = Field({})
    """Further fields of every request, e.g. `{temperature: 0, max_tokens: 512}`."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time of one request (s)."""
    retries: int = Field(4, ge=0, le=1000)
    """How often a failed request (no connection, timeout, 408, 429, 5xx) is retried, after 1, 2, 4 ... 30 s."""

    @field_validator("base_url")
    @classmethod
    def _can_be_called(cls, url: str) -> str:
        check_address(url)
        return url


class RolloutConfig(SamplingConfig):
    """Generation."""

    temperature: Temperature = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities, here and in training, are those of the tempered distribution."""
    keep_sampling_mask: bool = False
    """With top-p or top-k: keep the tokens that each one was drawn from, and train on the distribution over these.
    Every log-probability and entropy of a drawn token, of the generating engine and the trainer, is then of that
    distribution. Four bytes per kept token travel. `vllm` needs 0.32, its second model runner, and `top_k`."""
    truncated: Literal["train", "mask"] = "train"
    """Responses cut at `max_response_tokens`: `train` on them, or `mask` their loss."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, if there is one response to each prompt. The token that completes a string is the
    last one; it is trained and scored, and the response counts as complete. Also in evaluations. Special tokens match
    by their text."""
    samples_per_step: int = Field(4, ge=0)
    """Prompts per step that are written to `samples/` with their responses."""
    function: Annotated[str, AfterValidator(FUNCTIONS.resolve_name)] | None = None
    """A rollout of your own, with any number of turns and samples: an `async def` as `module:function`, an environment
    as `module:Class`, or `tools`, which calls `rollout.tools` until a reply calls none; null: one response to each
    prompt (docs/agents.md)."""
    agent: str | None = None
    """Instead of `function`: an `async def agent(task, base_url, api_key)` as `module:function`; it calls OpenAI's API.
    """
    agent_command: tuple[str, ...] = ()
    """Instead of `function`: a program with its arguments, which finds the policy through OPENAI_BASE_URL and
    OPENAI_API_KEY."""
    tools: tuple[str, ...] = ()
    """Typed functions of your own as `module:function`, which the policy may call."""
    timeout_s: float = Field(600.0, gt=0, le=86400)
    """Longest time of a rollout (s); after that it ends, truncated, with what was drawn so far."""
    stall_timeout_s: float = Field(10.0, ge=1, le=86400)
    """How long one step of a rollout's code may block the event loop of its process (s). After that the process is
    killed: that rollout has failed, and the others in the process start again. Put blocking code into `context.run`, or
    a thread."""
    max_turns: int = Field(0, ge=0)
    """Most replies in a rollout; after that it is truncated. 0: no limit."""
    max_drawn_tokens: int = Field(0, ge=0)
    """Most tokens that the policy draws in a rollout, all replies together; after that it is truncated. 0: no limit."""
    max_context_tokens: int = Field(0, ge=0)
    """Longest prompt and reply of one turn together; after that the rollout is truncated. 0: the model's positions, or
    `vllm.max_model_len`."""
    max_attempts: int = Field(3, ge=1)
    """How often to attempt a rollout whose function raises or dies."""
    on_failure: Literal["dead_letter", "zero", "absent"] = "dead_letter"
    """What follows the last attempt. `dead_letter`: the group leaves, and the next prompt takes its place; `zero`: the
    rollout gets reward 0; `absent`: its group continues without it."""
    max_failures_in_a_row: int = Field(100, ge=0)
    """The run ends with an error when this many attempts in a row failed in one instance while no rollout completed.
    Failures are quick, so with many rollouts at a time the limit is at least two times `max_attempts` for each of them.
    0: never."""
    max_failed_share: float = Field(0.5, ge=0, le=1)
    """The run ends with an error when more than this share of the groups made for a step become dead letters, beyond
    chance (four standard deviations in one step) and for whatever reason; one failed rollout costs its group. Also when
    more than this share of the last 1,000 rollouts that it trains on failed (`zero`, `absent`). 1: never."""
    trial: bool = True
    """Make one rollout before the start, with the first data row and its ground truth as every reply, so that code
    which always fails is reported at once."""
    num_workers: int = Field(1, ge=1, le=256)
    """Processes per instance that run your functions, each with many rollouts."""
    models: dict[str, ServedModelConfig] = Field({})
    """Models that are not trained, by their name in `context.models`."""
    max_memory_gb: float = Field(0.0, ge=0)
    """Memory limit of each process that runs your functions or `agent_command` (GiB); 0: no limit."""
    max_file_gb: float = Field(0.0, ge=0)
    """Largest file that such a process may write (GiB); 0: no limit."""

    @property
    def keeps_mask(self) -> bool:
        return self.keep_sampling_mask

    @property
    def is_own(self) -> bool:
        """Whether rollouts are the user's functions or agents, not one response to each prompt."""
        return self.function is not None or self.agent is not None or bool(self.agent_command)

    @property
    def own_name(self) -> str:
        """What makes rollouts, for messages: the setting and its value."""
        named = getattr(self, self.own_setting.removeprefix("rollout."))
        return f"{self.own_setting}: {named if isinstance(named, str) else ' '.join(named)}"

    @property
    def own_setting(self) -> str:
        """The setting that makes rollouts, for messages."""
        given = next((name for name in ("function", "agent", "agent_command") if getattr(self, name)), "engine")
        return f"rollout.{given}"

    def max_dead_letters(self, batch: int) -> int | None:
        """Return how many groups of a step of `batch` may become dead letters, at the largest failed share of all
        groups: the mean plus four standard deviations for chance; None: any number."""
        share = self.max_failed_share
        if share == 1:
            return None
        mean, deviation = batch * share / (1 - share), math.sqrt(batch * share) / (1 - share)
        return int(max(_BORNE_DEAD_LETTERS, mean + 4 * deviation))

    @property
    def longest_rollout(self) -> int:
        """Most tokens drawn in a rollout; those of one reply if nothing limits several."""
        return (self.is_own and self.max_drawn_tokens) or self.max_response_tokens

    @field_validator("stop")
    @classmethod
    def _can_be_found(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if wrong := unusable_stop(text):
                raise ValueError(f"{text!r} {wrong}")
        return texts

    @model_validator(mode="after")
    def _mask_can_be_kept(self) -> Self:
        if not self.keep_sampling_mask:
            return self
        if self.top_p == 1 and not self.top_k:
            raise self._no_mask("without top_p below 1 or top_k every token is kept; set one of these")
        if self.engine not in ("hf", "vllm"):
            raise self._no_mask(f"engine {self.engine} does not say which tokens it kept; set engine to hf or vllm")
        if self.engine == "vllm" and not self.top_k:
            raise self._no_mask("vLLM keeps masks only where top_k bounds their size; set top_k too, e.g. to 512")
        if self.is_own:
            raise self._no_mask(f"{self.own_setting} has calls of its own; leave that out")
        return self

    def _no_mask(self, why: str) -> ValidationError:
        return self.refusal("keep_sampling_mask", f"{why}, or keep_sampling_mask to false")

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        given = [name for name in ("function", "agent", "agent_command") if getattr(self, name)]
        if given and self.stop:
            raise self.refusal(
                "stop",
                f"it is for one response to each prompt, and {given[0]} has calls of its own; give each call its "
                f"`stop`, and leave this out",
            )
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; keep one")
        if self.tools and self.function is None:
            raise self.refusal("tools", "there is no rollout.function to use them; add `function: tools`")
        if self.models and self.function is None:
            raise self.refusal(
                "models", "only rollout.function asks them, and agents have clients of their own; remove them"
            )
        return self


def unusable_stop(text: object) -> str:
    """Return what is wrong with a stop string; "": nothing."""
    if not isinstance(text, str) or not text:
        return "must be a text that is not empty"
    if any(each == "\ufffd" or "\ud800" <= each <= "\udfff" for each in text):
        return "must be whole characters: no half of one, and no U+FFFD, which stands for such"
    return ""
