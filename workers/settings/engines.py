"""Settings of the models that are trained, and of those that only compute log-probabilities. Torch-free."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from asyncflow.registry import Registry
from asyncflow.settings import Settings
from workers.settings.megatron import MegatronConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
TRAIN_ENGINES = Registry(
    "asyncflow.actor_engines",
    {
        "fsdp": "workers.engines.fsdp.sharding:FsdpEngine.of_run",
        "megatron": "workers.engines.megatron.engine:MegatronEngine.of_run",
        "sim": "workers.engines.sim.engine:SimTrainEngine.of_run",
    },
)
"""What `actor.engine` may say."""
REF_ENGINES = Registry(
    "asyncflow.ref_engines",
    {
        "hf": "workers.engines.hf.frozen:FrozenModel.of_run",
        "fsdp": "workers.engines.fsdp.sharding:FsdpFrozenModel.of_run",
        "megatron": "workers.engines.megatron.engine:MegatronFrozenModel.of_run",
        "sim": "workers.engines.sim.engine:SimFrozenModel.of_run",
    },
)
"""What `ref.engine` may say."""


class TrainingConfig(Settings):
    """How a model is trained."""

    micro_batch_size: int = Field(16, ge=1)
    """Rollouts per rank and forward-backward; with `max_tokens_per_micro_batch`: rollouts that a rank gets at a time,
    and cuts by tokens."""
    max_tokens_per_micro_batch: int = Field(0, ge=0)
    """Tokens per rank and forward-backward: as few micro-batches as fit, whatever the lengths; a sample (a prompt with
    its response, or a conversation) that is longer by itself is alone. A shared prompt counts once. 0:
    `micro_batch_size` counts. With `tq.policy: token-budget` a rank also gets no more at a time, where a prompt counts
    for each of its samples."""
    shared_prompt: bool = True
    """Compute a prompt that several samples of a micro-batch have in common once; the gradient is the same."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate after warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: it stays, or falls to `lr_min_ratio` x `lr`."""
    lr_decay_steps: int = Field(0, ge=0)
    """Step at which it has fallen; 0: the run's last one, so a run that is resumed with more steps has another rate."""
    lr_min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of `lr` that is left."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW."""
    eps: float = Field(1e-8, gt=0)
    """AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, of matrices; norms and biases, which have one dimension, do not decay."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Largest global L2 norm of the gradient; null: any."""
    autocast: Literal["float32", "bfloat16"] = "float32"
    """Element type of the forward and backward computation."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """Compile each layer with `torch.compile` (minutes at the first micro-batches; needs a C++ compiler on the CPU).
    Attention stays as it is."""

    def for_run(self, steps: int, *, begins_after: int = 0) -> Self:
        """Return this with `lr_decay_steps` as it stands for a run, counted from the first step that is trained.

        Args:
            steps: of the run: what `lr_decay_steps: 0` stands for.
            begins_after: so many of its first steps do not train this model.
        """
        return self.model_copy(update={"lr_decay_steps": max(1, (self.lr_decay_steps or steps) - begins_after)})


class ActorConfig(TrainingConfig):
    """Training."""

    engine: Annotated[str, AfterValidator(TRAIN_ENGINES.resolve)] = "fsdp"
    """Training engine; `fsdp`: FSDP2 over all actor ranks; `megatron`: tensor, pipeline and data parallelism, see
    `actor.megatron`; `sim`: sleeps, see `sim`; a class of yours, `module:Class` (docs/engines.md)."""
    engine_options: dict[str, Any] = Field({})
    """Settings of an engine of yours, checked by its `Config`."""
    megatron: MegatronConfig = MegatronConfig()
    num_mini_batches: int = Field(1, ge=1)
    """Optimizer updates per pass over a step's batch: it is cut into so many mini-batches of whole groups. A step makes
    one version of the weights, however many updates it has."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over a step's batch."""
    tri_model: bool = False
    """Policy, old policy and reference in one layout in the actor, log-probabilities of all three in the micro-step
    that trains a micro-batch: the reference is sharded over the actor's ranks, and the old policy is the version that
    drew a token, as the trainer computes it (the ratio is exactly 1 on-policy). Keeps `max_staleness` older policies;
    see `workers.trainer.tri_model`."""

    def num_replicas(self, num_ranks: int) -> int:
        """Return how many groups of ranks train on rows of their own.

        Raises:
            ConfigError: the ranks make no whole replicas.
        """
        return self.megatron.layout(num_ranks).replicas if self.engine == "megatron" else num_ranks

    @property
    def num_updates(self) -> int:
        """Optimizer updates of a step."""
        return self.num_mini_batches * self.ppo_epochs


class CriticConfig(TrainingConfig):
    """The critic of PPO: the policy's backbone with a head that gives one number (FSDP2 over its ranks).

    It makes as many updates of a step as the actor (`actor.num_mini_batches`, `actor.ppo_epochs`). In a role of its
    own it has `micro_batch_size` responses per rank and forward-backward; inside the actor it has the actor's.
    """

    path: str | None = None
    """Hugging Face model directory, or OWNER/NAME on the Hub, that it begins with, e.g. a reward model; null:
    `model.path`, with a head of zeros. It must have the policy's tokens. Relative: beside the config file, else in the
    working directory."""
    revision: str | None = None
    """As `model.revision`."""
    lr: float = Field(1e-5, gt=0)
    """AdamW's learning rate after warm-up."""
    num_critic_only_steps: int = Field(0, ge=0)
    """In so many first steps only the critic is trained; each makes a version of the policy that is the one before. The
    policy's warm-up begins after them; `actor.lr_decay_steps` counts them."""

    def training(self, actor: ActorConfig) -> ActorConfig:
        """Return what the critic's engine must know: its own optimizer, and as many updates as the actor makes."""
        own = {name: getattr(self, name) for name in TrainingConfig.model_fields}
        return actor.model_copy(update=own)


class RefConfig(Settings):
    """The frozen reference; all of it holds for `actor_fwd`, too."""

    engine: Annotated[str, AfterValidator(REF_ENGINES.resolve)] = "hf"
    """`hf`: transformers, each rank has a copy. `fsdp`: FSDP2, `shards` ranks have a copy and divide its rows;
    `megatron`: the ranks of `ref.megatron` have a copy. `sim`: sleeps, see `sim`. A class of yours, `module:Class`
    (docs/engines.md), has a copy a rank, and `actor_fwd` is transformers' beside it."""
    engine_options: dict[str, Any] = Field({})
    """Settings of an engine of yours, checked by its `Config`."""
    shards: int = Field(1, ge=1)
    """With `fsdp`: ranks that have a copy together."""
    megatron: MegatronConfig = MegatronConfig()
    """With `megatron`, as `actor.megatron`."""
    micro_batch_size: int = Field(32, ge=1)
    """Responses per forward of a copy, and of what actor and critic compute of them before they train by tokens.
    Rollouts of several turns are cut as the model's that is trained (`max_tokens_per_micro_batch`)."""
    shared_prompt: bool = True
    """As `actor.shared_prompt`."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that have one copy of the model together."""
        return {"fsdp": self.shards, "megatron": self.megatron.ranks_per_copy}.get(self.engine, 1)

    def computation(self, dtype: Literal["float32", "bfloat16"]) -> ActorConfig:
        """Return how an engine of the trainer's computes this model, in the element type of its weights."""
        megatron, shared_prompt = self.megatron, self.shared_prompt
        return ActorConfig(autocast=dtype, megatron=megatron, shared_prompt=shared_prompt)
