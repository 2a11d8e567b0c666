"""The configuration of the whole run, composed of the sections that live beside their code. Torch-free.

The launcher reads, checks and resolves it (`load_config`); workers load the run's resolved `config.yaml`.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from asyncflow.json_lines import replace_text
from asyncflow.log_format import LogFormat
from asyncflow.registry import Registry
from asyncflow.run_files import CONFIG_FILE
from asyncflow.settings import Settings
from tq.config import QueueConfig
from tq.policies import policy_name
from weightsync.config import WeightSyncConfig
from workers.settings.algorithms import AlgorithmConfig, GRPOConfig
from workers.settings.data import HELD_OUT_SOURCES, DataConfig, HubPart, PromptTemplate
from workers.settings.engines import ActorConfig, CriticConfig, RefConfig, TeacherConfig, TrainingConfig
from workers.settings.lora import LoraConfig
from workers.settings.openai import OpenAIConfig
from workers.settings.rewards import RewardConfig
from workers.settings.rollout import ENGINES, RolloutConfig, SamplingConfig, Temperature
from workers.settings.schedule import ScheduleConfig
from workers.settings.sim import SimConfig
from workers.settings.tasks import UserTaskConfig
from workers.settings.vllm import VllmConfig

# Valid values of `evaluate.engine`. Not `openai`: its servers hold the weights of one version, the rollout's.
EVALUATE_ENGINES = Registry(ENGINES.group, {name: at for name, at in ENGINES.built_in.items() if name != "openai"})
# Valid values of `loggers[].name`; a built-in one has the name of its library and of the extra that installs it.
LOGGERS = Registry(
    "asyncflow.loggers",
    {
        "tensorboard": "launcher.loggers.backends:TensorBoard",
        "wandb": "launcher.loggers.backends:Wandb",
        "swanlab": "launcher.loggers.backends:SwanLab",
        "mlflow": "launcher.loggers.backends:MLflow",
        "trackio": "launcher.loggers.backends:Trackio",
    },
)


class ModelConfig(Settings):
    """The policy, which is also the reference."""

    path: str
    """Hugging Face model directory (config.json, *.safetensors, tokenizer), or OWNER/NAME on the Hugging Face Hub,
    which is downloaded before a run starts. A relative path is looked up beside the config file, then in the working
    directory."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; null: the newest commit of `main`. A run keeps the commit that it
    found."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the generating and reference copies; the trainer's master weights are float32."""
    renderer: str | None = None
    """How conversations of a `rollout.function` or an agent become tokens and back: a name from the package
    `renderers`, or a class of your own, `module:Class`; null: the tokenizer's chat template (docs/agents.md)."""


