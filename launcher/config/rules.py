"""What excludes what in a configuration, across its sections: a message and a condition each. Pure and torch-free.

A rule that reads one section is a validator beside its field, and a rule that reads files is in `launcher.checks`. The
planner asks the same rules of every plan. `AT_LOADING` holds whichever roles are launched, so it is checked first.
"""

from collections.abc import Callable, Mapping

from asyncflow.errors import ConfigError
from tq.policies import policy_name
from workers.settings.algorithms import ALGORITHMS, ZERO_VARIANCE, DistillConfig
from workers.settings.dataflow import ROLES, TRAINERS
from workers.settings.rollout import SamplingConfig
from workers.settings.run import RunConfig, key_of_set
from workers.settings.schedule import ScheduleMode
from workers.settings.vllm import LORA_RANKS

Rules = Mapping[str, Callable[[RunConfig], object]]
"""Why a run is refused -> when. In a message, `{section.key}` stands for a setting, `{found}` for what the condition
returned."""


def check_rules(config: RunConfig, rules: Rules) -> None:
    """Raise ConfigError for the first rule that is broken."""
    for message, broken in rules.items():
        if found := broken(config):
            raise ConfigError(message.format(found=found, **dict(config)))


def _unknown_role(run: RunConfig) -> str:
    known = {*ROLES, *(task.own_role for task in run.tasks)}
    return next((role for role in run.launcher.environments if role not in known), "")


AT_LOADING: Rules = {
    f"launcher.environments: {{found!r}} is not a role; roles: {' '.join(ROLES)}, and those of tasks": _unknown_role,
    "deterministic: true cannot be used with schedule.mode {schedule.mode}, where the weights of a token depend on "
    "timing; set schedule.mode to periodic or sync": lambda run: (
        run.deterministic and not run.schedule.mode.has_newest_weights
    ),
    "data.completion_field: {data.completion_field!r} is for algorithm.name sft, and {algorithm.name} generates its "
    "responses; leave it out": lambda run: run.data.completion_field is not None and not run.algorithm.is_supervised,
    "deterministic: true cannot be used with algorithm.group_filter, where which responses are generated together "
    "depends on timing; set algorithm.group_filter to null": lambda run: (
        run.deterministic and run.algorithm.filters_groups
    ),
    "{found} cannot be used with reward.group_function, which sees a group where and when it is generated; leave one "
    "of the two out": lambda run: (
        run.reward.group_function is not None
        and ("deterministic: true" if run.deterministic else "reward" in run.roles and "roles: 'reward'")
    ),
}


def _role_without_budget(run: RunConfig) -> str:
    """Return a role that trains, but not by tokens."""
    roles = (role for role in sorted(TRAINERS & run.roles.keys()) if not getattr(run, role).max_tokens_per_micro_batch)
    return next(roles, "")


def _fills_tokens(run: RunConfig) -> bool:
    return policy_name(run.tq.policy) == "token-budget"


def _beside_sim(run: RunConfig) -> str:
    """Return the engines that compute, if others only sleep."""
    engines = {"rollout": run.rollout.engine, "actor": run.actor.engine}
    if run.algorithm.kl_coef > 0:
        engines["ref"] = run.ref.engine
    if "evaluate" in run.roles:
        engines["evaluate"] = run.evaluate.engine
    others = [f"{role}.engine {engine}" for role, engine in engines.items() if engine != "sim"]
    return ", ".join(others) if len(others) < len(engines) else ""


def _sets(run: RunConfig) -> list[SamplingConfig]:
    return [one.sampling(run.rollout) for one in run.evaluate.named_sets().values()]


def _held_out_without_truth(run: RunConfig) -> str:
    """Return the section of held-out prompts whose responses would be compared with nothing, so that none is right."""
    of_users = run.reward.is_users or run.rollout.is_own
    if "evaluate" not in run.roles or of_users or run.data.ground_truth_field is not None:
        return ""
    named = run.evaluate.named_sets().items()
    return next((key_of_set(name) for name, one in named if one.ground_truth_field is None), "")


