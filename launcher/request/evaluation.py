"""`asyncflow evaluate`: answers held-out prompts with a model that nothing trains, and says how well.

    accept_evaluation --> checks, as before a run --> run_job with the role `evaluate` alone
                                                         '- answers/ of every instance --> evaluation.jsonl, a table

The model is a directory, a name on the Hub, or a run, of which the newest checkpoint is taken.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncflow.agreement import software
from asyncflow.checkpoint_files import HF
from asyncflow.decoding import json_decoder
from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.job import GangSpec
from asyncflow.json_lines import JsonLines
from asyncflow.run_files import CONFIG_FILE, EVALUATION_FILE
from launcher.checks.environments import RowsToCheck, check_gangs, has_launchers_interpreter
from launcher.checks.models import check_positions, check_tensor_parallel, device_memory
from launcher.checks.placement import HEAD, Devices, place_gangs
from launcher.checks.preflight import check_held_out, usable_devices
from launcher.checks.proof_cache import check_proven
from launcher.checks.user_code import check_names, check_rollout_code, try_rewards, try_rollout
from launcher.config.hub import is_hub_name, snapshot_of
from launcher.config.load_config import load_config, with_template_time
from launcher.config.paths import find_recipe, user_path
from launcher.config.rules import OF_EVALUATIONS, check_rules
from launcher.process.progress import Output
from launcher.run.restore import find_checkpoint, is_checkpoint
from launcher.run.rundir import (
    check_new_run_dir,
    create_run_dir,
    default_run_dir,
    discard_run_dir,
    has_checkpoint,
    held_run_dir,
)
from workers.calls.user_function import search_beside
from workers.data.model_files import check_model_dir, count_parameters, read_model_config
from workers.engines.device_memory import ModelSizes
from workers.engines.lora import CONFIG_FILE as ADAPTER_CONFIG
from workers.settings.run import RunConfig

ROLE = "evaluate"


@dataclass(frozen=True)
class Evaluation:
    """An accepted evaluation; nothing has been written yet. `rows`: what the user's functions are tried on."""

    config: RunConfig
    gangs: tuple[GangSpec, ...]
    devices: Devices
    run_dir: Path
    default_run_dir: bool
    rows: RowsToCheck

    def run(self, started_at: float, output: Output = Output.LINES) -> tuple[int, dict[str, Any]]:
        """Answer all prompts; returns the exit code and, if it is 0, the line of `evaluation.jsonl`."""
        from launcher.run.run_job import run_job

        run_dir = create_run_dir(self.run_dir, self.config, or_beside=self.default_run_dir)
        began = time.monotonic()
        with held_run_dir(run_dir):
            try:
                code = run_job(
                    self.config, self.gangs, run_dir,
                    resume_from="", lineage=0, started_at=started_at, identity=software(), output=output,
                )  # fmt: skip
            except BaseException:
                discard_run_dir(run_dir)
                raise
        if code:
            return code, {}
        line = read_answers(run_dir, list(self.config.evaluate.named_sets()), seconds=time.monotonic() - began)
        lines = JsonLines(run_dir / EVALUATION_FILE)
        lines.write([line])
        lines.close()
        return 0, line


