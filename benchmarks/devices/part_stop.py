"""Steps that a stop loses while the export of a checkpoint is slow, on the CPU."""

import signal
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncflow.run_files import list_checkpoints
from benchmarks.chaos.launched_run import LaunchedRun, overrides

EXPORT_S = 40.0
STOPS = 5
_STEPS_BEFORE = (3, 2, 4)  # that a start trains before it is stopped; it saves after every second step
_DEADLINE_S = 600.0
_ENGINE = """\
import time
from dataclasses import replace

from workers.engines.fsdp.sharding import FsdpEngine

PIECES = 40


class Engine(FsdpEngine):
    def __init__(self, setup):
        run, temperature = setup.run, setup.run.rollout.temperature
        own = {"actor": setup.actor, "temperature": temperature, "device": setup.device, "seed": run.seed}
        super().__init__(setup.model_dir, **own)

    def export_hf(self, target, saved):
        time.sleep(EXPORT_S)
        super().export_hf(target, saved)

    def export_share(self, target, saved, share):
        def slow_disk():
            time.sleep(EXPORT_S / PIECES)
            return share.stop()

        for _ in range(PIECES):
            if slow_disk():
                return False
        return super().export_share(target, saved, share)
"""


def run(**_: int) -> dict[str, float]:
    """Stop a run several times and resume it; compare the steps that it had trained with those that it saved."""
    with TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "slow_export.py").write_text(_ENGINE.replace("EXPORT_S", str(EXPORT_S)))
        settings = overrides(
            actor__engine="slow_export:Engine", code_directory=root, checkpoint__interval=2,
            schedule__rollout_batch_size=8, schedule__n_samples_per_prompt=4, actor__micro_batch_size=16,
        )  # fmt: skip
        lost, stop_s, exports = 0, 0.0, 0
        with LaunchedRun(root / "run") as launched:
            launched.start("quickstart", "--roles", "rollout:1,actor:2,ref:1", "--steps", "1000", *settings)
            for number, steps in enumerate(islice(cycle(_STEPS_BEFORE), STOPS)):
                launched.wait_for_step(_saved_step(launched.run_dir) + steps, deadline_s=_DEADLINE_S)
                launched.send(launched.pid, signal.SIGUSR1)
                trained, ended_s = _step_at_the_end(launched)
                stop_s = max(stop_s, ended_s)
                lost += trained - _saved_step(launched.run_dir)
                exports += sum((path / "hf").is_dir() for path in list_checkpoints(launched.run_dir).values())
                if number < STOPS - 1:
                    launched.resume()
        return {"stop_lost_steps": lost, "stop_longest_s": stop_s, "stop_exports": exports, "stops": STOPS}


def _saved_step(run_dir: Path) -> int:
    return max((step for step, path in list_checkpoints(run_dir).items() if (path / "meta.json").exists()), default=0)


def _step_at_the_end(launched: LaunchedRun) -> tuple[int, float]:
    """Wait until the stop is over; return the last step that was trained, and the seconds that it took."""
    took_s = launched.wait_until(lambda: launched.exit_code() is not None, "the stop", deadline_s=_DEADLINE_S)
    if launched.exit_code() != 75:
        raise RuntimeError(f"the command ended with {launched.exit_code()}, not 75: {launched.last_words()}")
    return launched.last_step()[1], took_s