class HeldOutSet(HubPart):
    """One of several sets of held-out prompts. What is null here is as in section `evaluate`, or else in `data`."""

    path: str | None = None
    """Held-out prompts, like `data.path`."""
    source: Annotated[str, AfterValidator(HELD_OUT_SOURCES.resolve_name)] | None = None
    """Instead of `path`: `module:Class`, like `data.source`; training never sees its seeds."""
    options: dict[str, Any] = Field({})
    """Keyword arguments for `source`."""
    prompt_field: str | None = None
    """Field of the prompt; null: `data.prompt_field`."""
    ground_truth_field: str | None = None
    """Field of the ground truth; null: `data.ground_truth_field`."""
    prompt_template: PromptTemplate | None = None
    """Text around the prompt; null: `data.prompt_template`."""
    system_prompt: str | None = None
    """null: `data.system_prompt`."""
    chat_template: bool | None = None
    """null: `data.chat_template`."""
    max_prompts: int | None = Field(None, ge=0)
    """Use only the first `max_prompts` prompts; 0: all. A source without `len()` needs it."""
    n_samples_per_prompt: int | None = Field(None, ge=1)
    """Responses per prompt: accuracy is their mean (avg@k), beside pass@2, pass@4 ..."""
    temperature: Temperature | None = Field(None, ge=0)
    """Sampling temperature; 0: greedy, always the most likely token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling. No effect on a greedy response."""
    top_k: int | None = Field(None, ge=0, lt=2**31)
    """Keep the k most likely tokens. No effect on a greedy response."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response (tokens)."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if self.path is not None and self.source is not None:
            raise ValueError("give either path (a file, or OWNER/NAME on the Hub) or source (module:Class), not both")
        if self.is_part and self.path is None:
            raise ValueError("subset, split and revision are for path, which is missing; set it, or remove them")
        if self.options and self.source is None:
            raise ValueError("options are for source, which is missing; set source, or remove options")
        return self


_SET_NAME = re.compile(r"[\w.-]+")


class EvaluateConfig(HeldOutSet):
    """Evaluation on held-out prompts during training, by the role `evaluate`."""

    path: str | None = None
    """Held-out prompts, like `data.path`, with the fields and templates of `data`; the role needs this, `source` or
    `sets`."""
    sets: dict[str, HeldOutSet] = Field({})
    """Instead of `path`: several sets by name, each with fields, templates and sampling of its own, e.g. `{gsm8k:
    {path: openai/gsm8k, subset: main, split: test}, aime24: {path: aime24.jsonl, n_samples_per_prompt: 64, temperature:
    0.6}}`. The first one's figures are the evaluation's; all have theirs as `NAME/accuracy` and so on."""
    interval: int = Field(10, ge=1)
    """Evaluate the weights of step 0, then every `interval` steps, and those of the last step."""
    max_prompts: int = Field(0, ge=0)
    """Use only the first `max_prompts` prompts; 0: all. A source without `len()` needs it."""
    n_samples_per_prompt: int = Field(1, ge=1)
    """Responses per prompt: accuracy is their mean (avg@k), beside pass@2, pass@4 ..."""
    engine: Annotated[str, AfterValidator(EVALUATE_ENGINES.resolve_name)] = "hf"
    """Generating engine; see `rollout.engine`."""
    engine_options: Annotated[dict[str, Any], AfterValidator(EVALUATE_ENGINES.options)] = Field({})
    """Like `rollout.engine_options`."""
    temperature: Temperature = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy, always the most likely token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; null: as in the rollout. No effect on a greedy response."""
    top_k: int | None = Field(None, ge=0, lt=2**31)
    """Keep the k most likely tokens; null: as in the rollout. No effect on a greedy response."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response (tokens); null: as in the rollout."""
    timeout_s: float = Field(600.0, gt=0)
    """How long a run whose last step is trained and saved waits for evaluations to finish (s)."""

    @field_validator("sets")
    @classmethod
    def _have_names_and_origins(cls, sets: dict[str, HeldOutSet]) -> dict[str, HeldOutSet]:
        for name, one in sets.items():
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"the name {name!r} must be made of letters, digits, _ . and -")
            if one.path is None and one.source is None:
                raise ValueError(f"{name} has no prompts; give it path or source")
        return sets

    @model_validator(mode="after")
    def _responses_to_a_prompt_differ(self) -> Self:
        for name, one in self.named_sets().items():
            if one.temperature == 0 and one.n_samples_per_prompt > 1:
                key = "n_samples_per_prompt"
                own = bool(name) and self.sets[name].n_samples_per_prompt is not None
                raise self.refusal_of(
                    ("sets", name, key) if own else (key,),
                    one.n_samples_per_prompt,
                    f"greedy responses to one prompt are all the same; set {key} to 1, or temperature above 0",
                )
        return self

    @model_validator(mode="after")
    def _has_sets_or_one_origin(self) -> Self:
        if self.sets and (self.path is not None or self.source is not None):
            raise ValueError("give either path or source, or sets, not both; make the one a set, too")
        return self

    @property
    def has_prompts(self) -> bool:
        return bool(self.sets) or self.path is not None or self.source is not None

    def named_sets(self) -> "dict[str, EvaluateConfig]":
        """Return name -> each set, with what it inherits from this section; the section's own one has the name ""."""
        if not self.sets:
            return {"": self}
        found = {}
        for name, one in self.sets.items():
            origin = {key: getattr(one, key) for key in _ORIGIN}
            given = {key: value for key in HeldOutSet.model_fields if (value := getattr(one, key)) is not None}
            found[name] = self.model_copy(update={**given, **origin, "sets": {}})
        return found

    def prompts(self, data: DataConfig, *, key: str = "evaluate") -> DataConfig:
        """Return how to read the held-out prompts: like the training data, in file order. Needs `path` or `source`;
        `key`: the section of the set, for messages."""
        assert self.path or self.source, "the preflight checks refuse the role without prompts, and sets have theirs"
        own = {name: getattr(self, name) for name in _ORIGIN}
        given = {name: value for name in _OF_DATA if (value := getattr(self, name)) is not None}
        changed: dict[str, Any] = {
            "mixture": (),
            "sampler": None,
            "sampler_options": {},
            "shuffle": False,
            "completion_field": None,  # a response is generated and compared with the ground truth
        }
        return data.of_section(key, **own, **given, **changed)

    def sampling(self, rollout: RolloutConfig) -> SamplingConfig:
        """Return how the engine is made that answers held-out prompts; null settings are inherited from the rollout.
        With several sets, responses may be as long as the longest, and each set says how it draws."""
        names = ("engine", "engine_options", "temperature", "top_p", "top_k", "max_response_tokens")
        own = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in own.items() if value is not None}
        inherited = {name: getattr(rollout, name) for name in SamplingConfig.model_fields}
        sampling = SamplingConfig.model_construct(**(inherited | given))  # both are checked
        if not self.sets:
            return sampling
        sets = [one.sampling(rollout) for one in self.named_sets().values()]
        drawn = sets[0] if len({one.draws_by for one in sets}) == 1 else sampling.model_copy(update=_NEUTRAL)
        return drawn.model_copy(update={"max_response_tokens": max(one.max_response_tokens for one in sets)})


