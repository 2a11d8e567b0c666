"""One `asyncflow-launch` command from its arguments to a started run: resolve, check everything, and only then write.

Request --accept_run()--> Accepted --describe()--> text of --dry-run
        |                          '-start()-----> run directory, processes, exit code
        '-accept_node()--> NodeRun, on any node but node 0
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from asyncflow.agreement import Identity, software
from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.job import GangSpec
from asyncflow.run_files import CHECKPOINTS, CONFIG_FILE
from launcher.checks.environments import check_gangs, find_identity, has_launchers_interpreter
from launcher.checks.placement import HEAD
from launcher.checks.preflight import Cluster, Preflight, check_node, check_run
from launcher.checks.user_code import try_users_code
from launcher.config.load_config import load_config, with_template_time
from launcher.config.paths import find_recipe, user_path
from launcher.loggers.backends import check_loggers
from launcher.nodes.node_run import NodeRun
from launcher.nodes.options import ONE_NODE, NodePlace
from launcher.request.dry_run import describe
from launcher.request.stop_time import NO_SAVE, StopSave, check_stop_save, stop_save_of
from launcher.run.restore import (
    LATEST,
    Checkpoint,
    check_resume,
    find_checkpoint,
    next_lineage,
    recorded_time,
    resume_path,
    rewind_run,
    rewind_to_start,
    unsaved_run,
)
from launcher.run.rundir import (
    RUNS,
    check_new_run_dir,
    check_not_running,
    check_writable,
    create_run_dir,
    default_run_dir,
    discard_run_dir,
    held_run_dir,
    rewrite_run_dir,
    write_plan,
)
from workers.data.prompt_rows import prompts_of
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from launcher.plan.search import Plan
    from launcher.process.progress import Output


@dataclass(frozen=True)
class Accepted:
    """A command that passed every check. Nothing has been written yet.

    Attributes:
        source: the configuration file.
        run_dir: absolute.
        checkpoint: to continue from; None: the run begins with step 1.
        default_run_dir: whether the user left the choice of directory to us.
        started_over: whether `run_dir` holds a resumed run that never saved anything.
        place: this launcher's node, which is node 0, and the number of nodes.
        arguments: of the command, except those that say which node it is.
        plan: chosen by `--roles auto:N`.
        save: what a stop writes.
    """

    source: Path
    run_dir: Path
    checked: Preflight
    checkpoint: Checkpoint | None
    default_run_dir: bool = False
    started_over: bool = False
    place: NodePlace = ONE_NODE
    arguments: tuple[str, ...] = ()
    plan: "Plan | None" = None
    save: StopSave = NO_SAVE

    def check_here(self) -> None:
        """Check that this machine has the libraries that the run needs, and try user functions; raises ConfigError.

        `doctor` and `sbatch` skip this, because they run elsewhere than the job.
        """
        checked = self.checked
        config = checked.config
        kind, rows = checked.devices.kind, checked.rows_to_check
        check_gangs(config, checked.gangs, HEAD, device=kind, rows=rows)
        check_loggers(config.loggers)
        try_users_code(config, rows.first_row, rows.first_prompt, has_launchers_interpreter(config, HEAD))

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return the text of `--dry-run`."""
        resume_from = "step 0: it saved nothing yet" if self.started_over else ""
        if self.checkpoint is not None:
            resume_from = str(self.checkpoint.path)
        return describe(
            self.checked,
            source=self.source,
            run_dir=self.run_dir,
            resume_from=resume_from,
            place=self.place,
            arguments=self.arguments,
            save=self.save,
        )

    def start(
        self, started_at: float, output: "Output | None" = None, *, view: bool = False, control: bool = False
    ) -> int:
        """Write the run directory (or cut it back), run the job, return the exit code.

        Args:
            started_at: when the user's command started (unix time, s).
            output: what to print; None: lines.
            view: show the run on a page while it goes on.
            control: the page has buttons that pause, save and stop the run.
        """
        from launcher.process.progress import Output, print_line
        from launcher.run.run_job import run_job

        output = output or Output.LINES
        for note in self.checked.notes:
            output.say(f"note: {note}")
        config, checkpoint, run_dir = self.checked.config, self.checkpoint, self.run_dir
        compared = self.place.count > 1 or bool(config.launcher.external_gangs)
        chunk = self.checked.rows_to_check.first_chunk
        identity = find_identity(config, chunk) if compared else software()
        if checkpoint is None and not self.started_over:
            run_dir = create_run_dir(run_dir, config, or_beside=self.default_run_dir)
        # Held before the cut: no other launcher may write meanwhile.
        with (
            held_run_dir(run_dir),
            _viewed(run_dir, partial(print_line, err=output is Output.JSON), control=control)
            if view
            else nullcontext(),
        ):
            lineage = self._cut_back(output.say)
            try:
                if self.plan is not None:
                    write_plan(run_dir, self.plan.values())
                code = run_job(
                    config,
                    self.checked.gangs,
                    run_dir,
                    resume_from=str(checkpoint.path) if checkpoint else "",
                    lineage=lineage,
                    started_at=started_at,
                    place=self.place,
                    identity=identity,
                    first_prompts=prompts_of(chunk, config),
                    version_bytes=self.checked.version_bytes,
                    output=output,
                    at_end=partial(_write_report, run_dir),
                )
            except AsyncFlowError:  # the nodes did not meet, or the disk is full
                if checkpoint is None and not self.started_over:
                    discard_run_dir(run_dir)
                raise
            return code

    def _cut_back(self, say: Callable[[str], None]) -> int:
        """Cut a resumed run back to where it continues; return its lineage, 0 for a new run."""
        if self.checkpoint is None and not self.started_over:
            return 0
        lineage = next_lineage(self.run_dir, self.checkpoint)
        if self.checkpoint is not None:
            rewind_run(self.checkpoint)
        else:
            say(f"{self.run_dir} saved nothing yet: it starts again from step 1")
            rewind_to_start(self.run_dir)
        rewrite_run_dir(self.run_dir, self.checked.config)
        return lineage


