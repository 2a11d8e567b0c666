"""Settings of trained models, and of those that only compute log-probabilities. Torch-free."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from asyncflow.errors import ConfigError
from asyncflow.registry import Registry
from asyncflow.settings import Settings
from workers.settings.megatron import MegatronConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
# Valid values of `actor.engine`.
TRAIN_ENGINES = Registry(
    "asyncflow.actor_engines",
    {
        "fsdp": "workers.engines.fsdp.sharding:FsdpEngine.of_run",
        "megatron": "workers.engines.megatron.engine:MegatronEngine.of_run",
        "sim": "workers.engines.sim.engine:SimTrainEngine.of_run",
    },
)
# Valid values of `ref.engine`.
REF_ENGINES = Registry(
    "asyncflow.ref_engines",
    {
        "hf": "workers.engines.hf.frozen:FrozenModel.of_run",
        "fsdp": "workers.engines.fsdp.sharding:FsdpFrozenModel.of_run",
        "megatron": "workers.engines.megatron.engine:MegatronFrozenModel.of_run",
        "sim": "workers.engines.sim.engine:SimFrozenModel.of_run",
    },
)


def _shards_are_shared(section: Any) -> Any:
    if section.shards > 1 and section.engine != "fsdp":
        why = "only engine fsdp divides a copy over ranks; set engine to fsdp, or shards to 1"
        raise section.refusal("shards", why)
    return section


class TrainingConfig(Settings):
    """How a model is trained."""

    micro_batch_size: int = Field(16, ge=1)
    """Rollouts per rank and forward-backward. With `max_tokens_per_micro_batch`: rollouts that a rank gets at a time
    and cuts by tokens."""
    max_tokens_per_micro_batch: int = Field(0, ge=0)
    """Tokens per rank and forward-backward: as few micro-batches as fit, whatever the lengths; a sample (a prompt with
    its response, or a conversation) that exceeds it is alone. A shared prompt counts once. 0: `micro_batch_size` counts
    instead. With `tq.policy: token-budget` it also limits what a rank gets at a time; there a prompt counts for each of
    its samples."""
    shared_prompt: bool = True
    """Compute a prompt that several samples of a micro-batch share only once; the gradient is the same."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate after warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: it stays, or falls to `lr_min_ratio` x `lr`."""
    lr_decay_steps: int = Field(0, ge=0)
    """Step at which it has fallen; 0: the run's last step, so resuming with more steps changes the rate."""
    lr_min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of the decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay of matrices; norms and biases, which have one dimension, do not decay."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Largest global L2 norm of the gradient; null: no limit."""
    autocast: Literal["float32", "bfloat16"] = "float32"
    """Element type of the forward and backward computation."""
    fsdp_size: int = Field(0, ge=0)
    """With `fsdp`: ranks, neighbours, that share one sharded copy; the others hold replicas of it (HSDP), so that
    weights are gathered inside a node and only gradients go between nodes. 0: all ranks share one copy."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """Compile each layer with `torch.compile` (takes minutes in the first micro-batches; needs a C++ compiler on the
    CPU). Attention is not compiled."""

    def check_fsdp_size(self, num_ranks: int, *, section: str = "actor") -> None:
        """Raise ConfigError if `num_ranks` make no whole copies of `fsdp_size` ranks."""
        if self.fsdp_size and num_ranks % self.fsdp_size:
            raise ConfigError(
                f"{section}.fsdp_size: {self.fsdp_size} does not divide the {num_ranks} ranks of {section}; choose a "
                f"divisor, or 0"
            )

    def for_run(self, steps: int, *, begins_after: int = 0) -> Self:
        """Return this with `lr_decay_steps` resolved for a run of `steps`, counted from the first step that trains this
        model; `begins_after`: the number of steps before it."""
        return self.model_copy(update={"lr_decay_steps": max(1, (self.lr_decay_steps or steps) - begins_after)})


class ActorConfig(TrainingConfig):
    """Training of the policy."""

    engine: Annotated[str, AfterValidator(TRAIN_ENGINES.resolve_name)] = "fsdp"
    """Training engine; `fsdp`: FSDP2 over all actor ranks; `megatron`: tensor, pipeline and data parallelism, see
    `actor.megatron`; `sim`: sleeps, see `sim`; a class of your own, `module:Class` (docs/engines.md)."""
    engine_options: Annotated[dict[str, Any], AfterValidator(TRAIN_ENGINES.options)] = Field({})
    """Settings of an engine of your own, checked by its `Config`."""
    megatron: MegatronConfig = MegatronConfig()
    num_mini_batches: int = Field(1, ge=1)
    """Optimizer updates per pass over a step's batch, which is cut into as many mini-batches of whole groups. However
    many updates it has, a step makes one version of the weights."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over a step's batch."""
    tri_model: bool = False
    """Keep policy, old policy and reference in one layout in the actor, and compute the log-probabilities of all three
    in the micro-step that trains a micro-batch. The reference is sharded over the actor's ranks, and the old policy is
    the version that drew a token, as the trainer computes it (the ratio is exactly 1 on-policy). Keeps `max_staleness`
    older policies; see `workers.trainer.tri_model`."""

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        if self.compile and self.engine == "megatron":
            raise self.refusal(
                "compile", "megatron's layers are not compiled; set it to false, or actor.engine to fsdp"
            )
        if self.fsdp_size and self.engine != "fsdp":
            raise self.refusal("fsdp_size", "only engine fsdp shards; set it to 0")
        if self.tri_model and self.engine not in ("fsdp", "megatron"):
            raise self.refusal("tri_model", f"engine {self.engine} keeps no copies of the policy; use fsdp or megatron")
        return self

    def num_replicas(self, num_ranks: int) -> int:
        """Return how many groups of ranks train on rows of their own; raises ConfigError if they make no whole
        replicas."""
        return self.megatron.layout(num_ranks).replicas if self.engine == "megatron" else num_ranks

    @property
    def num_updates(self) -> int:
        return self.num_mini_batches * self.ppo_epochs


