"""Estimates of what a run takes of this machine: channels, descriptors, threads, ports, memory, disk. Pure.

Each function states its formula. They are deliberately rough and on the safe side: a run that fits has room to spare,
and one that does not may still start. Constants were measured on quickstart runs with 8 to 23 workers (CPU, torch 2.13)
or follow from the data structures.
"""

import math
from collections.abc import Sequence

from asyncflow.errors import size_text
from asyncflow.job import GangSpec, own_name
from launcher.checks.placement import HEAD
from launcher.checks.preflight import Preflight
from launcher.doctor.findings import Needs
from launcher.request.request import Accepted
from launcher.request.stop_time import saved_bytes
from workers.engines.device_memory import DTYPE_BYTES, state_of_roles, version_bytes, wire_bytes
from workers.engines.lora import Trained
from workers.settings.dataflow import CONTROLLER, OBSERVERS, SERVICES, STORAGE, WEIGHTS
from workers.settings.run import RunConfig

_BASE_DESCRIPTORS = 40
_CHANNEL_DESCRIPTORS = 5
_RANK_DESCRIPTORS = 4
_LAUNCHER_DESCRIPTORS_PER_WORKER = 16
_BASE_THREADS = 12
_CHANNEL_THREADS = 2
_DEVICE_THREADS = 30
_STORE_CLIENTS = 10
_LAUNCHER_BYTES = 400 * 10**6
_SERVICE_BYTES = 40 * 10**6
_RANK_BYTES = 80 * 10**6
_DEVICE_RANK_BYTES = 2 * 10**9
_TOKEN_BYTES = 24
_OTHER_TOKEN_BYTES = 8  # an id, and a log-probability
_KEPT_TOKEN_BYTES = 4  # an id


