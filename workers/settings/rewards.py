"""Settings of rewards: functions, scorers, reward models. Torch-free."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from asyncflow.registry import Registry
from asyncflow.settings import Settings

# Valid values of `reward.function`; the last two run in child processes, like users' functions.
REWARDS = Registry(
    "asyncflow.rewards",
    {
        "exact": "workers.rewards.load_reward:exact_reward",
        "digits": "workers.rewards.load_reward:digits_reward",
        "math": "workers.rewards.math:math_reward",
        "math_verify": "workers.rewards.pooled:verified_math",
        "regex": "workers.rewards.pooled:last_match",
    },
    "module:function or a URL",
)
ISOLATED = ("math_verify", "regex")


class RewardModelConfig(Settings):
    """A model that scores responses, in the role `reward`.

    The reward is weight x the model's score + function_weight x the reward of `reward.function`.
    """

    path: str
    """Hugging Face directory of a sequence classification model with one label and the policy's tokens, e.g.
    `LlamaForSequenceClassification`, or OWNER/NAME on the Hub. A relative path is looked up beside the config file,
    then in the working directory."""
    revision: str | None = None
    """Like `model.revision`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of its weights."""
    shards: int = Field(1, ge=1)
    """Ranks that share the model (FSDP2) and divide what is scored; they must be on one node."""
    micro_batch_size: int = Field(32, ge=1)
    """Responses per forward pass of a copy."""
    weight: float = 1.0
    """Factor on the model's score."""
    function_weight: float = 0.0
    """Factor on the function's reward; 0: the reward is the model's score alone. The function decides in any case which
    responses are correct."""

    @field_validator("weight")
    @classmethod
    def _model_counts(cls, weight: float) -> float:
        if weight == 0:
            raise ValueError("0 leaves the model out; give another number, or remove reward.model")
        return weight


class RewardConfig(Settings):
    """How responses are scored."""

    function: Annotated[str, AfterValidator(REWARDS.resolve_name)] = "exact"
    """`exact`; `digits`; `math`: final numbers; `math_verify`: final formulas, compared by the library of that name;
    `regex`: what `pattern` finds; any Python callable, also `async def`, as `module:function`; a remote scorer,
    `http://HOST:PORT/PATH` (docs/rewards.md)."""
    timeout_s: float = Field(10.0, gt=0, le=86400)
    """Deadline of one call of your function, one comparison, or one request to a remote scorer (s)."""
    pattern: str | None = None
    """Regular expression for `regex`: the first group of its last match is compared with the ground truth."""
    concurrency: int | None = Field(None, ge=1, le=1024)
    """Responses that one process scores at the same time; null: 4, or 64 with a remote scorer. For a function of your
    own: the number of child processes or, for an `async def`, of calls in one."""
    batch_size: int = Field(16, ge=1)
    """Most responses in one request to a remote scorer."""
    retries: int = Field(5, ge=0)
    """How often a failed request to a remote scorer is retried."""
    max_failures_in_a_row: int = Field(1000, ge=0)
    """The run ends with an error when this many responses in a row have no score in one process: responses without a
    score have no weight, so there would be little or nothing to learn from. 0: never."""
    max_failed_share: float = Field(0.5, ge=0, le=1)
    """The run ends with an error when more than this share of the responses have no score, among the last 1,000, or
    among all of a step that has more; with fewer than a hundred, as many may fail as of a hundred. Failures are rarely
    a fair sample: a function that raises for wrong responses leaves the right ones, and the accuracy is 1. From a tenth
    on there is a warning. 1: never."""
    group_function: str | None = None
    """A function of your own as `module:function`, also `async def`, which sees all members of a group at once and
    returns their rewards: `(task, members) -> [...]` (docs/rewards.md)."""
    model: RewardModelConfig | None = None
    """A model that also scores responses; needs the role `reward`."""

    @model_validator(mode="after")
    def _pattern_is_read(self) -> Self:
        if self.pattern is not None and self.function != "regex":
            raise self.refusal("pattern", f"only reward.function regex reads it, not {self.function}; remove it")
        return self

    @property
    def is_users(self) -> bool:
        """Whether the function is the user's own, local or behind a URL; it may report the parts of its rewards."""
        return ":" in self.function

    @property
    def is_called(self) -> bool:
        """Whether the function is the user's own, in a child process here."""
        return self.is_users and not self.function.startswith(("http://", "https://"))
