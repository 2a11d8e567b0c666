"""One `asyncflow-launch` command from arguments to a started run: resolve, check everything, and only then write.

Request --accept()--> Accepted --describe()--> text of --dry-run
                               '-start()-----> run directory, processes, exit code
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from asyncflow.errors import ConfigError
from launcher.config import load_config
from launcher.dry_run import describe
from launcher.paths import user_path
from launcher.preflight import Preflight, check_run
from launcher.recipes import find_recipe
from launcher.resume import (
    Checkpoint,
    check_not_running,
    check_resume,
    find_checkpoint,
    next_lineage,
    rewind_run,
    rewind_to_start,
    unsaved_run,
)
from launcher.rundir import (
    CONFIG_FILE,
    check_new_run_dir,
    check_writable,
    create_run_dir,
    default_run_dir,
    held_run_dir,
    rewrite_run_dir,
)
from workers.config import RunConfig


@dataclass(frozen=True)
class Accepted:
    """A command that passed every check. Nothing has been written yet.

    Attributes:
        source: the configuration file.
        run_dir: absolute.
        checked: what the configuration resolves to.
        checkpoint: to continue from, or None for a run that begins with step 1.
        default_run_dir: whether the user left the directory to us.
        started_over: whether `run_dir` holds a run that was resumed, but never saved anything.
    """

    source: Path
    run_dir: Path
    checked: Preflight
    checkpoint: Checkpoint | None
    default_run_dir: bool = False
    started_over: bool = False

    def describe(self) -> str:
        """Return the text of `--dry-run`."""
        resume_from = "step 0: it saved nothing yet" if self.started_over else ""
        if self.checkpoint is not None:
            resume_from = str(self.checkpoint.path)
        return describe(self.checked, source=self.source, run_dir=self.run_dir, resume_from=resume_from)

    def start(self, started_at: float) -> int:
        """Write the run directory (or cut it back), run the job, return the exit code.

        Args:
            started_at: unix time (s) of the user's command.
        """
        from launcher.job import run_job

        config, checkpoint, run_dir = self.checked.config, self.checkpoint, self.run_dir
        if checkpoint is None and not self.started_over:
            run_dir = create_run_dir(run_dir, config, or_beside=self.default_run_dir)
        with held_run_dir(run_dir):
            lineage = self._cut_back()
            return run_job(
                config,
                self.checked.gangs,
                run_dir,
                resume_from=str(checkpoint.path) if checkpoint else "",
                lineage=lineage,
                started_at=started_at,
            )

    def _cut_back(self) -> int:
        """Cut a resumed run back to where it goes on; return its lineage, 0 for a new run."""
        from launcher.progress import print_line

        if self.checkpoint is None and not self.started_over:
            return 0
        lineage = next_lineage(self.run_dir, self.checkpoint)
        if self.checkpoint is not None:
            rewind_run(self.checkpoint)
        else:
            print_line(f"{self.run_dir} saved nothing yet: it starts again from step 1")
            rewind_to_start(self.run_dir)
        rewrite_run_dir(self.run_dir, self.checked.config)
        return lineage


@dataclass(frozen=True)
class Request:
    """The arguments of `asyncflow-launch`; see its `--help`."""

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    resume: str | None = None
    steps: int | None = None

    def accept(self) -> Accepted:
        """Resolve and check; write nothing.

        Raises:
            ConfigError: the first thing that does not hold.
        """
        try:
            return self._accept_new() if self.resume is None else self._accept_resumed(self.resume)
        except OSError as error:
            where = error.filename or "the working directory"
            raise ConfigError(f"{where}: {error.strerror}; correct the path or its permissions") from error

    def _given_run_dir(self) -> Path | None:
        return user_path(self.run_dir, "--run-dir") if self.run_dir is not None else None

    def _accept_new(self) -> Accepted:
        source = find_recipe(self.config)
        config = load_config(source, overrides=self.overrides, roles=self.roles, steps=self.steps)
        given = self._given_run_dir()
        run_dir = given if given is not None else default_run_dir(config.name, datetime.now())
        check_new_run_dir(run_dir)
        return Accepted(source, run_dir, check_run(config), None, default_run_dir=given is None)

    def _accept_resumed(self, target: str) -> Accepted:
        unsaved = unsaved_run(target, self._given_run_dir())
        if unsaved is not None:
            return self._accept_started_over(unsaved)
        checkpoint = find_checkpoint(target, self._given_run_dir())
        source, config = self._load_resumed(checkpoint.run_dir)
        checked = check_run(config)
        check_resume(checkpoint, config)
        check_writable(checkpoint.run_dir)
        return Accepted(source, checkpoint.run_dir, checked, checkpoint)

    def _accept_started_over(self, run_dir: Path) -> Accepted:
        source, config = self._load_resumed(run_dir)
        checked = check_run(config)
        check_not_running(run_dir)
        check_writable(run_dir)
        return Accepted(source, run_dir, checked, None, started_over=True)

    def _load_resumed(self, run_dir: Path) -> tuple[Path, RunConfig]:
        """Return CONFIG, or the run's own configuration, and what it says."""
        own = run_dir / CONFIG_FILE
        if self.config is None and not own.is_file():
            raise ConfigError(f"--resume: {run_dir} has no {CONFIG_FILE}; give CONFIG")
        source = find_recipe(self.config) if self.config is not None else own
        return source, load_config(source, overrides=self.overrides, roles=self.roles, steps=self.steps)
