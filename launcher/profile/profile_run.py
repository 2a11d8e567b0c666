"""`asyncflow profile` around the measuring process: what is left to measure, the file, progress. Torch-free."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from asyncflow.errors import AsyncFlowError, ConfigError
from launcher.checks.placement import find_devices
from launcher.plan.plan_report import model_sizes
from launcher.plan.profile import Profile
from launcher.process.fork_server import environment
from workers.settings.run import RunConfig

_LEAVE_S = 5.0


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
    with tempfile.TemporaryFile("w+") as errors, _child(kind, errors, config) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = json.loads(process.stdout.readline() or "{}")
        if not first:
            raise AsyncFlowError(f"asyncflow profile: {_end_of(process, errors)}")
        ranks = first["ranks"] if kind != "cpu" or config.roles["actor"] > 1 else 1
        profile = Profile.of(config, sizes, first["device"], ranks=ranks)
        if older is not None:
            profile = profile.joined(older, f"--out {out}")
        profile.write(out)
        todo = [block for block, seconds in profile.seconds.items() if seconds is None]
        say(f"{first['device']['name']}: {len(todo)} of {len(profile.seconds)} blocks to measure, into {out}")
        order = {"config": config.model_dump(mode="json"), "blocks": [asdict(block) for block in todo]}
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(order))
        for number, block in enumerate(todo):
            answer = json.loads(process.stdout.readline() or "{}")
            if "seconds" not in answer:
                what = answer.get("error") or _end_of(process, errors)
                raise AsyncFlowError(f"asyncflow profile: {block}: {what}; the same command continues from there")
            profile = replace(profile, seconds={**profile.seconds, block: answer["seconds"]})
            profile.write(out)
            say(f"{number + 1:>3}/{len(todo)} {answer['seconds'] * 1e3:>10.3f} ms  {block}")
    return profile


@contextlib.contextmanager
def _child(kind: str, errors: IO[str], config: RunConfig) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-P", "-m", "launcher.profile.measure", str(os.getpid()), kind]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **environment(threads=config.launcher.threads_per_worker)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _end_of(process: "subprocess.Popen[str]", errors: IO[str]) -> str:
    code = process.wait(_LEAVE_S)
    errors.seek(0)
    lines = errors.read().split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    return f"the measuring process ended with code {code}: {last}"