def needs_of(accepted: Accepted, *, model_bytes: int, num_nodes: int) -> Needs:
    """Return what an accepted run needs per node.

    Args:
        model_bytes: size of the model's files, and so of an export.
        num_nodes: nodes over which the run's processes are spread evenly.
    """
    checked, config = accepted.checked, accepted.checked.config
    processes = sum(gang.num_ranks for gang in checked.gangs)
    memory = {what: -(-size // num_nodes) for what, size in memory_parts(checked).items() if size}
    largest_first = sorted(memory.items(), key=lambda part: -part[1])
    engines = engines_of(config)
    return Needs(
        run_dir=str(accepted.run_dir),
        device=checked.devices.kind,
        num_nodes=num_nodes,
        engines=engines.pop(""),
        environments=tuple(engines.items()),
        backend=config.tq.backend.kind,
        backend_address=config.tq.backend.address,
        shared_memory=config.tq.shared_memory,
        processes=-(-processes // num_nodes),
        connections=connections(checked.gangs),
        descriptors=descriptors(checked.gangs),
        threads=-(-threads(checked) // num_nodes),
        channels=max(channels_of(gang, checked.gangs) for gang in checked.gangs),
        memory_bytes=sum(memory.values()),
        memory_parts=", ".join(f"{what} {size_text(size)}" for what, size in largest_first),
        checkpoint_bytes=checkpoint_bytes(checked, model_bytes=model_bytes),
        num_checkpoints=num_checkpoints(config),
    )


def engines_of(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return interpreter ("": the launcher's) -> the engines of its launched roles, and of a reference in the actor."""
    used = [("rollout", config.rollout.engine), ("actor", config.actor.engine)]
    if config.algorithm.kl_coef > 0:
        used.append(("ref" if "ref" in config.roles else "actor", config.ref.engine))
    if "evaluate" in config.roles:
        used.append(("evaluate", config.evaluate.engine))
    if "teacher" in config.roles:
        used.append(("teacher", config.teacher.engine))
    engines: dict[str, tuple[str, ...]] = {"": ()}
    for role, engine in used:
        python = config.launcher.interpreters(HEAD, own_name()).get(role, "")
        engines[python] = tuple(dict.fromkeys((*engines.get(python, ()), engine)))
    return engines


def channels_of(gang: GangSpec, gangs: Sequence[GangSpec]) -> int:
    """Return the largest number of channels of a process in `gang`.

        controller    2 x ranks + units + controllers   (a rank may have a second channel to fetch ahead)
        storage       2 x ranks + controllers
        weight agent  2 x ranks + agents
        rank          2 x controllers + units + 2       (to the weight agent, and in the group that staging needs)

    Example, measured (formula): 14 ranks, 2 units, 1 controller: controller 20 (31), unit 14 (29), actor 4 (6).
    """
    ranks = sum(each.num_ranks for each in gangs if each.role not in SERVICES and each.role not in OBSERVERS)
    number = {role: sum(1 for each in gangs if each.role == role) for role in SERVICES}
    match gang.role:
        case role if role == CONTROLLER:
            return 2 * ranks + number[STORAGE] + number[CONTROLLER]
        case role if role == STORAGE:
            return 2 * ranks + number[CONTROLLER]
        case role if role == WEIGHTS:
            return 2 * ranks + number[WEIGHTS]
    return 2 * number[CONTROLLER] + number[STORAGE] + 2


def descriptors(gangs: Sequence[GangSpec]) -> int:
    """Return the number of open files of the process that has the most.

        worker    40 + 5 x channels + 4 x ranks of its gang
        launcher  40 + 16 x workers      (two pipes and 8 clients of the job store, which it serves, for each)

    A channel end is two pipes, one TCP pair (all share one Gloo device) and, while it is made, two pieces of shared
    memory; fewer without shared memory. Measured with 23 workers and 25 channels: controller 112, launcher 310.
    """
    workers = [
        _BASE_DESCRIPTORS + _CHANNEL_DESCRIPTORS * channels_of(gang, gangs) + _RANK_DESCRIPTORS * gang.num_ranks
        for gang in gangs
    ]
    processes = sum(gang.num_ranks for gang in gangs)
    return max(*workers, _BASE_DESCRIPTORS + _LAUNCHER_DESCRIPTORS_PER_WORKER * processes)


def threads(checked: Preflight) -> int:
    """Return the threads of all processes, which limits on processes count.

    worker    12 + 2 x channels + intra-op threads (+ 30 of the runtime with an accelerator)
    vLLM      12 + intra-op threads (+ 30) for each process of an instance
    launcher  12 + 2 x gangs
    """
    gangs, own = checked.gangs, checked.config.launcher.threads_per_worker
    total = _BASE_THREADS + 2 * len(gangs)
    of_vllm = _vllm_instances(checked)
    for gang in gangs:
        process = _BASE_THREADS + own + (0 if gang.devices[0] == "cpu" else _DEVICE_THREADS)
        total += gang.num_ranks * (process + _CHANNEL_THREADS * channels_of(gang, gangs))
        total += _vllm_processes(gang) * process if gang in of_vllm else 0
    return total


def _vllm_instances(checked: Preflight) -> list[GangSpec]:
    return [gang for gang in checked.gangs if checked.config.is_vllm(gang.role)]


def _vllm_processes(gang: GangSpec) -> int:
    """Return the processes that vLLM starts for an instance: its engine, and one per rank if the model is shared."""
    ranks = len(gang.devices)
    return 1 if ranks == 1 else 1 + ranks


def connections(gangs: Sequence[GangSpec]) -> int:
    """Return the largest number of ports: per process 10 clients of the job store, and its channels.

    Channels count at both ends, since either may be the one that connects.
    """
    channels = sum(gang.num_ranks * channels_of(gang, gangs) for gang in gangs)
    return channels + _STORE_CLIENTS * sum(gang.num_ranks for gang in gangs)


def memory_parts(checked: Preflight) -> dict[str, int]:
    """Return what takes host memory, in bytes. P: parameters; c, w: bytes per parameter in copies and on the wire.

        weight slots   num_slots x P x w              shared memory of the weight agent; P of an adapter, if that is
                                                      what a version is (`weightsync.lora`)
        actor, ...     all ranks of each role         on the CPU, see `state_of_roles`
        actor asleep   all ranks of the actor         page-locked, where it takes turns with the rollout on a device
        bases asleep   all ranks that generate there  where a version is an adapter, which brings them no base
        reward models  R x c per copy, on the CPU: R parameters, c of the reward model
        vllm slots     P x c per evaluating instance, shared memory; c of `vllm.dtype`
        broadcasts     P x w per instance of vLLM on devices; only with `weightsync.path: broadcast`
        queue          2 x rows x tokens x 24         rows that the schedule keeps alive, in units and in flight; more
                                                      with columns of several tokens, see `queue_bytes`
        processes      400 MB (launcher, preloaded libraries) + 40 MB per service + 80 MB per rank (2 GB with a device,
                       and per process of vLLM)

    This is the least: activations, KV caches and what libraries keep are left out.
    """
    config, gangs = checked.config, checked.gangs
    parameters = _parameters(checked)
    trained = Trained(parameters) if config.lora is None else checked.trained
    version = version_bytes(config, parameters, trained)
    on_cpu = checked.devices.kind == "cpu"
    sleeps = config.is_colocated and not on_cpu
    services = sum(1 for gang in gangs if gang.role in SERVICES)
    ranks = sum(gang.num_ranks for gang in gangs) - services
    on_device = sum(gang.num_ranks for gang in gangs if gang.devices[0] != "cpu")
    instances = _vllm_instances(checked)
    of_vllm = sum(_vllm_processes(gang) for gang in instances if gang.devices[0] != "cpu")
    posted = DTYPE_BYTES[config.vllm.dtype or config.model.dtype]
    states = state_of_roles(config, parameters, trained, checked.others)
    return {
        "weight slots": config.weightsync.num_slots * version,
        **(states if on_cpu else {}),
        "actor asleep": states.get("actor", 0) if sleeps else 0,
        "bases asleep": sum(states.get(role, 0) for role in config.guests) if sleeps and config.sends_adapter else 0,
        "reward models": _reward_model_bytes(checked) if on_cpu else 0,
        "vllm slots": sum(gang.role == "evaluate" for gang in instances) * version * posted // wire_bytes(config),
        "broadcasts": len(instances) * version if config.weightsync.path == "broadcast" and not on_cpu else 0,
        "queue": 2 * queue_bytes(config),
        "processes": _LAUNCHER_BYTES
        + services * _SERVICE_BYTES
        + (ranks - on_device) * _RANK_BYTES
        + (on_device + of_vllm) * _DEVICE_RANK_BYTES,
    }


def queue_bytes(config: RunConfig) -> int:
    """Return the bytes of the queue's rows if each is as long as allowed, at 24 bytes per token; and for each drawn one
    8 per further token whose log-probability travels with it, and 4 k of the k kept by top-k
    (`rollout.keep_sampling_mask`; those of top-p alone are not known).

    Rows retained for a checkpoint (`tq.retain_until_checkpoint`) count unless they spill to disk.
    """
    schedule, queue = config.schedule, config.tq
    live, waiting = schedule.live_rows, 0
    if queue.retain_until_checkpoint and not queue.spill_directory:
        waiting = schedule.step_rows * (config.checkpoint.interval or config.steps)
    row_bytes = _row_bytes(config)
    return min(live * row_bytes, queue.max_live_bytes or live * row_bytes) + waiting * row_bytes


def _row_bytes(config: RunConfig) -> int:
    drawn, algorithm = config.longest_sample - config.data.max_prompt_tokens, config.algorithm
    others = algorithm.num_top_log_probs + getattr(algorithm, "top_k", 0)  # (the latter: of a teacher)
    kept = config.rollout.top_k if config.rollout.keeps_mask else 0
    return config.longest_sample * _TOKEN_BYTES + drawn * (others * _OTHER_TOKEN_BYTES + kept * _KEPT_TOKEN_BYTES)


def _reward_model_bytes(checked: Preflight) -> int:
    model = checked.config.reward.model
    if model is None:
        return 0
    copies = checked.config.roles["reward"] // model.shards
    return copies * checked.num_reward_parameters * DTYPE_BYTES[model.dtype]


def checkpoint_bytes(checked: Preflight, *, model_bytes: int) -> int:
    """Return the size of one checkpoint: 13 x P per trained model, the Hugging Face export, and the queue's responses.

    A reference that follows the policy adds the model or, where versions are adapters, an adapter; a critic as much as
    the policy. An export has the adapter as well, in float32. Responses count at full length.
    """
    config = checked.config
    size = saved_bytes(checked) + config.schedule.live_rows * _row_bytes(config)
    if config.checkpoint.export_hf:
        size += model_bytes + (0 if config.lora is None else 4 * checked.trained.total)
    if config.algorithm.kl_coef > 0 and config.algorithm.ref_update_interval > 0:
        in_dtype = DTYPE_BYTES[config.model.dtype] * checked.trained.total
        size += in_dtype if config.sends_adapter else model_bytes
    return size


def num_checkpoints(config: RunConfig) -> int:
    """Return the largest number of checkpoints at any time: those kept, and the next one while it is written."""
    keep = config.checkpoint
    if not keep.interval:
        return 1
    # The newest one that `keep_every` keeps may be among the last ones, too, so this may count one too many.
    kept_for_ever = config.steps // math.lcm(keep.interval, keep.keep_every) if keep.keep_every else 0
    return min(-(-config.steps // keep.interval), keep.keep_last + 1 + kept_for_ever)


def _parameters(checked: Preflight) -> int:
    simulated = checked.config.actor.engine == "sim"
    return checked.config.sim.parameters if simulated else checked.num_parameters
