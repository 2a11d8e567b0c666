"""`asyncflow profile` around the measuring process: what is left to measure, the file, progress. Torch-free."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.errors import AsyncFlowError, ConfigError
from asyncflow.process import variables_set
from launcher.checks.placement import find_devices
from launcher.plan.plan_report import model_sizes
from launcher.plan.profile import Profile
from launcher.process.fork_server import environment
from workers.calls.child_process import ChildDied
from workers.calls.pool import CallProcess, CallRaised, Entry
from workers.calls.user_function import Callee
from workers.settings.run import RunConfig

if TYPE_CHECKING:
    from launcher.profile.measure import Measuring

_LOG = "log"


def profile_run(config: RunConfig, out: Path, *, say: Callable[[str], None]) -> Profile:
    """Measure what `out` lacks, and write the file after each block.

    Args:
        out: JSON file; an existing one is continued.
        say: called with a line of progress per block.

    Raises:
        ConfigError: the engines have no model, or the file is of another model or device, or cannot be written.
        AsyncFlowError: a block could not be measured.
    """
    if "sim" in (config.rollout.engine, config.actor.engine, config.ref.engine):
        raise ConfigError("engine: sim takes no time that could be measured; profile a run with real engines")
    if config.rollout.engine == "openai":
        raise ConfigError("rollout.engine: openai generates on servers of yours, which are not measured; plan with hf")
    sizes = model_sizes(config)
    older = Profile.read(out, "--out") if out.exists() else None
    kind = find_devices(config.launcher.device).kind
    with _measuring(kind, config) as measure:
        first = measure("", "", "describe")
        ranks = first["ranks"] if kind != "cpu" or config.roles["actor"] > 1 else 1
        profile = Profile.from_config(config, sizes, first["device"], ranks=ranks)
        if older is not None:
            profile = profile.joined_with(older, f"--out {out}")
        profile.write(out)
        todo = [block for block, seconds in profile.seconds.items() if seconds is None]
        say(f"{first['device']['name']}: {len(todo)} of {len(profile.seconds)} blocks to measure, into {out}")
        longest = max((block.prompt for block in todo), default=1)
        for number, block in enumerate(todo):
            again = "; the same command continues from there"
            seconds = measure(f"{block}: ", again, "seconds", asdict(block), longest)
            profile = replace(profile, seconds={**profile.seconds, block: seconds})
            profile.write(out)
            say(f"{number + 1:>3}/{len(todo)} {seconds * 1e3:>10.3f} ms  {block}")
    return profile


@contextlib.contextmanager
def _measuring(kind: str, config: RunConfig) -> Iterator[Callable[..., Any]]:
    """Start the process; yield what calls a method of its `Measuring`, after the text before and after an error."""
    with tempfile.TemporaryDirectory(prefix="asyncflow-profile-") as place:
        settings = {"kind": kind, "config": config.model_dump(mode="json"), "place": place}
        with variables_set(environment(threads=config.launcher.threads_per_worker)):
            process = CallProcess(Entry("launcher.profile.profile_run:measuring", settings))

        def measure(before: str, after: str, method: str, *arguments: Any) -> Any:
            try:
                return process.call(method, *arguments)
            except ChildDied as ending:
                what = f"the measuring process {ending}: {_last_line(Path(place, _LOG))}"
            except CallRaised as raised:
                what = str(raised)
            raise AsyncFlowError(f"asyncflow profile: {before}{what}{after}")

        with process:
            try:
                yield measure
            finally:
                with contextlib.suppress(ChildDied, CallRaised):
                    process.call("close")


def measuring(kind: str, config: Mapping[str, Any], place: str) -> Callee:
    """Entry of `workers.calls`: calls a method of `Measuring`, with what libraries print going into a file."""
    log = os.open(Path(place, _LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)

    @cache
    def process() -> "Measuring":
        from launcher.profile.measure import Measuring

        return Measuring(kind, RunConfig.model_validate(config), Path(place))

    return Callee(lambda method, *arguments: getattr(process(), method)(*arguments))


def _last_line(log: Path) -> str:
    return next((line for line in reversed(log.read_text().split("\n")) if line.strip()), "no output")