def key_of_set(name: str) -> str:
    """Return the section of a set of `EvaluateConfig.named_sets`, for messages."""
    return f"evaluate.sets.{name}" if name else "evaluate"


# Settings of a set that say where its prompts are, and which of the data's settings it may replace.
_ORIGIN = ("path", "source", "options", *HubPart.model_fields)
_OF_DATA = ("prompt_field", "ground_truth_field", "prompt_template", "system_prompt", "chat_template")
# How an engine is made whose sets draw differently.
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


class CheckpointConfig(Settings):
    """What to save, and how often."""

    interval: int = Field(20, ge=0)
    """Save every `interval` steps; 0: only at the end or when stopped."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints to keep; older ones are removed, except the one that a run resumed from."""
    keep_every: int = Field(0, ge=0)
    """Keep checkpoints of steps that are multiples of this forever; 0: none."""
    export_hf: bool = True
    """Also write a Hugging Face directory that `transformers` loads. A stop leaves it out; a resume or `asyncflow
    export` adds it."""
    timeout_s: float = Field(3600.0, gt=0)
    """Deadline of one save, which is written while training continues (s)."""
    write_gb_per_s: float | None = Field(None, gt=0)
    """How fast all nodes together write to the run directory (GB/s), to tell before the start whether a stop leaves
    time for its save; null: measured by a short write."""


