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
from launcher.preflight import Preflight, check_run
from launcher.recipes import find_recipe
from launcher.resume import Checkpoint, check_resume, find_checkpoint, rewind_run
from launcher.rundir import CONFIG_FILE, check_new_run_dir, check_writable, create_run_dir, default_run_dir


@dataclass(frozen=True)
class Accepted:
    """A command that passed every check. Nothing has been written yet.

    Attributes:
        source: the configuration file.
        run_dir: absolute.
        checked: what the configuration resolves to.
        checkpoint: to continue from, or None for a new run.
    """

    source: Path
    run_dir: Path
    checked: Preflight
    checkpoint: Checkpoint | None

    def describe(self) -> str:
        """Return the text of `--dry-run`."""
        resume_from = str(self.checkpoint.path) if self.checkpoint else ""
        return describe(self.checked, source=self.source, run_dir=self.run_dir, resume_from=resume_from)

    def start(self, started_at: float) -> int:
        """Write the run directory (or cut it back), run the job, return the exit code.

        Args:
            started_at: unix time (s) of the user's command.
        """
        from launcher.job import run_job

        if self.checkpoint is not None:
            rewind_run(self.checkpoint)
        create_run_dir(self.run_dir, self.checked.config)
        return run_job(
            self.checked.config,
            self.checked.gangs,
            self.run_dir,
            resume_from=str(self.checkpoint.path) if self.checkpoint else "",
            lineage=self.checkpoint.lineage + 1 if self.checkpoint else 0,
            started_at=started_at,
        )


@dataclass(frozen=True)
class Request:
    """The arguments of `asyncflow-launch`; see its `--help`."""

    config: str | None = None
    roles: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
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
            raise ConfigError(f"{error.filename}: {error.strerror}; correct the path or its permissions") from error

    def _accept_new(self) -> Accepted:
        source = find_recipe(self.config)
        config = load_config(source, overrides=self.overrides, roles=self.roles, steps=self.steps)
        run_dir = self.run_dir.resolve() if self.run_dir is not None else default_run_dir(config.name, datetime.now())
        check_new_run_dir(run_dir)
        return Accepted(source, run_dir, check_run(config), None)

    def _accept_resumed(self, target: str) -> Accepted:
        checkpoint = find_checkpoint(target, self.run_dir)
        own = checkpoint.run_dir / CONFIG_FILE
        if self.config is None and not own.is_file():
            raise ConfigError(f"--resume: {checkpoint.run_dir} has no {CONFIG_FILE}; give CONFIG")
        source = find_recipe(self.config) if self.config is not None else own
        config = load_config(source, overrides=self.overrides, roles=self.roles, steps=self.steps)
        checked = check_run(config)
        check_resume(checkpoint, config)
        check_writable(checkpoint.run_dir)
        return Accepted(source, checkpoint.run_dir, checked, checkpoint)