def _unknown_outside(run: RunConfig) -> tuple[str, str, str] | None:
    """Return a setting that processes outside do not receive, their roles, and the role that would receive it."""
    outside = run.outside_roles
    # Without role reward, the rollout processes score.
    scores = "reward" if "reward" in run.roles else "rollout"
    for setting, needed, role in (
        ("deterministic: true", bool(outside) and run.deterministic, scores),
        ("algorithm.group_filter", scores in outside and run.algorithm.filters_groups, scores),
        ("reward.group_function", scores in outside and run.reward.group_function is not None, scores),
        ("rollout.stop", "rollout" in outside and bool(run.rollout.stop), "rollout"),
    ):
        if needed:
            return setting, " ".join(f"{name}:0" for name in outside), role
    return None


def _too_long_for_vllm(run: RunConfig) -> tuple[str, int, int] | None:
    """Return a role, its longest response, and the longest of its prompts with it. vLLM would reject such prompts one
    by one during the run."""
    longest, prompt = run.vllm.max_model_len, run.data.max_prompt_tokens
    for role, sampling in run.generating().items():
        together = prompt + sampling.max_response_tokens
        if sampling.engine == "vllm" and longest is not None and longest < together:
            return role, sampling.max_response_tokens, together
    return None


def _largest_of_vllm(run: RunConfig) -> int:
    """Return the largest rank of adapters that vLLM takes if the run's is larger, otherwise 0."""
    too_large = run.lora is not None and run.sends_adapter and run.lora.rank > LORA_RANKS[-1]
    return LORA_RANKS[-1] if too_large and any(map(run.is_vllm, run.roles)) else 0