def accept_evaluation(
    model: str, config: str | None, *, overrides: Sequence[str], ranks: int, run_dir: str | None
) -> Evaluation:
    """Resolve and check everything; raises ConfigError at the first check that fails.

    Args:
        model: directory, name on the Hub, run, or checkpoint.
        config: a YAML file or a packaged recipe, whose `evaluate` says on what; None: the run's own.
        ranks: of the role `evaluate`, which share the prompts.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key == "lora" or key.startswith("lora."):
            raise ConfigError(f"{key}: evaluations take whole weights; name the merged model as MODEL, and remove this")
        if key == "model.path":
            raise ConfigError(f"{key}: MODEL says which, {model}; remove this")
    found, run = _find_model(model)
    if config is None and run is None:
        raise ConfigError(f"CONFIG: is missing, and {model} is not a run that has one; name a YAML file or a recipe")
    source = find_recipe(config) if config is not None or run is None else run / CONFIG_FILE
    loaded = load_config(source, overrides=(*overrides, f"model.path={found}"), evaluates=True)
    # The weights are whole, nothing follows them, and no other role has the devices at times.
    changes = {"roles": {ROLE: ranks}, "colocated": (), "lora": None, "name": f"evaluate-{loaded.name}"}
    own = with_template_time(loaded.model_copy(update=changes))
    search_beside(own.code_directory)
    check_rules(own, OF_EVALUATIONS)
    devices = usable_devices(own)
    gangs = tuple(gang for gang in place_gangs(own, devices) if gang.role == ROLE)
    here = has_launchers_interpreter(own, HEAD)
    check_names(own, here)
    path = Path(own.model.path)
    check_model_dir(path)
    check_positions(own)
    check_tensor_parallel(own)
    sizes = ModelSizes.from_config(read_model_config(path), count_parameters(path))
    device_memory(own, sizes, own.launcher.device_memory_gb)
    try:
        rows = check_held_out(own)
    except UserCodeFailed as error:  # before the start, failing user code is a user error
        raise ConfigError(str(error)) from error
    check_rollout_code(own, here)
    check_proven(own, [ROLE])
    check_gangs(own, gangs, HEAD, device=devices.kind, rows=rows)
    if rows.first_row is not None and rows.first_prompt is not None and here(ROLE):
        try_rewards(own, rows.first_row, rows.first_prompt)
        try_rollout(own, rows.first_row)
    target = user_path(run_dir, "--run-dir") if run_dir is not None else default_run_dir(own.name, datetime.now())
    check_new_run_dir(target, resumes=False)
    return Evaluation(own, gangs, devices, target, run_dir is None, rows)


def _find_model(model: str) -> tuple[str, Path | None]:
    """Return `model.path`, and the run that it is of."""
    path = Path(model).expanduser()
    if not path.is_dir():
        if is_hub_name(model) or snapshot_of(model):
            return model, None
        raise ConfigError(
            f"MODEL: {model!r} is {'a file' if path.exists() else 'not there'}; name a model's directory, a name on "
            f"the Hub, a run or one of its checkpoints"
        )
    if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
        raise ConfigError(
            f"MODEL: {path} is an adapter, and evaluations take whole weights; name the merged model: hf/ in the "
            f"checkpoint that it is of, or what peft's merge_and_unload gives"
        )
    if not is_checkpoint(path):
        if not (path / CONFIG_FILE).is_file():
            if not (path / "config.json").is_file():
                raise ConfigError(
                    f"MODEL: {path} is no model, since it has no config.json, nor a run or one of its checkpoints; "
                    f"name one of these"
                )
            return str(path.resolve()), None
        if not has_checkpoint(path):
            raise ConfigError(f"MODEL: {path} has no checkpoint yet; name a run that has one, or a model")
    checkpoint = find_checkpoint(str(path), None, argument="MODEL")
    if not (checkpoint.path / HF).is_dir():
        raise ConfigError(f"MODEL: {checkpoint.path} has no {HF}/ yet; make it: asyncflow export {checkpoint.run_dir}")
    return str(checkpoint.path / HF), checkpoint.run_dir


def read_answers(run_dir: Path, sets: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """Return the line of an evaluation from what its instances wrote, in the order of `sets`; `seconds`: of it all."""
    from weightsync.version import Version
    from workers.rollout.evaluate import ANSWERS, Answer, evaluation_line, line_of_sets

    found: dict[str, list[Answer]] = defaultdict(list)
    decoder = json_decoder(Answer)
    for file in sorted((run_dir / ANSWERS).glob("*.jsonl")):
        for text in file.read_bytes().splitlines():
            answer = decoder.decode(text)
            found[answer.set].append(answer)
    lines = {name: evaluation_line(found[name], version=Version(0, 0), time_s=seconds) for name in sets}
    return line_of_sets(lines, seconds=seconds)


def table_of(line: Mapping[str, Any], sets: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of a table, heading first: a row per set."""
    rows: list[tuple[str, ...]] = [("set", "accuracy", "95 %", "best pass@k", "reward", "tokens", "cut", "responses")]
    for name in sets:
        own = {key.removeprefix(f"{name}/"): value for key, value in line.items() if key.startswith(f"{name}/")}
        own = own or dict(line)
        ks = sorted(int(key.removeprefix("pass_at_")) for key in own if key.removeprefix("pass_at_").isdigit())
        rows.append(
            (
                name or "held out",
                f"{own['accuracy']:.3f}",
                f"{own['accuracy_low']:.3f} to {own['accuracy_high']:.3f}",
                f"{own[f'pass_at_{ks[-1]}']:.3f} (k {ks[-1]})" if ks else "-",
                f"{own['reward_mean']:.3f}",
                f"{own['response_tokens_mean']:.1f}",
                f"{own['truncated_fraction']:.3f}",
                f"{own['num_samples']}" + (f", {failed} without a score" if (failed := own["reward_failures"]) else ""),
            )
        )
    return rows
