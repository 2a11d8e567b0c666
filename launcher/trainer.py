"""`asyncflow.Trainer`: the command as a Python object, for scripts and notebooks. Torch-free.

    trainer = asyncflow.Trainer("quickstart", roles="rollout:2,actor:1", overrides={"actor.lr": 3e-4}, steps=40)
    print(trainer.plan())            all checks of a start; what `asyncflow-launch --dry-run` prints, and as data
    results = trainer.fit()          the run, in a child process; Ctrl-C, or `stop()` in a thread, saves and ends it
    trainer.fit(resume=True)         continues it
    results.frame()                  a row per step

    asyncflow.Trainer(reward=score, data=rows)      functions and rows of this program: see `launcher.inputs`

    start() -> a thread owns the launcher and shows its lines -> wait(): Results, or the launcher's error
                                   stop() -'

The child is `asyncflow-launch` itself, in its own process group, so that a Ctrl-C reaches it only through this process.
If this process dies, the kernel asks the child to stop: it saves the last completed step.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from filecmp import cmp
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.checkpoint_files import HF, how_to_load
from asyncflow.errors import ConfigError, RoleFailed
from asyncflow.json_lines import LineReader
from asyncflow.run_files import CONFIG_FILE, EVALUATION_FILE, INPUTS, JOB_FILE, METRICS_FILE, list_checkpoints
from launcher.checks.placement import find_devices
from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe, user_path
from launcher.inputs import DATA_FILE, MODULE, ship_functions, write_rows
from launcher.loggers.feed import figures
from launcher.nodes.options import find_place
from launcher.process.progress import print_line
from launcher.process.run_events import DONE, RESUMABLE, USAGE
from launcher.request.request import Accepted, Request
from launcher.run.rundir import check_new_run_dir, default_run_dir
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from pandas import DataFrame

    from workers.outside.local_engines import LocalEngines

# A child process: the launcher forks workers, takes over signals and logging, and imports torch, none of which a
# notebook's kernel should suffer.
_CHILD = """
import signal, sys
from asyncflow.process import die_with_parent
die_with_parent(int(sys.argv.pop(1)), by=signal.SIGTERM)
from launcher.cli.launch import launch
launch(prog_name="asyncflow-launch")
"""


class Trainer:
    """A run: its settings, and its launcher while it runs.

    Args:
        config: YAML file, name of a packaged recipe, its sections as a dict (relative paths start from the working
            directory), or a loaded configuration. None: the quickstart.
        roles: ranks per role, `{"rollout": 8, "actor": 4}` or `rollout:8,actor:4`, as `--roles`.
        overrides: dotted key -> value, as `--set`.
        steps: number of the last step.
        run_dir: where the run writes; None: each run gets a directory of its own, `runs/NAME-TIMESTAMP`.
        reward, rollout: functions (or, for rollouts, a class) of this program or notebook, for `reward.function` and
            `rollout.function`. Their source goes to the run together with what it uses.
        data: rows for `data.path`: a list of dicts, a `datasets.Dataset` or a data frame.

    Attributes:
        run_dir: of the newest run, or the one that the next run gets; None: chosen at the start.

    Raises:
        ConfigError: a value has the wrong type or no form in YAML, or a function or row cannot be given to other
            processes.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | RunConfig | None = None,
        *,
        roles: str | Mapping[str, int] | None = None,
        overrides: Mapping[str, Any] | None = None,
        steps: int | None = None,
        run_dir: str | Path | None = None,
        reward: Callable[..., Any] | None = None,
        data: Any = None,
        rollout: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(roles, str | Mapping | None):
            raise ConfigError(
                f"roles: {roles!r} is not a dict; give {{'rollout': 8, 'actor': 4}}, or 'rollout:8,actor:4'"
            )
        if not isinstance(overrides, Mapping | None):
            raise ConfigError(f"overrides: {overrides!r} is not a dict; give dotted key -> value, {{'actor.lr': 1e-6}}")
        if isinstance(roles, Mapping):
            roles = ",".join(f"{role}:{count}" for role, count in roles.items())
        self.run_dir = None if run_dir is None else user_path(str(run_dir), "run_dir")
        self._names_run_dir = run_dir is not None
        self._roles = roles
        self._overrides = tuple(f"{key}={_as_yaml(value, key)}" for key, value in (overrides or {}).items())
        self._steps = steps
        self._source = None if config is None else str(config)
        self._called: str | None = None
        self._inputs = Path(tempfile.mkdtemp(prefix="asyncflow-"))
        # Temporary inputs live as long as the trainer.
        weakref.finalize(self, shutil.rmtree, self._inputs, ignore_errors=True)
        if isinstance(config, (Mapping, RunConfig)):
            (directory := self._inputs / "config").mkdir()
            self._source, self._called = _write(config, directory), "config"
        functions = {"reward": reward, "rollout": rollout}
        self._given = _ship({name: each for name, each in functions.items() if each is not None}, data, self._inputs)
        if twice := sorted(self._given.keys() & (overrides or {}).keys()):
            raise ConfigError(f"overrides: {twice[0]} is given as {twice[0].partition('.')[0]}=..., too; leave one out")
        self._kept: Path | None = None
        self._launcher: _Launcher | None = None

    @cached_property
    def config(self) -> RunConfig:
        """The resolved configuration.

        Raises:
            ConfigError: a setting cannot be used.
        """
        return self._load_config(self._make_overrides(self._kept or self._inputs))

    def _load_config(self, overrides: Sequence[str]) -> RunConfig:
        source = find_recipe(self._source)
        return load_config(source, overrides=overrides, roles=self._roles, steps=self._steps, called=self._called)

    def _make_overrides(self, inputs: Path) -> tuple[str, ...]:
        """Return `--set` options; `inputs` is the directory that holds what the caller gave as objects."""
        if not self._given:
            return self._overrides
        given = {**self._given}
        if "data.path" in given:
            given["data.path"] = str(inputs / DATA_FILE)
        settings = (*self._overrides, *(f"{key}={_as_yaml(value, key)}" for key, value in given.items()))
        if (inputs / f"{MODULE}.py").is_file():
            # The generated module goes before the user's own code directory.
            places = os.pathsep.join([str(inputs), self._load_config(settings).code_directory or "."])
            settings = (*settings, f"code_directory={_as_yaml(places, 'code_directory')}")
        return settings

    def _keep_inputs(self, *, resume: bool) -> Path:
        """Copy what was given as objects into the run's directory, where a resumed run finds it; return where."""
        run_dir = self._require_run_dir()
        if not self._given:
            return self._inputs
        if not resume:
            check_new_run_dir(run_dir)
        kept, rows = run_dir / INPUTS, self._inputs / DATA_FILE
        if resume and rows.exists() and (kept / DATA_FILE).exists() and not cmp(rows, kept / DATA_FILE, shallow=False):
            raise ConfigError("data: these are not the rows that the run began with; give the same, or leave data out")
        try:
            kept.mkdir(parents=True, exist_ok=True)
            for file in (self._inputs / f"{MODULE}.py", rows):
                if file.is_file():
                    shutil.copyfile(file, kept / file.name)
        except OSError as error:
            raise ConfigError(f"run_dir: {kept} cannot be written ({error.strerror}); name another one") from error
        return kept

    def plan(self, *, resume: bool = False) -> Accepted:
        """Run all checks of a start without starting anything.

        Returns:
            What the run would be: `run_dir`, and in `checked` its `gangs`, `tasks`, `memory`, `first_prompt` and so on;
                `str()` of it is what `--dry-run` prints.

        Raises:
            ConfigError: the first check that fails.
        """
        accepted = Request(
            config=self._source,
            roles=self._roles,
            overrides=self._make_overrides(self._inputs),
            run_dir=str(self.run_dir) if self._names_run_dir and not resume else None,
            resume=str(self._require_run_dir()) if resume else None,
            steps=self._steps,
            place=find_place(None, None, None, os.environ),
            called=self._called,
        ).accept_run()
        accepted.check_here()
        return accepted

    def fit(self, *, resume: bool = False, show: Callable[[str], None] = print_line) -> "Results":
        """Run to the end, or to a stop. A KeyboardInterrupt saves the last completed step, then propagates.

        Args:
            resume: continue the run in `run_dir`, with this trainer's settings.
            show: called with every line that the launcher writes, in another thread.

        Raises:
            ConfigError: the launcher refused the settings.
            RoleFailed: the run failed.
        """
        self.start(resume=resume, show=show)
        return self.wait()

    def start(self, *, resume: bool = False, show: Callable[[str], None] = print_line) -> None:
        """Start the run and return at once, for example in a notebook; see `fit`."""
        if self._launcher is not None and not self._launcher.ended.done():
            raise ConfigError("fit: a run of this trainer is in progress; stop() it, or wait() for its end")
        if resume:
            where = ("--resume", str(self._require_run_dir()))
        else:
            _ = self.config  # raises here, so that errors name the settings as the caller gave them
            if self.run_dir is None or not self._names_run_dir:
                self.run_dir = default_run_dir(self.config.name, datetime.now())
            where = ("--run-dir", str(self.run_dir))
        roles = () if self._roles is None else ("--roles", self._roles)
        steps = () if self._steps is None else ("--steps", str(self._steps))
        self._kept = self._keep_inputs(resume=resume)
        self.__dict__.pop("config", None)  # from now on it is the run's, with the kept inputs
        settings = self._make_overrides(self._kept)
        options = [*where, *roles, *steps, *(word for each in settings for word in ("--set", each))]
        self._launcher = _Launcher([*options, "--", *([] if self._source is None else [self._source])], show, self)
        self._launcher.begin()

    def wait(self) -> "Results":
        """Wait until the run has ended; see `fit`."""
        launcher = self._launcher
        if launcher is None:
            raise ConfigError("wait: no run was started; call start() or fit()")
        try:
            code, line = launcher.ended.result()
        except KeyboardInterrupt:
            launcher.signal(signal.SIGTERM)
            try:
                launcher.ended.result()
            except KeyboardInterrupt:
                launcher.signal(signal.SIGINT)  # the second signal ends the run at once
                launcher.ended.result()
            raise
        if code in (DONE, RESUMABLE) or launcher.stopped:
            return self.results
        # The launcher refused before it wrote anything: do not leave the inputs that were copied for it.
        if code == USAGE and self._given and not (self._require_run_dir() / CONFIG_FILE).exists():
            shutil.rmtree(self._require_run_dir() / INPUTS, ignore_errors=True)
            with suppress(OSError):
                self._require_run_dir().rmdir()
        error = ConfigError if code == USAGE else RoleFailed
        raise error(line.removeprefix("Error: ") or f"the launcher ended with code {code} and said nothing")

    def stop(self) -> None:
        """Ask the run to save its last completed step and end, without waiting for that. Any thread may call it."""
        if self._launcher is not None:
            self._launcher.signal(signal.SIGTERM)

    @property
    def results(self) -> "Results":
        """What the run has written so far.

        Raises:
            ConfigError: this trainer has had no run.
        """
        return Results(self._require_run_dir())

    def init_engines(self, kind: "type[LocalEngines] | None" = None) -> "LocalEngines":
        """Return engines and a queue in this process, for a training loop of your own; a context manager.

        Args:
            kind: your subclass, which may generate or update differently.

        Raises:
            ConfigError: see `LocalEngines`.
        """
        from asyncflow.device import open_device
        from workers.outside.local_engines import LocalEngines

        if kind is not None and not (isinstance(kind, type) and issubclass(kind, LocalEngines)):
            raise ConfigError(
                f"kind: {kind!r} is not a subclass of asyncflow.LocalEngines; derive one, or leave it out"
            )
        found = find_devices(self.config.launcher.device).kind
        return (kind or LocalEngines)(self.config, open_device(found if found == "cpu" else f"{found}:0"))

    def _require_run_dir(self) -> Path:
        if self.run_dir is None:
            raise ConfigError("resume: this trainer has had no run yet; name one, Trainer(config, run_dir=...)")
        return self.run_dir


