"""`sha_equal`: with `deterministic: true` a run that crashes ends with the same parameters as one that does not.

Three quickstart runs in mode `periodic`: one is left alone; of one the launcher is killed at step 17, and the command
started again with `--resume latest`; of one a rank of the actor, so that the run itself goes back. The
interval is such that both lose steps. Compared is SHA-256 over the names, types, shapes and values of the last
checkpoint's parameters.
"""

import hashlib
from pathlib import Path

from safetensors import safe_open

from benchmarks.chaos.launched_run import LAUNCHER, LaunchedRun, overrides
from benchmarks.chaos.options import Options
from benchmarks.transferqueue.part import Result

_STEPS, _CRASH_AT, _INTERVAL = 40, 17, 5
_SHORT_STEPS, _SHORT_CRASH_AT = 12, 7
_ROLES = "rollout:2,actor:2,ref:1"
_DEADLINE_S = 900.0


def run(options: Options) -> Result:
    """Crash twice; compare."""
    steps, crash_at = (_SHORT_STEPS, _SHORT_CRASH_AT) if options.short else (_STEPS, _CRASH_AT)
    hashes = {victim: _train(options, victim, steps, crash_at) for victim in ("", LAUNCHER, "actor-1")}
    equal = len(set(hashes.values())) == 1
    named = {victim or "left alone": digest for victim, digest in hashes.items()}
    details = {"steps": steps, "crash_at": crash_at, "interval": _INTERVAL, "sha256": named}
    return Result({"sha_equal": equal}, {"determinism": details})


def parameters_sha256(file: Path) -> str:
    """Return the SHA-256 (hex) of all tensors in a safetensors file, in the order of their names."""
    digest = hashlib.sha256()
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(-1).numpy().tobytes())
    return digest.hexdigest()


def _train(options: Options, victim: str, steps: int, crash_at: int) -> str:
    """Run; kill `victim` once, at step `crash_at`; return the hash of the parameters."""
    name = f"deterministic-{victim or 'left-alone'}"
    settings = overrides(
        deterministic="true", schedule__mode="periodic", checkpoint__interval=_INTERVAL, rollout__batch_size=128,
        rollout__samples_per_step=0,
    )  # fmt: skip
    with LaunchedRun(options.directory / name) as launched:
        launched.start("quickstart", "--roles", _ROLES, "--steps", str(steps), *settings)
        if victim:
            launched.wait_for_step(crash_at, deadline_s=_DEADLINE_S)
            options.say(f"determinism: {victim} is killed at step {launched.last_step()[1]}")
            launched.send(launched.pid_of(victim))
            if launched.exit_code() is not None:
                launched.resume()
        launched.end_with(0, deadline_s=_DEADLINE_S)
    digest = parameters_sha256(launched.run_dir / "checkpoints" / f"step_{steps:06d}" / "hf" / "model.safetensors")
    options.say(f"determinism: {name}: {digest[:16]}")
    return digest