class LauncherConfig(Settings):
    """Processes and devices."""

    device: str = "auto"
    """Where model ranks run: `cpu`, `cuda`, `npu`, or the device of another installed vendor; `auto`: the available
    accelerator, otherwise the CPU."""
    threads_per_worker: int = Field(1, ge=1)
    """Intra-op threads of every worker on the CPU."""
    log_format: LogFormat = "text"
    """Of the messages in `logs/`: `text`, or `json`: an object per line with `time`, `role`, `gang`, `rank`, `level`,
    `logger`, `message`. What libraries and your own functions print stays as it is."""
    devices_per_node: int = Field(0, ge=0)
    """How many accelerators of every node ranks may use, counted from the first; 0: as many as node 0 has."""
    device_memory_gb: float | None = Field(None, gt=0)
    """Memory of every accelerator (GB): what cannot fit is refused, and `--dry-run` prints an estimate per role; null:
    neither."""
    environments: dict[str, str | dict[str, str]] = Field({})
    """Role -> the Python interpreter of its processes, e.g. `{rollout: /envs/vllm/bin/python}`, or node (its number, or
    its host's name) -> interpreter; the other roles and nodes have the launcher's (docs/running.md)."""
    external_gangs: tuple[str, ...] = ()
    """Gangs (e.g. `rollout-1`) that you start by hand, with the `torchrun` line that `--dry-run` prints."""
    start_timeout_s: float = Field(300.0, gt=0)
    """How long a start may take without progress (s). Bytes that a worker reads or writes count as progress, and
    compilers that it runs. `vllm.start_timeout_s` holds instead if vLLM generates and it is longer."""
    max_start_s: float = Field(7200.0, gt=0)
    """How long a start may take at all, however much it reads and writes (s)."""
    stop_timeout_s: float = Field(30.0, gt=0)
    """How long workers may take to exit after a stop request before they are killed (s). A checkpoint that is being
    written by then gets as long as it takes: up to `checkpoint.timeout_s`, in a Slurm job up to the job's end."""
    operation_timeout_s: float = Field(1800.0, gt=0)
    """Longest time that a busy worker may take without progress (a response, a micro-batch, an update, a save); after
    that it counts as stuck and is restarted (s)."""
    silence_timeout_s: float = Field(120.0, gt=0)
    """Longest time that a running worker process may stay silent, e.g. in native code that holds Python's lock; after
    that it counts as stuck (s). Dead and stopped processes are detected within seconds."""
    deadlock_timeout_s: float = Field(300.0, gt=0)
    """Longest time during which every worker waits for another (s)."""
    max_restarts: int = Field(3, ge=0)
    """How often within `restart_window_s` a gang is restarted alone; after that everything goes back to the last
    checkpoint. 0: never alone."""
    max_global_restarts: int = Field(2, ge=0)
    """How often within `restart_window_s` everything is restarted; after that the run fails."""
    restart_window_s: float = Field(600.0, gt=0)
    """Older failures do not count (s)."""

    @field_validator("environments", mode="before")
    @classmethod
    def _numbers_are_names(cls, given: Any) -> Any:
        # YAML reads a node's number as one, JSON as text.
        if not isinstance(given, dict):
            return given
        return {
            role: {str(node): python for node, python in named.items()} if isinstance(named, dict) else named
            for role, named in given.items()
        }

    @field_validator("environments")
    @classmethod
    def _names_interpreters(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {
            role: {node: _interpreter(python) for node, python in named.items()}
            if isinstance(named, dict)
            else _interpreter(named)
            for role, named in given.items()
        }

    def interpreters(self, node: int, host: str) -> dict[str, str]:
        """Return role -> its interpreter on a node; the other roles have that of the node's launcher."""
        found = {}
        for role, named in self.environments.items():
            python = named.get(str(node), named.get(host)) if isinstance(named, dict) else named
            if python is not None:
                found[role] = python
        return found

    def interpreter_here(self, role: str) -> str | None:
        """Return an interpreter of a role that this machine has, whichever node it is; None: the launcher's."""
        named = self.environments.get(role, {})
        candidates = named.values() if isinstance(named, dict) else [named]
        return next((python for python in candidates if os.path.exists(python)), None)  # noqa: PTH110


def _interpreter(text: str) -> str:
    # Not resolved: the interpreter of a virtual environment is a link, and finds its packages by the link's place.
    path = os.path.expanduser(text)  # noqa: PTH111 (pathlib's raises where a user has no home)
    if not os.path.isabs(path):  # noqa: PTH117
        raise ValueError(f"{text!r} is not absolute; write the interpreter's path out, from /")
    return path


class LoggerConfig(Settings):
    """A place where people look at runs (docs/loggers.md). A name alone is enough: `loggers: [tensorboard]`."""

    name: Annotated[str, AfterValidator(LOGGERS.resolve_name)]
    """`tensorboard`, `wandb`, `swanlab`, `mlflow`, `trackio`, or a class of your own, `module:Class`."""
    options: dict[str, Any] = Field({})
    """Keyword arguments, e.g. `{mode: offline, project: sums}` for wandb; the `Config` of the logger's class checks
    them."""

    @model_validator(mode="before")
    @classmethod
    def _is_named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


COLOCATED = ("rollout", "actor")
"""The roles that can take turns on the same devices."""
COLOCATED_WITH_EVALUATION = (*COLOCATED, "evaluate")
"""The same, where held-out prompts are answered there, too."""


class RunConfig(Settings):
    """One run."""

    name: str = "run"
    """Used for the default run directory, `runs/NAME-TIMESTAMP`."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and initialization."""
    steps: int = Field(ge=1, lt=2**31)
    """Number of the last step."""
    deterministic: bool = False
    """The same run twice, in `sync` or `periodic` mode with the same roles, ends with the same bits: who computes what
    together, and in which order results are summed, does not depend on timing. Costs some overlap."""
    roles: dict[str, int]
    """Ranks per role when `--roles` is not given. 0 (for `reward`, `rollout` and other roles that train no model):
    processes outside the run do the role's task, through `asyncflow.connect` (docs/outside.md). `rollout+actor: 8`
    gives both 8 ranks on the same 8 devices, of which they take turns (docs/colocated.md)."""
    colocated: tuple[str, ...] = ()
    """Roles that take turns on the same devices; `roles: {rollout+actor: 8}` sets it."""
    code_directory: str | None = None
    """Where to look for your modules (`reward.function`, `tasks`, `openai.update`) after the installed ones and before
    the working directory; separate several with `:`; null: the directory of the config file."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = GRPOConfig()
    schedule: ScheduleConfig
    rollout: RolloutConfig
    actor: ActorConfig = ActorConfig()
    lora: LoraConfig | None = None
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    teacher: TeacherConfig = TeacherConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    vllm: VllmConfig = VllmConfig()
    openai: OpenAIConfig = OpenAIConfig()
    sim: SimConfig = SimConfig()
    tasks: tuple[UserTaskConfig, ...] = ()
    tq: QueueConfig = QueueConfig()
    weightsync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loggers: tuple[LoggerConfig, ...] = ()
    launcher: LauncherConfig = LauncherConfig()

    @model_validator(mode="before")
    @classmethod
    def _generates_only_to_evaluate(cls, given: Any) -> Any:
        # Without rollouts the section is only what evaluations inherit.
        algorithm = given.get("algorithm") if isinstance(given, dict) else None
        if isinstance(algorithm, dict) and algorithm.get("name") == "sft" and "rollout" not in given:
            return {**given, "rollout": {"max_response_tokens": 1024}}
        return given

    @model_validator(mode="after")
    def _colocated_roles_fit(self) -> Self:
        counts = {role: self.roles.get(role) for role in self.colocated}
        known = self.colocated in ((), COLOCATED, COLOCATED_WITH_EVALUATION)
        if not known or len(set(counts.values())) > 1:
            told = ", ".join(f"{role}:{count}" for role, count in counts.items())
            joint = "+".join(COLOCATED)
            raise self.refusal(
                "colocated",
                f"{told} cannot take turns on the same devices; write roles: {{{joint}: N}}, N ranks of each",
            )
        return self

    @property
    def is_colocated(self) -> bool:
        """Whether rollout and actor take turns on the same devices."""
        return bool(self.colocated)

    @property
    def num_devices(self) -> int:
        """How many devices the ranks take if every role has a model; colocated roles share theirs."""
        return sum(number for role, number in self.roles.items() if role not in self.guests)

    @property
    def guests(self) -> tuple[str, ...]:
        """Roles that take turns with the actor on its devices."""
        return tuple(role for role in self.colocated if role != "actor")

    @property
    def roles_text(self) -> str:
        """The roles as `--roles` takes them."""
        joint = "+".join(self.colocated)
        names = {role: joint if role in self.colocated else role for role in self.roles}
        return ",".join(dict.fromkeys(f"{names[role]}:{count}" for role, count in self.roles.items()))

    @property
    def start_timeout_s(self) -> float:
        """How long a start may take without progress (s): the longest of those that the launcher and the engines
        allow."""
        return max(self.launcher.start_timeout_s, self.vllm.start_timeout_s if self._uses_vllm else 0.0)

    @property
    def start_timeout_key(self) -> str:
        """The setting that `start_timeout_s` comes from, for messages."""
        own = self.start_timeout_s == self.launcher.start_timeout_s
        return "launcher.start_timeout_s" if own else "vllm.start_timeout_s"

    @property
    def _uses_vllm(self) -> bool:
        return any(self.is_vllm(role) for role in self.roles)

    @property
    def outside_roles(self) -> tuple[str, ...]:
        """Roles done by processes outside the run, at unknown times."""
        return tuple(role for role, number in self.roles.items() if not number)

    def generating(self) -> dict[str, SamplingConfig]:
        """Return launched role -> how it generates."""
        own = {"rollout": self.rollout, "evaluate": self.evaluate.sampling(self.rollout)}
        return {role: sampling for role, sampling in own.items() if role in self.roles}

    def is_vllm(self, role: str) -> bool:
        return {"rollout": self.rollout.engine, "evaluate": self.evaluate.engine}.get(role) == "vllm"

    def ranks_per_instance(self, role: str) -> int:
        """Return how many ranks one process of a role drives: with vLLM, those that share a copy of the model."""
        return self.vllm.tensor_parallel_size if self.is_vllm(role) else 1

    def ranks_per_copy(self, role: str) -> int:
        """Return how many ranks share one copy of a role's model. Each of FSDP2's trainers counts as a copy, since it
        trains rows of its own."""
        match role:
            case "actor":
                return self.actor.megatron.ranks_per_copy if self.actor.engine == "megatron" else 1
            case "rollout" | "evaluate":
                return self.ranks_per_instance(role)
            case "ref" | "actor_fwd":
                return self.ref.ranks_per_copy
            case "teacher":
                return self.teacher.ranks_per_copy
            case "reward" if self.reward.model is not None:
                return self.reward.model.shards
        return 1

    def models_of(self, task: str) -> dict[str, str]:
        """Return setting -> directory of the models whose weights a task of the algorithm's graph reads there whenever
        it starts: they are not trained, and no checkpoint holds them."""
        outside = self.outside_roles
        match task:
            case "teacher_log_probs" if self.roles.get("teacher"):
                return self.teacher.models
            case "rewards" if self.reward.model is not None and "reward" not in outside:
                return {"reward.model.path": self.reward.model.path}
            case "ref_log_probs" if self.algorithm.kl_coef > 0 and self.ref.engine != "sim" and "ref" not in outside:
                if self.ref.path is not None:
                    return {"ref.path": self.ref.path}
                # A reference that follows the policy is another one soon, which checkpoints hold.
                return {} if self.algorithm.ref_update_interval else {"model.path": self.model.path}
        return {}

    @property
    def scoring_models(self) -> dict[str, str]:
        """`models_of` all tasks."""
        return {
            key: path
            for task in ("ref_log_probs", "teacher_log_probs", "rewards")
            for key, path in self.models_of(task).items()
        }

    @property
    def sends_adapter(self) -> bool:
        """Whether versions of the weights are adapters: receivers hold the base from the model's directory."""
        return self.lora is not None and self.weightsync.lora == "adapter"

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor has the reference without a copy: the frozen base, with the adapter off."""
        return (
            self.lora is not None
            and not self.lora.modules_to_save
            and self.ref.path is None
            and self.algorithm.ref_update_interval == 0
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether the run waits without limit for processes outside: for their work, or for prompts."""
        return bool(self.outside_roles) or self.data.is_feed

    @property
    def longest_sample(self) -> int:
        """Most tokens of a prompt and one response to it; SFT's rows have theirs within `data.max_prompt_tokens`."""
        return self.data.max_prompt_tokens + (0 if self.algorithm.is_supervised else self.rollout.max_response_tokens)

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether log-probabilities under the weights at the start of a step take a forward pass of their own."""
        # Before the step's first update they are those of the policy in training, so the loss has them; but a reward
        # that is charged for the KL divergence is computed before the loss.
        updated = self.actor.num_updates > 1 and self.algorithm.off_policy.has_proximal_policy
        return updated or self.algorithm.has_reward_penalty

    @property
    def has_rewards(self) -> bool:
        """Whether responses are scored. A teacher alone does without, where there is nothing to compare with."""
        return self.algorithm.uses_rewards or not self.lacks_ground_truth

    @property
    def lacks_ground_truth(self) -> bool:
        """Whether responses would be compared with a ground truth that the data do not have."""
        reward = self.reward
        compares = not (self.rollout.is_own or reward.is_users or reward.group_function or reward.model)
        return compares and self.data.ground_truth_field is None

    @property
    def has_reward_parts(self) -> bool:
        """Whether the metrics show the parts of rewards, or what rollouts report about themselves."""
        return (self.reward.is_users or self.rollout.is_own) and not self.algorithm.is_supervised

    @property
    def sends_tasks(self) -> bool:
        """Whether whole data rows travel with the prompts, to the user's rollouts and rewards."""
        return self.rollout.is_own or self.reward.is_users or self.reward.group_function is not None

    @property
    def num_old_policies(self) -> int:
        """Earlier policies that `actor.tri_model` keeps: that at the start of a step with several updates, and those
        that drew tokens, if they are PPO's old policy."""
        drew = 0 if self.algorithm.off_policy.has_proximal_policy else self.schedule.staleness_bound
        return drew + (self.actor.num_updates > 1)

    @property
    def num_policy_copies(self) -> int:
        """Models that the actor keeps beside the policy with `actor.tri_model`: old ones, and the reference."""
        return self.num_old_policies + (self.algorithm.kl_coef > 0) if self.actor.tri_model else 0

    def round_tokens(self, training: TrainingConfig) -> int:
        """Return the most tokens that a rank gets at a time; 0: the queue's policy counts rows, not tokens."""
        return training.max_tokens_per_micro_batch if policy_name(self.tq.policy) == "token-budget" else 0

    @property
    def critic_only_steps(self) -> int:
        return self.critic.num_critic_only_steps if self.algorithm.has_critic else 0

    def save(self, run_dir: Path) -> None:
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        replace_text(run_dir / CONFIG_FILE, text)  # atomic: launchers of other nodes may be reading it

    @staticmethod
    def load(run_dir: Path) -> "RunConfig":
        """Read the resolved `config.yaml` of a run. Workers call this, so the file is already checked."""
        return RunConfig.model_validate(yaml.safe_load((run_dir / CONFIG_FILE).read_text()))