class CriticConfig(TrainingConfig):
    """PPO's critic: the policy's backbone with a head that returns one number (FSDP2 over its ranks).

    It makes as many updates per step as the actor (`actor.num_mini_batches`, `actor.ppo_epochs`). In a role of its own
    it uses its own `micro_batch_size`; inside the actor it uses the actor's.
    """

    path: str | None = None
    """Initial weights: a Hugging Face model directory or OWNER/NAME on the Hub, e.g. a reward model; null: `model.path`
    with a head of zeros. It must have the policy's tokens. A relative path is looked up beside the config file, then in
    the working directory."""
    revision: str | None = None
    """Like `model.revision`."""
    lr: float = Field(1e-5, gt=0)
    """AdamW's learning rate after warm-up."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Number of first steps that train only the critic; each makes a policy version equal to the previous one. The
    policy's warm-up begins after them; `actor.lr_decay_steps` includes them."""

    def training(self, actor: ActorConfig) -> ActorConfig:
        """Return what the critic's engine must know: its own optimizer settings, and the actor's number of updates."""
        own = {name: getattr(self, name) for name in TrainingConfig.model_fields}
        return actor.model_copy(update=own)


class TeacherModel(Settings):
    """A model that the policy learns from."""

    path: str | None = None
    """A Hugging Face model directory or OWNER/NAME on the Hub; it must have the policy's tokens. A relative path is
    looked up beside the config file, then in the working directory."""
    revision: str | None = None
    """Like `model.revision`."""


class TeacherConfig(TeacherModel):
    """A teacher beside the reference, in the role `teacher` (`algorithm.teacher_coef`)."""

    sources: dict[str, TeacherModel] = Field({})
    """Several teachers: name of a source of `data.mixture` -> the one of its rows, e.g. `{math: {path: org/math-7b}}`;
    the other rows have that of `path`. Every rank holds them all."""
    engine: Literal["hf", "fsdp"] = "hf"
    """`hf`: transformers, one copy per rank. `fsdp`: FSDP2, `shards` ranks share a copy and divide its rows."""
    shards: int = Field(1, ge=1)
    """With `fsdp`: ranks that share a copy."""
    micro_batch_size: int = Field(32, ge=1)
    """Responses per forward pass. Rollouts of several turns are cut like those of the trained model."""
    shared_prompt: bool = True
    """Like `actor.shared_prompt`."""

    @model_validator(mode="after")
    def _sources_have_models(self) -> Self:
        for name, one in self.sources.items():
            if one.path is None:
                raise self.refusal_of(("sources", name), dict(one), "it has no path; name the teacher of these rows")
        return self

    _shards = model_validator(mode="after")(_shards_are_shared)

    @property
    def ranks_per_copy(self) -> int:
        return self.shards if self.engine == "fsdp" else 1

    @property
    def models(self) -> dict[str, str]:
        """Setting -> directory of each teacher."""
        named = {f"teacher.sources.{name}.path": one.path for name, one in self.sources.items()}
        return {key: path for key, path in {"teacher.path": self.path, **named}.items() if path is not None}


class RefConfig(Settings):
    """The frozen reference; all settings also hold for `actor_fwd`."""

    engine: Annotated[str, AfterValidator(REF_ENGINES.resolve_name)] = "hf"
    """`hf`: transformers, one copy per rank. `fsdp`: FSDP2, `shards` ranks share a copy and divide its rows;
    `megatron`: the ranks of `ref.megatron` share a copy. `sim`: sleeps, see `sim`. A class of your own, `module:Class`
    (docs/engines.md), has one copy per rank, and `actor_fwd` uses transformers beside it."""
    engine_options: Annotated[dict[str, Any], AfterValidator(REF_ENGINES.options)] = Field({})
    """Settings of an engine of your own, checked by its `Config`."""
    path: str | None = None
    """Weights of the reference: a Hugging Face model directory or OWNER/NAME on the Hub; it must have the policy's
    tokens. null: `model.path`. A relative path is looked up beside the config file, then in the working directory."""
    revision: str | None = None
    """Like `model.revision`."""
    shards: int = Field(1, ge=1)
    """With `fsdp`: ranks that share a copy."""
    megatron: MegatronConfig = MegatronConfig()
    """With `megatron`: like `actor.megatron`."""
    micro_batch_size: int = Field(32, ge=1)
    """Responses per forward pass of a copy; also the limit for what actor and critic compute before training, if they
    train by tokens. Rollouts of several turns are cut like those of the trained model (`max_tokens_per_micro_batch`).
    """
    shared_prompt: bool = True
    """Like `actor.shared_prompt`."""

    _shards = model_validator(mode="after")(_shards_are_shared)

    @property
    def ranks_per_copy(self) -> int:
        return {"fsdp": self.shards, "megatron": self.megatron.ranks_per_copy}.get(self.engine, 1)

    def computation(self, dtype: Literal["float32", "bfloat16"]) -> ActorConfig:
        """Return how one of the trainer's engines computes this model, in the element type of its weights."""
        megatron, shared_prompt = self.megatron, self.shared_prompt
        return ActorConfig(autocast=dtype, megatron=megatron, shared_prompt=shared_prompt)