@dataclass(frozen=True)
class Results:
    """What a run has written, so far if it is still running."""

    run_dir: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """One dict per finished step, with the figures of docs/metrics.md."""
        return LineReader(self.run_dir / METRICS_FILE).read()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One dict per evaluation on held-out prompts."""
        return LineReader(self.run_dir / EVALUATION_FILE).read()

    @property
    def finished(self) -> bool:
        """Whether the configuration's last step was trained; otherwise `fit(resume=True)` continues.

        Raises:
            ConfigError: there is no run.
        """
        last = max((line["step"] for line in self.steps), default=0)
        try:
            return last >= RunConfig.load(self.run_dir).steps
        except OSError as error:
            raise ConfigError(
                f"{self.run_dir}: no run has written there ({error.strerror}); name a run's directory"
            ) from error

    @property
    def model_path(self) -> Path:
        """The newest model that the run saved: a directory that `transformers` loads.

        Raises:
            ConfigError: none was saved, or a stop left the newest checkpoint without it.
        """
        for path in reversed(list_checkpoints(self.run_dir).values()):
            if (path / HF / "config.json").is_file():
                return path / HF
            if not (self.run_dir / JOB_FILE).exists():  # a live run may be writing it
                raise ConfigError(
                    f"{path} has no hf/, because its run was stopped or does not export: name {how_to_load(path)}, or "
                    f"resume the run"
                )
        raise ConfigError(
            f"{self.run_dir}: no model was saved yet; a run saves one at its end, and every checkpoint.interval steps, "
            f"unless checkpoint.export_hf is false"
        )

    def frame(self) -> "DataFrame":
        """Return a pandas DataFrame indexed by step; nested figures become columns such as `idle_fraction/rollout`."""
        import pandas

        steps = [figures(line) for line in self.steps]
        return pandas.DataFrame(steps, columns=None if steps else ["step"]).set_index("step")


class _Launcher:
    """The launcher in a child process, and the thread that owns it.

    `owner` is kept alive until the child has ended, because the child reads files that are deleted with it.
    """

    def __init__(self, arguments: Sequence[str], show: Callable[[str], None], owner: object) -> None:
        self.ended: Future[tuple[int, str]] = Future()
        """Exit code and last line."""
        self._begun: Future[subprocess.Popen[str]] = Future()
        self._stopping = False
        self._arguments = arguments
        self._show = show
        self._owner: object = owner

    @property
    def stopped(self) -> bool:
        """Whether a stop killed the child before it handled signals, so there was nothing to save."""
        return self._stopping and self.ended.result()[0] == -signal.SIGTERM

    def begin(self) -> None:
        """Start the child; raises OSError if the system cannot create a process."""
        # For the kernel, the parent is this thread: the child's parent-death signal comes when it ends.
        threading.Thread(target=self._run_child, name="launcher", daemon=True).start()
        self._begun.result()

    def signal(self, number: signal.Signals) -> None:
        self._stopping = True
        self._begun.result().send_signal(number)

    def _run_child(self) -> None:
        last = held = ""
        try:
            process = subprocess.Popen(
                # -P: the working directory must not shadow our modules.
                [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), *self._arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", process_group=0,
            )  # fmt: skip
        except OSError as error:
            self.ended.set_exception(error)
            self._begun.set_exception(error)
            return
        self._begun.set_result(process)
        assert process.stdout is not None
        try:
            with process.stdout:
                for line in map(str.rstrip, process.stdout):
                    last = line or last
                    if held:
                        self._show(held)
                    # The line that tells why the run ended is raised, so it is not shown as well.
                    held = line if line.startswith(("Error: ", "failed (")) else ""
                    if not held:
                        self._show(line)
        except BaseException as error:  # noqa: BLE001  of the user's function
            process.terminate()
            process.wait()
            self._owner = None
            self.ended.set_exception(error)
        else:
            process.wait()
            self._owner = None
            self.ended.set_result((process.returncode, last))


def _ship(functions: Mapping[str, Callable[..., Any]], data: Any, directory: Path) -> dict[str, str]:
    """Write what the caller gave as objects into a directory; return the settings that refer to it."""
    given: dict[str, str] = {}
    if functions:
        source, names = ship_functions(functions)
        (directory / f"{MODULE}.py").write_text(source, encoding="utf-8")
        given = {f"{argument}.function": name for argument, name in names.items()}
    if data is not None:
        write_rows(data, directory / DATA_FILE)
        given["data.path"] = DATA_FILE
    return given


def _write(config: Mapping[str, Any] | RunConfig, directory: Path) -> str:
    """Write a configuration that is in no file; return its path."""
    if isinstance(config, RunConfig):
        config.save(directory)
    else:
        text = _as_yaml({"code_directory": str(Path.cwd()), **config}, "config")
        (directory / CONFIG_FILE).write_text(text)
    return str(directory / CONFIG_FILE)


def _as_yaml(value: Any, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)  # JSON is also YAML
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}; give numbers, texts, lists and dicts") from error


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in YAML")
