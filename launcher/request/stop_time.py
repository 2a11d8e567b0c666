"""How long the save of a stop takes, from its bytes and the disk's speed, and whether there is time for it.

A start and `--dry-run` refuse what cannot suffice, and `asyncflow sbatch` a signal that would come too late: such a
save would be killed in the middle. A measured speed is the most that a save can hope for, since nothing else uses the
disk meanwhile, and every other node is taken to be as fast.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError, size_text
from launcher.checks.preflight import Preflight
from launcher.nodes.options import save_time_left_s
from workers.settings.run import RunConfig

SAVED_PARAMETER_BYTES = 13
"""Float32 weights and AdamW's two moments make 12; 12.9 is measured with tied embeddings."""
_SMALL_BYTES = 3 * 10**9
"""Less is written in time by any disk, and nothing is measured."""
_MEASURED_S = 0.5
_BLOCK_BYTES = 2**23
_STREAM_BYTES = 2**25
_MOST_STREAMS = 8


@dataclass(frozen=True)
class StopSave:
    """The checkpoint that a stop writes, without `hf/`.

    Attributes:
        num_bytes: of all ranks.
        bytes_per_s: of all nodes together; None: not known, or not needed for so few bytes.
        source: where the speed comes from, for messages.
    """

    num_bytes: int
    bytes_per_s: float | None = None
    source: str = ""

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def __str__(self) -> str:
        speed = f"{self.seconds:.0f} s at {size_text(self.bytes_per_s or 0)}/s, {self.source}"
        return f"{size_text(self.num_bytes)}, {speed}" if self.bytes_per_s else size_text(self.num_bytes)


NO_SAVE = StopSave(0)


def saved_bytes(checked: Preflight) -> int:
    """Return the size of the saved states of policy and critic."""
    config = checked.config
    parameters = config.sim.parameters if config.actor.engine == "sim" else checked.num_parameters
    trained = parameters if config.lora is None else checked.trained.total
    return SAVED_PARAMETER_BYTES * (trained + config.algorithm.has_critic * parameters)


def stop_save_of(checked: Preflight, run_dir: Path) -> StopSave:
    """Return what a stop of this run writes; measures the disk of `run_dir` if that matters."""
    given = checked.config.checkpoint.write_gb_per_s
    num_bytes = 0 if checked.config.actor.engine == "sim" else saved_bytes(checked)  # it saves a number
    if given is not None:
        return StopSave(num_bytes, given * 1e9, "checkpoint.write_gb_per_s")
    if num_bytes < _SMALL_BYTES:
        return StopSave(num_bytes)
    place = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    speed = write_speed(place)
    nodes = f" x {checked.num_nodes} nodes" if checked.num_nodes > 1 else ""
    return StopSave(num_bytes, speed and speed * checked.num_nodes, f"measured in {place}{nodes}")


def check_stop_save(save: StopSave, config: RunConfig, env: Mapping[str, str]) -> None:
    """Raise ConfigError if a stop of this run leaves no time for its save."""
    key, most_s = "checkpoint.timeout_s", config.checkpoint.timeout_s
    if save_time_left_s(env, 0.0) <= 0:  # an old Slurm: no save is waited for
        key, most_s = "launcher.stop_timeout_s", min(most_s, config.launcher.stop_timeout_s)
    if save.seconds > most_s:
        raise ConfigError(
            f"{key}: {most_s:g} s are too short for the save of a stop ({save}); raise it, give the run directory a "
            f"faster disk, or set checkpoint.write_gb_per_s if that speed is wrong"
        )


def write_speed(place: Path) -> float | None:
    """Return how fast several threads write new files in a directory (bytes/s, synced); None: it cannot be written."""
    written: list[int] = []

    def write(path: Path) -> None:
        block, num_bytes = os.urandom(_BLOCK_BYTES), 0
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while num_bytes < _STREAM_BYTES and time.monotonic() < began + _MEASURED_S:
                num_bytes += file.write(block)
            os.fsync(file.fileno())
            written.append(num_bytes)

    streams = min(_MOST_STREAMS, len(os.sched_getaffinity(0)))
    try:
        with tempfile.TemporaryDirectory(prefix=".asyncflow-speed-", dir=place, ignore_cleanup_errors=True) as name:
            began = time.monotonic()
            threads = [threading.Thread(target=write, args=(Path(name) / str(k),)) for k in range(streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(written) / (time.monotonic() - began) if sum(written) else None
    except OSError:
        return None
