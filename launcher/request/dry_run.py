"""What `--dry-run` prints: the accepted configuration, its placement, and how to start a gang by hand. Pure."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncflow.errors import size_text
from asyncflow.job import GangSpec, describe_way, endpoint, own_addresses, own_name
from launcher.checks.models import sum_text
from launcher.checks.placement import HEAD
from launcher.checks.preflight import Preflight
from launcher.config.rules import num_micro_batches
from launcher.nodes.options import ONE_NODE, NodePlace
from launcher.process.progress import table
from launcher.request.stop_time import NO_SAVE, StopSave
from workers.settings.dataflow import OBSERVERS
from workers.settings.run import EvaluateConfig, RunConfig

SERVICES = {
    "controller": "leases and readiness of its tasks; the first one admits prompts",
    "storage": "rows x columns of the samples",
    "weights": "the newest weight versions, in shared memory",
}


def describe(
    checked: Preflight,
    *,
    source: Path,
    run_dir: Path,
    resume_from: str = "",
    place: NodePlace = ONE_NODE,
    arguments: Sequence[str] = (),
    save: StopSave = NO_SAVE,
) -> str:
    """Return the text, without a final newline.

    Args:
        resume_from: checkpoint directory, or "".
        place: how many nodes there are, and where node 0 is.
        arguments: of the command, except those that say which node it is.
        save: what a stop writes; shown if it takes some time.
    """
    parts = [
        _summary(checked, source, run_dir, resume_from, save),
        _first_prompt(checked),
        _gang_table(checked),
        _environments(checked),
        _task_table(checked),
        _memory(checked),
        _endpoints(checked, place),
        _by_hand(checked, run_dir),
        "\n".join(f"note: {note}" for note in checked.notes),
    ]
    if checked.num_nodes > 1:
        parts.insert(3, _nodes(checked, place, arguments, run_dir))
    return "\n\n".join(filter(None, parts))


def torchrun_line(run_dir: Path, gang: GangSpec, python: str = sys.executable) -> str:
    """Return a shell line that starts all ranks of `gang`, on node 0, under torchrun's own elastic agent."""
    # The agent rendezvous in a temporary file without a shared store: torchrun's TCP stores listen on every interface,
    # whatever address they get. The ranks find the job through the run directory. PYTHONSAFEPATH is `python -P` for
    # torchrun and its workers: the working directory cannot shadow our packages.
    command = [
        *(python, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(gang.num_ranks)),
        *("--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
    ]
    worker = ["-m", "workers.roles.main", str(run_dir), gang.name]
    environment = "PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return f'{environment} {shlex.join(command)} --rdzv-endpoint "$(mktemp)" {shlex.join(worker)}'


def _summary(checked: Preflight, source: Path, run_dir: Path, resume_from: str, save: StopSave) -> str:
    config, schedule = checked.config, checked.config.schedule
    groups, group_size = schedule.rollout_batch_size, schedule.n_samples_per_prompt
    late = f", groups up to {schedule.lateness} step late" if schedule.lateness else ""
    devices = "cpu" if checked.devices.kind == "cpu" else f"{checked.devices.count} x {checked.devices.kind}"
    if checked.num_nodes > 1:
        devices = f"{checked.num_nodes} nodes, each with {devices}"
    if config.is_colocated:
        devices += f"; {'+'.join(config.colocated)} take turns"
    rows = [
        ("config", str(source)),
        ("run directory", f"{run_dir} (not created by --dry-run)" if not resume_from else str(run_dir)),
        ("model", f"{config.model.path}  {checked.num_parameters:,} parameters, {config.model.dtype}"),
        ("data", f"{config.data.name}  {_how_many(checked)}"),
        ("algorithm", f"{config.algorithm.name}, reward {_reward_text(checked)}"),
        (
            "schedule",
            f"{schedule.mode.value}, staleness <= {schedule.staleness_bound}{late}, up to step {config.steps}",
        ),
        ("step", f"{groups} groups x {group_size} responses = {groups * group_size} samples"),
        ("per actor rank", f"{_micro_batches(config)} (actor:{config.roles['actor']})"),
        ("devices", devices),
    ]
    if config.lora is not None:
        rows.insert(3, ("a version", _version(checked)))
    updates = config.actor.num_mini_batches
    if config.actor.num_updates > 1:
        rows.insert(-1, ("updates", f"{updates} mini-batches x {config.actor.ppo_epochs} passes over each step"))
    if checked.num_held_out:
        rows.insert(-1, ("held out", _evaluation(checked)))
    if save.seconds:
        rows.append(("a stop saves", str(save)))
    if resume_from:
        rows.insert(2, ("resume from", resume_from))
    return "\n".join(f"{name:<15} {value}" for name, value in rows)


def _how_many(checked: Preflight) -> str:
    if checked.config.data.is_feed:
        return "processes outside put the prompts"
    if checked.num_prompts is None:
        return "tasks without an end"
    config = checked.config
    what = "tasks" if config.rollout.is_own else "rows" if config.algorithm.is_supervised else "prompts"
    return f"{checked.num_prompts:,} {what}"


def _first_prompt(checked: Preflight) -> str:
    """Show what the model is asked, templates included, and what the reward compares its response with."""
    shown = checked.first_prompt
    if shown is None:
        return "FIRST PROMPT (fed during the run)"
    if shown.num_trained:
        return f"FIRST ROW ({shown.num_tokens} tokens, {shown.num_trained} of them trained)\n{_shown(shown.text)}"
    tokens = f"{shown.num_tokens} tokens; " if shown.num_tokens is not None else ""
    return f"FIRST PROMPT ({tokens}ground truth {_shortened(repr(shown.ground_truth), 100)})\n{_shown(shown.text)}"


def _shown(text: str) -> str:
    """Return user data indented, with control characters escaped so that they cannot drive the terminal."""
    lines = _shortened(text, 2000).split("\n")
    plain = ("".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in lines)
    return "\n".join(f"  {line}" for line in plain)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def _reward_text(checked: Preflight) -> str:
    reward, model = checked.config.reward, checked.config.reward.model
    if model is None:
        return reward.function
    scored = f"{model.weight:g} x {model.path} ({checked.num_reward_parameters:,} parameters, {model.dtype})"
    return scored + (f" + {model.function_weight:g} x {reward.function}" if model.function_weight else "")


def _version(checked: Preflight) -> str:
    """Say what travels from the actor to the generators."""
    size, lora = size_text(checked.version_bytes), checked.config.lora
    if lora is None or not checked.config.sends_adapter:
        return f"{size}: base and adapter merged"
    return f"{size}: an adapter of rank {lora.rank}; generators read the base from {checked.config.model.path}"


def _micro_batches(config: RunConfig) -> str:
    budget, size = config.actor.max_tokens_per_micro_batch, config.actor.micro_batch_size
    if config.round_tokens(config.actor):
        return f"micro-batches of {budget:,} tokens at most, of at most {size} samples, as they fit"
    if budget:
        return f"micro-batches of {budget:,} tokens at most, cut from {size} samples at a time"
    return f"{num_micro_batches(config)} micro-batches x {size} samples"


def _gang_table(checked: Preflight) -> str:
    external = checked.config.launcher.external_gangs
    rows: list[tuple[str, ...]] = [("GANG", "RANKS", "NODE", "DEVICES", "RUNS")]
    for gang in checked.gangs:
        work = SERVICES.get(gang.role) or _work(checked, gang.role)
        by_hand = "  [started by hand]" if gang.name in external else ""
        nodes = _range([str(node) for node in gang.parts])
        rows.append((gang.name, str(gang.num_ranks), nodes, _devices(gang), work + by_hand))
    if checked.num_nodes == 1:
        rows = [(*row[:2], *row[3:]) for row in rows]
    return table(rows)


def _memory(checked: Preflight) -> str:
    if not checked.memory:
        return ""
    intro = f"MEMORY OF A RANK'S DEVICE, of {checked.config.launcher.device_memory_gb:g} GB (estimated)"
    return "\n".join([intro, *(f"  {role:<13} {sum_text(parts)}" for role, parts in checked.memory.items())])


def _environments(checked: Preflight) -> str:
    rows = []
    launched = {gang.role for gang in checked.gangs}
    for role, named in checked.config.launcher.environments.items():
        places = named.items() if isinstance(named, dict) else [("", named)]
        if role in launched:
            rows += [(role, f"node {node}" if str(node) else "", python) for node, python in places]
    return f"ENVIRONMENTS (the others: {sys.executable})\n{table(rows)}" if rows else ""


def _task_table(checked: Preflight) -> str:
    rows = [("TASK", "ROLE", "COLUMNS IN -> OUT")]
    for task in checked.tasks:
        rows.append((task.name, task.role, f"{' '.join(task.inputs)} -> {' '.join(task.outputs) or '(weights)'}"))
    return table(rows)


def _nodes(checked: Preflight, place: NodePlace, arguments: Sequence[str], run_dir: Path) -> str:
    rows: list[tuple[str, ...]] = [("NODE", "RANKS", "GANGS")]
    for node in range(checked.num_nodes):
        ranks = sum(gang.nodes.count(node) for gang in checked.gangs)
        rows.append((str(node), str(ranks), " ".join(gang.name for gang in checked.gangs if node in gang.parts)))
    told = any(option in arguments for option in ("--run-dir", "--resume"))
    command = shlex.join(["asyncflow-launch", *arguments, *(() if told else ("--run-dir", str(run_dir)))])
    named = endpoint(place.head_host, place.head_port) if place.head_port else place.head_host
    head = f" --head {shlex.quote(named)}" if place.head_host else ""
    return (
        f"{table(rows)}\n\n"
        f"ON EVERY NODE, K BEING ITS NUMBER\n{command} --nnodes {checked.num_nodes} --node-rank K{head}\n"
        f"OR, IN THE BATCH SCRIPT OF A SLURM JOB\nsrun --nodes={checked.num_nodes} --ntasks-per-node=1 {command}"
    )


def _ways(checked: Preflight) -> str:
    """Return a line for each interface of this host that may lead to other nodes."""
    names = dict.fromkeys(name for name, _ in own_addresses())
    return "\n".join(f"                here {describe_way(name, checked.version_bytes)}" for name in names)


def _endpoints(checked: Preflight, place: NodePlace) -> str:
    if checked.num_nodes > 1:
        head = place.head_host or "node 0's address"
        port = place.head_port or "<a free port, written to job.json>"
        return (
            "ENDPOINTS\n"
            f"job store       {endpoint(head, port)}\n"
            "channels        on ports made on demand, by the interface in GLOO_SOCKET_IFNAME, else by that in the\n"
            "                fastest network that all nodes reach, else by that to the job store\n" + _ways(checked)
        )
    return (
        "ENDPOINTS\n"
        "job store       127.0.0.1:<a free port, written to job.json>\n"
        "channels        loopback, ports made on demand; nothing listens beyond loopback"
    )


def _by_hand(checked: Preflight, run_dir: Path) -> str:
    external = checked.config.launcher.external_gangs
    gangs = [gang for gang in checked.gangs if gang.name in external]
    if not gangs:
        able = {"rollout"} - {*checked.config.colocated}
        gangs = [gang for gang in checked.gangs if gang.role in able and gang.parts == (HEAD,)][:1]
        if not gangs:
            return ""
        intro = f"A GANG BY HAND (after the launch, with --set launcher.external_gangs='[{gangs[0].name}]')"
    else:
        intro = "GANGS TO START BY HAND (after the launch)"
    pythons = checked.config.launcher.interpreters(HEAD, own_name())
    lines = (torchrun_line(run_dir, gang, pythons.get(gang.role, sys.executable)) for gang in gangs)
    return "\n".join([intro, *lines])


def _evaluation(checked: Preflight) -> str:
    own = checked.config.evaluate
    if own.sets:
        sets = (f"{name} ({_sampled(checked, one)})" for name, one in own.named_sets().items())
        return f"{', '.join(sets)}; {checked.num_held_out:,} prompts, every {own.interval} steps"
    prompts = f"{checked.num_held_out:,} prompts x {_sampled(checked, own)}"
    return f"{own.path}  {prompts}, every {own.interval} steps"


def _sampled(checked: Preflight, own: EvaluateConfig) -> str:
    engine = own.sampling(checked.config.rollout)
    drawn = f"temperature {engine.temperature:g}" if engine.temperature else "greedy"
    return f"{own.n_samples_per_prompt} responses ({drawn})"


def _work(checked: Preflight, role: str) -> str:
    if role in OBSERVERS:
        return "answers held-out prompts with every due version of the weights"
    names = [" + ".join((task.name, *task.fused)) for task in checked.tasks if task.role == role]
    return ", ".join(names)


def _devices(gang: GangSpec) -> str:
    return _range(list(dict.fromkeys(gang.devices)))


def _range(names: Sequence[str]) -> str:
    return f"{names[0]} .. {names[-1]}" if len(names) > 1 else names[0]