def _most_evaluators(run: RunConfig) -> int:
    # Instance 0 evaluates the last step in any case.
    return run.ranks_per_instance("evaluate") * -(-run.steps // run.evaluate.interval)


def _num_processes(run: RunConfig) -> int:
    ranks = sum(number // run.ranks_per_instance(role) for role, number in run.roles.items())
    return ranks + run.tq.num_storage_units + run.tq.num_controllers


def _of_turns(run: RunConfig) -> str:
    """Return the setting that needs rollouts of several turns, or ""."""
    if run.algorithm.credits_turns:
        return "credit"
    return "gae_timestep_unit" if getattr(run.algorithm, "gae_timestep_unit", "token") == "turn" else ""


def _cannot_sleep(run: RunConfig) -> str:
    """Return a built-in engine that cannot sleep; users' own are asked when they are loaded."""
    return "rollout.engine: openai" if run.is_colocated and run.rollout.engine == "openai" else ""


def _ignores_masks(run: RunConfig) -> str:
    """Return what gives log-probabilities or entropies without the sampling masks that the run keeps."""
    if not run.rollout.keeps_mask:
        return ""
    scores = run.algorithm.kl_coef > 0 or "actor_fwd" in run.roles
    for setting, value, ignores in (
        ("actor.engine", run.actor.engine, run.actor.engine != "fsdp"),
        ("ref.engine", run.ref.engine, scores and run.ref.engine not in ("hf", "fsdp")),
        ("algorithm.name", "distill", isinstance(run.algorithm, DistillConfig)),
    ):
        if ignores:
            return f"{setting} {value}"
    return next((f"roles {role}:0" for role in run.outside_roles if role in ("rollout", "ref", "actor_fwd")), "")


def _without_reference(run: RunConfig) -> tuple[str, str] | None:
    """Return why a run has no reference, and how it would have one; None: it has one."""
    if run.algorithm.is_supervised:
        return f"algorithm.name {run.algorithm.name} has no reference", ""
    return None if run.algorithm.kl_coef else ("algorithm.kl_coef is 0", ", or set algorithm.kl_coef > 0")


def _asks_no_teacher(run: RunConfig) -> bool:
    # An algorithm of the user's own says by its tasks which roles it has.
    return run.algorithm.name in ALGORITHMS and not getattr(run.algorithm, "teacher_coef", 0)


def _idle_system_prompt(run: RunConfig) -> str:
    """Return the section of an evaluation's system prompt that no chat template gets; "": there is none."""
    named = run.evaluate.named_sets()
    for name, own in {"": run.evaluate, **run.evaluate.sets}.items():
        readers = [
            one for of, one in named.items() if of == name or (not name and one.system_prompt == own.system_prompt)
        ]
        templates = [run.data.chat_template if one.chat_template is None else one.chat_template for one in readers]
        if own.system_prompt is not None and not any(templates):
            return key_of_set(name)
    return ""


_REF_INTERVAL = "algorithm.ref_update_interval"

OF_EVALUATIONS: Rules = {
    "evaluate.path: is missing, but the role evaluate was launched; name a JSONL file of held-out prompts (--set "
    "evaluate.path=FILE), or a source of tasks (evaluate.source), or leave the role out": lambda run: (
        "evaluate" in run.roles and not run.evaluate.has_prompts
    ),
    "{found}.system_prompt: there is no chat template to put it in; set {found}.chat_template to true, or remove "
    "this": lambda run: "evaluate" in run.roles and _idle_system_prompt(run),
    "evaluate.sets: they draw in different ways, which evaluate.engine {evaluate.engine} cannot; give all the same "
    "temperature, top_p and top_k": lambda run: (
        "evaluate" in run.roles
        and run.evaluate.engine not in ("hf", "vllm")
        and len({one.draws_by for one in _sets(run)}) > 1
    ),
    "{found}.ground_truth_field: null, like data.ground_truth_field, but evaluations score with reward.function "
    "{reward.function} alone, which compares responses with the ground truth; name the field, or a reward that needs "
    "none (module:function, a URL)": _held_out_without_truth,
    "vllm.max_model_len: {vllm.max_model_len} is less than data.max_prompt_tokens {data.max_prompt_tokens} and "
    "{found[0]}.max_response_tokens {found[1]} together; set it to {found[2]} or more, or "
    "leave it out": _too_long_for_vllm,
    "evaluate.sets: their max_response_tokens differ, but the replies of {found} have one limit; leave them out": (
        lambda run: (
            "evaluate" in run.roles
            and run.rollout.is_own
            and len({one.max_response_tokens for one in _sets(run)}) > 1
            and run.rollout.own_name
        )
    ),
}
"""Those of them that also hold for `asyncflow evaluate`, which trains nothing."""

AT_START: Rules = {
    # Roles that have nothing to do, or that are missing.
    "roles: 'ref' has nothing to do because {found[0]}; leave ref out{found[1]}": lambda run: (
        "ref" in run.roles and _without_reference(run)
    ),
    "roles: 'teacher' has nothing to do because no algorithm.teacher_coef is set, which distill has; set it, or leave "
    "teacher out": lambda run: "teacher" in run.roles and _asks_no_teacher(run),
    "roles: {found!r} has nothing to do: actor.tri_model computes its log-probabilities in the actor; leave {found} "
    "out": lambda run: run.actor.tri_model and next((role for role in ("ref", "actor_fwd") if role in run.roles), ""),
    "roles: 'actor_fwd' has nothing to do: its log-probabilities are needed where a step makes several updates "
    "(actor.num_mini_batches, actor.ppo_epochs) and algorithm.off_policy.method is not none, or where the KL penalty "
    "is part of the reward; leave it out": lambda run: "actor_fwd" in run.roles and not run.needs_old_log_probs,
    "reward.model: has nothing to do because algorithm.name {algorithm.name} rewards nothing, and evaluations score "
    "with reward.function alone; remove it": lambda run: run.algorithm.is_supervised and run.reward.model,
    "roles: 'reward' is missing, which computes with reward.model; add it (--roles {found},reward:1), or remove "
    "reward.model": lambda run: run.reward.model is not None and "reward" not in run.roles and run.roles_text,
    **OF_EVALUATIONS,
    "roles: evaluate:{roles[evaluate]} is more ranks than there are versions to evaluate up to step {steps}; launch "
    "{found} or fewer, or lower evaluate.interval ({evaluate.interval})": lambda run: (
        "evaluate" in run.roles and run.roles["evaluate"] > (most := _most_evaluators(run)) and most
    ),
    # Roles that take turns on the same devices.
    "schedule.mode: {schedule.mode} needs roles that take turns on the same devices; launch them (--roles "
    "rollout+actor:N), or set schedule.mode to async": lambda run: (
        run.schedule.mode.interrupts_for_turns and not run.is_colocated
    ),
    "schedule.mode: {schedule.mode} cannot be used with roles rollout+actor, which never generate and train at the "
    "same time; set schedule.mode to colocate_async, which takes new weights in the middle of responses, "
    "too": lambda run: run.is_colocated and run.schedule.mode is ScheduleMode.SUBSTEP,
    "rollout.on_swap: finish cannot be used with schedule.mode {schedule.mode}, which interrupts responses and goes on "
    "with newer weights; set rollout.on_swap to recompute, or schedule.mode to async": lambda run: (
        run.schedule.mode.interrupts_for_turns and run.rollout.on_swap == "finish"
    ),
    "weightsync.path: {weightsync.path} cannot be used with roles rollout+actor, of which one has no device memory "
    "while the other works; leave it out": lambda run: run.is_colocated and run.weightsync.path == "broadcast",
    "weightsync.max_updating: cannot be used with roles rollout+actor, whose instances wake together; set it to "
    "null": lambda run: run.is_colocated and run.weightsync.max_updating is not None,
    "{found}: cannot free its device memory and take it back, which roles rollout+actor need; use one of those that "
    "can, or give rollout and actor devices of their own": _cannot_sleep,
    "launcher.external_gangs: {found!r} is of a role that takes turns on its devices with another one, as only the "
    "launcher can tell it; remove it there": lambda run: next(
        (gang for gang in run.launcher.external_gangs if run.is_colocated and gang.partition("-")[0] in run.colocated),
        "",
    ),
    "roles: {found} processes (with tq.num_storage_units {tq.num_storage_units} and tq.num_controllers "
    "{tq.num_controllers}) are more than a queue service takes (tq.max_clients {tq.max_clients}); launch fewer, or "
    "raise tq.max_clients": lambda run: (found := _num_processes(run)) > run.tq.max_clients and found,
    # What a step is made of, and when that is known.
    "tq.policy: {tq.policy} fills {found}.max_tokens_per_micro_batch, which is 0; set that, or tq.policy to "
    "token-balanced": lambda run: _fills_tokens(run) and _role_without_budget(run),
    "tq.policy: {tq.policy} cannot be used with schedule.fill {schedule.fill}, whose steps are made of rounds of "
    "equally many rows; set schedule.fill to in_order, or tq.policy to token-balanced": lambda run: (
        _fills_tokens(run) and run.schedule.lateness
    ),
    "tq.max_live_rows: {tq.max_live_rows} rows are fewer than the schedule keeps alive "
    "({schedule.rollout_batch_size} groups x {schedule.n_samples_per_prompt} responses x "
    "{schedule.gate.steps_in_flight} steps = {schedule.live_rows}), so the run would wait forever; set it to "
    "{schedule.live_rows} or more, or to 0": lambda run: 0 < run.tq.max_live_rows < run.schedule.live_rows,
    "schedule.fill: {schedule.fill} cannot be used with role actor_fwd: the step that trains a group, and with it "
    "the policy that it finds, is not known before; leave actor_fwd out, or set "
    "schedule.fill to in_order": lambda run: run.schedule.lateness and "actor_fwd" in run.roles,
    "schedule.fill: {schedule.fill} cannot be used with algorithm.ref_update_interval {found}: the step that trains "
    "a group, and with it the reference, is not known before; set schedule.fill to in_order, or "
    "algorithm.ref_update_interval to 0": lambda run: (
        run.schedule.lateness and run.algorithm.kl_coef > 0 and run.algorithm.ref_update_interval
    ),
    "schedule.fill: {schedule.fill} cannot be used with role critic: the step that trains a group is not known when "
    "the critic gets it; set schedule.fill to in_order, or leave critic out (the actor then trains it)": lambda run: (
        run.schedule.lateness and run.algorithm.has_critic and "critic" in run.roles
    ),
    # Simulated engines.
    "{found}: cannot be used with a role whose engine is sim; set all of them to sim, or none": _beside_sim,
    "rollout.stop: cannot be used with the engine sim, which draws no text that a string could end; "
    "leave it out": lambda run: run.rollout.engine == "sim" and run.rollout.stop,
    "actor.engine: sim cannot be used with algorithm.name {algorithm.name}, whose critic is "
    "trained; use fsdp": lambda run: run.algorithm.has_critic and run.actor.engine == "sim",
    "algorithm.entropy_coef: cannot be used with actor.engine sim, which has no distributions; set 0": lambda run: (
        run.algorithm.entropy_coef and run.actor.engine == "sim"
    ),
    # Engines.
    "{found[0]}: cannot be used with roles {found[1]}, since processes outside know nothing of it; launch "
    "{found[2]}, or leave the setting out": _unknown_outside,
    "deterministic: true cannot be used with rollout.engine {rollout.engine}, which batches whatever arrives "
    "together; set rollout.engine to hf, or deterministic to false": lambda run: (
        run.deterministic and run.rollout.engine in ("vllm", "openai")
    ),
    "openai.urls: is missing; name the servers, e.g. --set openai.urls=[http://127.0.0.1:8000], or set "
    "rollout.engine to hf or vllm": lambda run: run.rollout.engine == "openai" and not run.openai.urls,
    "openai.weights_dir: is missing; name a directory that the servers can read, too": lambda run: (
        run.rollout.engine == "openai" and not run.openai.weights_dir
    ),
    # Several instances would overwrite each other's weights on the servers.
    "roles: rollout:{roles[rollout]} cannot be used with rollout.engine openai, whose servers have one version of "
    "the weights; launch rollout:1, which feeds all of openai.urls, and raise rollout.batch_size": lambda run: (
        run.rollout.engine == "openai" and run.roles["rollout"] > 1
    ),
    "openai.weights_dir: {openai.weights_dir!r} is not absolute, but the servers read it under this name; write the "
    "path out, from /": lambda run: run.rollout.engine == "openai" and not run.openai.weights_dir.startswith("/"),
    "ref.engine: {ref.engine} divides a copy over ranks; set {found} to 2 or more, or ref.engine to hf": lambda run: (
        run.roles.keys() & {"ref", "actor_fwd"}
        and run.ref.ranks_per_copy == 1
        and {"fsdp": "ref.shards", "megatron": "ref.megatron.tensor_parallel"}.get(run.ref.engine)
    ),
    "ref.engine: {ref.engine} needs role ref, whose ranks have the reference together; add it (--roles "
    "...,ref:{ref.ranks_per_copy}), or set actor.tri_model, with which the actor's ranks have it, or "
    "ref.engine to hf": lambda run: (
        run.ref.engine in ("fsdp", "megatron")
        and run.algorithm.kl_coef > 0
        and not ("ref" in run.roles or run.actor.tri_model or run.reference_is_base)
    ),
    "actor.engine: {actor.engine} trains no critic, which algorithm.name {algorithm.name} has; add role critic "
    "(--roles ...,critic:N), where fsdp trains it, or set actor.engine to fsdp": lambda run: (
        run.algorithm.has_critic and run.actor.engine != "fsdp" and "critic" not in run.roles
    ),
    "algorithm.ref_update_interval: the reference of actor.tri_model is the initial model; set the interval to 0, or "
    "tri_model to false": lambda run: run.actor.tri_model and run.algorithm.ref_update_interval,
    "ref.path: has nothing to do because {found[0]}; leave it out{found[1]}": lambda run: (
        run.ref.path is not None and _without_reference(run)
    ),
    "ref.path: cannot be used with {found}, whose reference follows or is laid out like the policy; remove one of the "
    "two": lambda run: (
        run.ref.path is not None
        and ("actor.tri_model" if run.actor.tri_model else run.algorithm.ref_update_interval and _REF_INTERVAL)
    ),
    "teacher: has nothing to do because no algorithm.teacher_coef is set, which distill has; set it, or leave teacher "
    "out": lambda run: run.teacher.models and _asks_no_teacher(run),
    "rollout.keep_sampling_mask: cannot be used with {found}, which computes the whole distribution; set it to "
    "false": _ignores_masks,
    # Adapters.
    "lora: actor.engine {actor.engine} trains no adapters; set it to fsdp or megatron, or remove lora": lambda run: (
        run.lora is not None and run.actor.engine not in ("fsdp", "megatron")
    ),
    "actor.tri_model: cannot be used with lora here, since the actor would keep {found} older policies, which are not "
    "kept of adapters; set it to false": lambda run: run.lora and run.actor.tri_model and run.num_old_policies,
    "lora.modules_to_save: cannot be used with weightsync.lora adapter, since engines take no whole modules with an "
    "adapter; set weightsync.lora to merged, or leave the modules out": lambda run: (
        run.sends_adapter and run.lora is not None and run.lora.modules_to_save
    ),
    "lora.modules_to_save: cannot be used with actor.engine megatron, which trains nothing beside the adapter; set "
    "actor.engine to fsdp, or leave the modules out": lambda run: (
        run.lora is not None and run.lora.modules_to_save and run.actor.engine == "megatron"
    ),
    "lora.modules_to_save: cannot be used with one actor rank and actor.autocast bfloat16, whose frozen base is in "
    "bfloat16 throughout; launch two ranks, or set actor.autocast to float32": lambda run: (
        run.lora is not None
        and run.lora.modules_to_save
        and run.roles.get("actor") == 1
        and run.actor.autocast == "bfloat16"
    ),
    "weightsync.lora: adapter cannot be used with {found} of ref.engine {ref.engine}, which takes whole weights; set "
    "weightsync.lora to merged, or ref.engine to hf or fsdp": lambda run: (
        run.sends_adapter
        and run.ref.engine not in ("hf", "fsdp")
        and (
            ("actor_fwd" in run.roles and run.ref.engine == "megatron" and "role actor_fwd")
            or (run.algorithm.ref_update_interval and run.algorithm.kl_coef > 0 and _REF_INTERVAL)
        )
    ),
    "lora.rank: vLLM takes adapters of rank {found} at most; lower it, or set weightsync.lora to merged": lambda run: (
        _largest_of_vllm(run)
    ),
    "openai.model: is missing; it names the adapter that openai.update {openai.update} loads; set it, or "
    "weightsync.lora to merged": lambda run: (
        run.sends_adapter and run.rollout.engine == "openai" and run.openai.update != "vllm" and not run.openai.model
    ),
    # Data and rewards.
    "tasks: {found} compares with a ground truth, which rows of sft do not have: what is trained is row.response; take "
    "ground_truth out of its inputs": lambda run: (
        run.algorithm.is_supervised and next((one.name for one in run.tasks if "ground_truth" in one.inputs), "")
    ),
    "data.ground_truth_field: null cannot be used with reward.function {reward.function}, which compares responses "
    "with the ground truth; name the field, or a reward that needs none (module:function, "
    "a URL, reward.model)": lambda run: run.lacks_ground_truth and run.algorithm.uses_rewards,
    "algorithm.group_filter: zero_variance cannot be used with reward.model, under which the rewards of a group are "
    "practically never all equal; set it to null": lambda run: (
        run.reward.model is not None and run.algorithm.group_filter == ZERO_VARIANCE
    ),
    "data.chat_template_options: are set, but data.chat_template is false; set that to true "
    "or remove them": lambda run: run.data.chat_template_options and not (run.data.chat_template or run.rollout.is_own),
    "data.timeout_s: {data.timeout_s:g} is not below launcher.operation_timeout_s {launcher.operation_timeout_s:g}, "
    "after which the task source counts as stuck. Lower data.timeout_s "
    "or raise launcher.operation_timeout_s": lambda run: (
        (run.data.source is not None or run.data.sampler is not None)
        and run.data.timeout_s >= run.launcher.operation_timeout_s
    ),
    # Rollouts of the user's own.
    "deterministic: true cannot be used with {rollout.own_setting}, whose calls are sampled on arrival; set it to "
    "false": lambda run: run.deterministic and run.rollout.is_own,
    "{found}.max_tokens_per_micro_batch: is 0, but a rollout of {rollout.own_setting} can have any number of "
    "samples; set it to the tokens that fit a forward-backward": lambda run: (
        run.rollout.is_own and run.actor.engine != "sim" and _role_without_budget(run)
    ),
    "algorithm.{found}: turn is for rollouts of several turns, and this run draws one response to each prompt; leave "
    "it out, or set rollout.function (docs/agents.md)": lambda run: not run.rollout.is_own and _of_turns(run),
    "algorithm.credit: turn cannot be used with reward.group_function, which gives each rollout one reward; remove one "
    "of them": lambda run: run.algorithm.credits_turns and run.reward.group_function is not None,
    "roles: 'reward' cannot be used with {rollout.own_setting}, whose rollouts are scored where they are made; leave "
    "the role out": lambda run: run.rollout.is_own and "reward" in run.roles,
}


# How a step's samples divide over actor ranks and micro-batches; if they do not, which numbers would.


def check_batch_sizes(config: RunConfig) -> None:
    """Check that whole groups divide over actor ranks, mini-batches and micro-batches; errors name numbers that fit."""
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    ranks = config.actor.num_replicas(config.roles["actor"])
    smallest = config.algorithm.min_group_size
    if group_size < smallest and config.actor.engine != "sim":
        raise ConfigError(
            f"schedule.n_samples_per_prompt: {group_size} is too few for {config.algorithm.name} to compare; give "
            f"{smallest} or more"
        )
    if groups % ranks:
        fits = _either(groups - groups % ranks, groups - groups % ranks + ranks)
        raise ConfigError(
            f"schedule.rollout_batch_size: {groups} groups do not divide over {_trainers(config)}; use {fits} "
            f"groups, or {_either(*_nearest(ranks, divisors(groups)))} {_kind(config)}"
        )
    updates, own = config.actor.num_mini_batches, groups // ranks
    if own % updates:
        raise ConfigError(
            f"actor.num_mini_batches: {updates} mini-batches do not divide a rank's {own} groups per step "
            f"({groups} groups over {_trainers(config)}); use {_either(*_nearest(updates, divisors(own)))}"
        )
    samples = own // updates * group_size
    _check_micro_batches(config, samples, "actor", config.actor.micro_batch_size)
    if "critic" in config.roles:
        _check_critic(config)


def _check_critic(config: RunConfig) -> None:
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    ranks, updates = config.roles["critic"], config.actor.num_mini_batches
    if groups % (ranks * updates):
        fitting = [number for number in divisors(groups) if groups % (number * updates) == 0]
        raise ConfigError(
            f"roles: {groups} groups (schedule.rollout_batch_size) do not divide over critic:{ranks} and {updates} "
            f"updates a step; use {_either(*_nearest(ranks, fitting))} critic ranks"
        )
    _check_micro_batches(config, groups // ranks // updates * group_size, "critic", config.critic.micro_batch_size)


def _check_micro_batches(config: RunConfig, samples: int, role: str, micro: int) -> None:
    updates = config.actor.num_mini_batches
    groups, group_size = config.schedule.rollout_batch_size, config.schedule.n_samples_per_prompt
    fitting = [size for size in divisors(samples) if size % group_size == 0 or group_size % size == 0]
    if micro not in fitting:
        per = "per step" if updates == 1 else f"per update, {updates} a step"
        over = _trainers(config) if role == "actor" else f"{role}:{config.roles[role]}"
        raise ConfigError(
            f"{role}.micro_batch_size: {micro} does not divide a rank's {samples} samples {per} ({groups} groups x "
            f"{group_size} responses over {over}) into whole or equally cut groups; "
            f"use {_either(*_nearest(micro, fitting))}"
        )


def num_micro_batches(config: RunConfig) -> int:
    """Return the number of micro-batches that one actor rank processes in one pass over a step."""
    schedule = config.schedule
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    return samples // (config.actor.num_replicas(config.roles["actor"]) * config.actor.micro_batch_size)


def _kind(config: RunConfig) -> str:
    return "actor ranks" if config.actor.engine != "megatron" else "replicas"


def _trainers(config: RunConfig) -> str:
    """Name what rows are divided over: ranks, or with megatron replicas of several ranks."""
    ranks = config.roles["actor"]
    if config.actor.engine != "megatron":
        return f"actor:{ranks}"
    return f"the {config.actor.num_replicas(ranks)} replicas of actor:{ranks}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(wanted: int, candidates: list[int]) -> tuple[int, int]:
    """Return the nearest candidates below and above `wanted`; at either end, the same candidate twice."""
    below = [size for size in candidates if size <= wanted] or candidates[:1]
    above = [size for size in candidates if size >= wanted] or candidates[-1:]
    return below[-1], above[0]


def _either(low: int, high: int) -> str:
    options = [str(number) for number in dict.fromkeys((low, high)) if number > 0]
    return " or ".join(options)
