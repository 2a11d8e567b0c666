"""What `--dry-run` prints: the accepted configuration, its placement, and how to start a gang by hand. Pure."""

from pathlib import Path

from asyncflow.job import GangSpec
from launcher.batch_sizes import num_micro_batches
from launcher.preflight import Preflight
from launcher.table import table
from launcher.torchrun import torchrun_line
from workers.dataflow import OBSERVERS

SERVICES = {
    "controller": "leases and readiness of its tasks; the first one admits prompts",
    "storage": "rows x columns of the samples",
    "weights": "the newest weight versions, in shared memory",
}


def describe(checked: Preflight, *, source: Path, run_dir: Path, resume_from: str = "") -> str:
    """Return the text, without a final newline."""
    parts = (
        _summary(checked, source, run_dir, resume_from),
        _gang_table(checked),
        _task_table(checked),
        _endpoints(),
        _by_hand(checked, run_dir),
    )
    return "\n\n".join(parts)


def _summary(checked: Preflight, source: Path, run_dir: Path, resume_from: str) -> str:
    config, schedule = checked.config, checked.config.schedule
    groups, group_size = schedule.rollout_batch_size, schedule.n_samples_per_prompt
    ranks, micro = config.roles["actor"], config.actor.micro_batch_size
    late = f", groups up to {schedule.lateness} step late" if schedule.lateness else ""
    devices = "cpu" if checked.devices.kind == "cpu" else f"{checked.devices.count} x {checked.devices.kind}"
    rows = [
        ("config", str(source)),
        ("run directory", f"{run_dir} (not created by --dry-run)" if not resume_from else str(run_dir)),
        ("model", f"{config.model.path}  {checked.num_parameters:,} parameters, {config.model.dtype}"),
        ("data", f"{config.data.path}  {checked.num_prompts:,} prompts"),
        ("algorithm", f"{config.algorithm.name}, reward {config.reward.function}"),
        (
            "schedule",
            f"{schedule.mode.value}, staleness <= {schedule.staleness_bound}{late}, up to step {config.steps}",
        ),
        ("step", f"{groups} groups x {group_size} answers = {groups * group_size} samples"),
        ("per actor rank", f"{num_micro_batches(config)} micro-batches x {micro} samples (actor:{ranks})"),
        ("devices", devices),
    ]
    updates = config.actor.num_updates_per_step
    if config.actor.num_updates > 1:
        rows.insert(-1, ("updates", f"{updates} mini-batches x {config.actor.ppo_epochs} passes over each step"))
    if checked.num_held_out:
        rows.insert(-1, ("held out", _evaluation(checked)))
    if resume_from:
        rows.insert(2, ("resume from", resume_from))
    return "\n".join(f"{name:<15} {value}" for name, value in rows)


def _gang_table(checked: Preflight) -> str:
    external = checked.config.launcher.external_gangs
    rows = [("GANG", "RANKS", "DEVICES", "RUNS")]
    for gang in checked.gangs:
        work = SERVICES.get(gang.role) or _work(checked, gang.role)
        by_hand = "  [started by hand]" if gang.name in external else ""
        rows.append((gang.name, str(gang.num_ranks), _devices(gang), work + by_hand))
    return table(rows)


def _task_table(checked: Preflight) -> str:
    rows = [("TASK", "ROLE", "COLUMNS IN -> OUT")]
    for task in checked.tasks:
        rows.append((task.name, task.role, f"{' '.join(task.inputs)} -> {' '.join(task.outputs) or '(weights)'}"))
    return table(rows)


def _endpoints() -> str:
    return (
        "ENDPOINTS\n"
        "job store       127.0.0.1:<a free port, written to job.json>\n"
        "channels        loopback, ports made on demand; nothing listens beyond loopback"
    )


def _by_hand(checked: Preflight, run_dir: Path) -> str:
    external = checked.config.launcher.external_gangs
    gangs = [gang for gang in checked.gangs if gang.name in external]
    if not gangs:
        gangs = [gang for gang in checked.gangs if gang.role == "rollout"][:1]
        intro = f"A GANG BY HAND (after the launch, with --set launcher.external_gangs='[{gangs[0].name}]')"
    else:
        intro = "GANGS TO START BY HAND (after the launch)"
    return "\n".join([intro, *(torchrun_line(run_dir, gang) for gang in gangs)])


def _evaluation(checked: Preflight) -> str:
    own, engine = checked.config.evaluate, checked.config.evaluate.sampling(checked.config.rollout)
    drawn = f"temperature {engine.temperature:g}" if engine.temperature else "greedy"
    prompts = f"{checked.num_held_out:,} prompts x {own.n_samples_per_prompt} answers ({drawn})"
    return f"{own.path}  {prompts}, every {own.interval} steps"


def _work(checked: Preflight, role: str) -> str:
    if role in OBSERVERS:
        return "answers held-out prompts with every due version of the weights"
    names = [" + ".join((task.name, *task.fused)) for task in checked.tasks if task.role == role]
    return ", ".join(names)


def _devices(gang: GangSpec) -> str:
    unique = list(dict.fromkeys(gang.devices))
    return f"{unique[0]} .. {unique[-1]}" if len(unique) > 1 else unique[0]