@contextmanager
def _viewed(run_dir: Path, say: Callable[[str], None], *, control: bool) -> Iterator[None]:
    """Show a run on a page in a process of its own, which ends with this one and gets no Ctrl-C of its terminal."""
    child = (
        "import sys; from asyncflow.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
        "from launcher.cli.commands import main; main(sys.argv[2:])"
    )
    # -P: the working directory must not shadow our modules.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", child, str(os.getpid()), "view", str(run_dir), *["--control"] * control],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0,
    )  # fmt: skip
    assert process.stdout is not None

    def tell(lines: IO[str]) -> None:
        first = lines.readline().strip()
        say(f"view: {first.removeprefix('open ')}" if first else "warning: --view: the page could not be started")
        for _ in lines:  # nobody reads the rest, and a full pipe would stop the page
            pass

    teller = threading.Thread(target=tell, args=(process.stdout,), name="view", daemon=True)
    teller.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        teller.join()
        process.stdout.close()


def _write_report(run_dir: Path) -> str:
    from launcher.view.report_page import write_report

    return f"report: {write_report(run_dir)}"


def _say_nothing(_: str) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """The arguments of `asyncflow-launch`; see its `--help`."""

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: str | None = None
    steps: int | None = None
    place: NodePlace = ONE_NODE
    called: str | None = None
    """What errors call CONFIG if it is not a user's file."""
    cluster: Cluster | None = None
    """Where the run will start; None: here."""
    say: Callable[[str], None] = _say_nothing
    """Told where the run will be, and what goes on; a start takes seconds."""

    def accept_run(self) -> Accepted:
        """Resolve and check what node 0 needs; write nothing. Raises ConfigError at the first check that fails."""
        try:
            return self._accept_new() if self.resume is None else self._accept_resumed(self.resume)
        except OSError as error:
            where = error.filename or "the working directory"
            raise ConfigError(f"{where}: {error.strerror}; correct the path or its permissions") from error

    def accept_node(self) -> NodeRun:
        """Resolve and check what any other node needs.

        A failed check becomes the complaint of the returned `NodeRun`, so that node 0 reports it as well.

        Raises:
            ConfigError: the nodes were not told where to meet.
        """
        run_dir = self._given_run_dir()
        assert run_dir is not None, "several nodes have one"
        try:
            config = self._load_config(run_dir).config
            devices, rows = check_node(config, self.place.rank)
        except ConfigError as error:
            return NodeRun(self.place, run_dir, complaint=str(error))
        except OSError as error:
            return NodeRun(self.place, run_dir, complaint=f"{error.filename}: {error.strerror}")

        def check(gangs: Sequence[GangSpec]) -> Identity:
            check_gangs(config, gangs, self.place.rank, device=devices.kind, rows=rows)
            return find_identity(config, rows.first_chunk)

        return NodeRun(self.place, run_dir, config.launcher, devices, check)

    def _given_run_dir(self) -> Path | None:
        """Return the directory that the user named; with several nodes, the one where all launchers meet."""
        if self.run_dir is not None:
            return user_path(self.run_dir, "--run-dir")
        if self.place.count == 1:
            return None
        if self.resume not in (None, LATEST):
            target = resume_path(self.resume or "")
            return target.parent.parent if target.parent.name == CHECKPOINTS else target
        # All launchers of a Slurm job derive the same name.
        if self.place.job_id:
            return (RUNS / f"slurm-{self.place.job_id}").resolve()
        raise ConfigError(
            "--run-dir: is missing; launchers of several nodes meet in the run's directory, so give all of them the "
            "same, on a file system that they share"
        )

    def _command_arguments(self) -> tuple[str, ...]:
        given = {"--roles": self.roles, "--run-dir": self.run_dir, "--resume": self.resume, "--steps": self.steps}
        arguments = [self.config] if self.config is not None else []
        arguments += [word for name, value in given.items() if value is not None for word in (name, str(value))]
        return (*arguments, *(word for override in self.overrides for word in ("--set", override)))

    def _accept_new(self) -> Accepted:
        given = self._given_run_dir()
        loaded = self._load_config(given)
        run_dir = given if given is not None else default_run_dir(loaded.config.name, datetime.now())
        check_new_run_dir(run_dir)
        self._say_start(run_dir)
        return replace(self._accept_loaded(loaded, run_dir), default_run_dir=given is None)

    def _accept_resumed(self, target: str) -> Accepted:
        given = self._given_run_dir()
        unsaved = unsaved_run(target, given)
        checkpoint = find_checkpoint(target, given) if unsaved is None else None
        run_dir = unsaved if checkpoint is None else checkpoint.run_dir
        assert run_dir is not None
        self._say_start(run_dir)
        accepted = self._accept_loaded(self._load_config(run_dir), run_dir)
        if checkpoint is None:
            check_not_running(run_dir)
        else:
            check_resume(checkpoint, accepted.checked.config)
        check_writable(run_dir)
        return replace(accepted, checkpoint=checkpoint, started_over=checkpoint is None)

    def _say_start(self, run_dir: Path) -> None:
        self.say(f"run directory: {run_dir}")
        self.say("checking settings, model, data and functions")

    def _accept_loaded(self, loaded: "_Loaded", run_dir: Path) -> Accepted:
        checked = check_run(loaded.config, num_nodes=self.place.count, cluster=self.cluster, say=self.say)
        arguments = self._command_arguments()
        save = stop_save_of(checked, run_dir)
        check_stop_save(save, checked.config, os.environ)
        return Accepted(
            loaded.source, run_dir, checked, None, place=self.place, arguments=arguments, plan=loaded.plan, save=save
        )

    def _load_config(self, run_dir: Path | None) -> "_Loaded":
        if self.resume is None or self.config is not None or run_dir is None:
            source = find_recipe(self.config)
        else:
            source = run_dir / CONFIG_FILE
            if not source.is_file():
                raise ConfigError(f"--resume: {run_dir} has no {CONFIG_FILE}; give CONFIG")
        roles, overrides, plan = self.roles, self.overrides, None
        if roles is not None and roles.lstrip().startswith("auto:"):
            plan = self._plan_roles(source, roles)
            roles, overrides = plan.roles_text, (*overrides, *plan.changes)
        config = load_config(source, overrides=overrides, roles=roles, steps=self.steps, called=self.called)
        # A resumed run keeps the time that templates were given, so that its prompts stay the same.
        told = recorded_time(run_dir) if self.resume is not None and run_dir is not None else None
        return _Loaded(source, with_template_time(config, told), plan)

    def _plan_roles(self, source: Path, roles: str) -> "Plan":
        """Return the best plan; print its options and its prediction."""
        from launcher.plan.plan_report import auto_plan

        plan = auto_plan(roles, load_config(source, overrides=self.overrides))
        assert plan is not None, "the caller looked for the word"
        options = [f"--roles {plan.roles_text}", *(f"--set {change}" for change in plan.changes)]
        # Not to stdout, where `asyncflow sbatch` writes its script.
        click.echo(f"{roles}: {' '.join(options)}, {plan.step_s:.3g} s a step predicted", err=True)
        return plan


@dataclass(frozen=True)
class _Loaded:
    """A configuration, its source, and the plan that changed it."""

    source: Path
    config: RunConfig
    plan: "Plan | None"
