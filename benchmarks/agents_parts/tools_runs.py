"""Whole runs of quickstart-tools: what it learns, and what kills cost it."""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
KILL_EVERY_S = 3.0
VICTIMS = ("workers.agents.worker", "workers.agents.service", "rollout")
"""Whose processes are killed: a user worker, the session service, the rollout that has both."""


def accuracies(*, seeds: int, steps: int) -> dict[str, float]:
    """Return the median held-out accuracy over seeds, with the tool and, of one seed, without."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found = [_accuracy(root / f"with-{seed}", f"seed={seed}", steps=steps) for seed in range(seeds)]
        without = _accuracy(root / "without", "rollout.tools=[]", steps=steps)
    return {"tools_accuracy": statistics.median(found), "tools_accuracy_without": without}


def kills(*, number: int, seed: int) -> dict[str, float]:
    """Kill processes of a run, one after the other, and return what `asyncflow verify` and its ledger say."""
    import psutil

    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        steps = 20 + 4 * number
        restarts = ("launcher.max_restarts=1000", "launcher.max_global_restarts=1000", f"steps={steps}")
        command = [str(BIN / "asyncflow-launch"), "quickstart-tools", "--run-dir", str(run_dir), *_settings(restarts)]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        done = 0
        while done < number and run.poll() is None:
            time.sleep(KILL_EVERY_S)
            if not _steps(run_dir):
                continue
            found: list[psutil.Process] = []
            wanted = chance.choice(VICTIMS)
            for process in psutil.Process(run.pid).children(recursive=True):
                try:
                    if _hosts_a_service(process) if wanted == "rollout" else _runs(process, wanted):
                        found.append(process)
                except psutil.NoSuchProcess:
                    continue
            if found:
                chance.choice(found).kill()
                done += 1
        code = run.wait()
        verified = subprocess.run([BIN / "asyncflow", "verify", run_dir], capture_output=True, text=True, check=False)
        groups = [line["group"] for line in map(json.loads, (run_dir / "ledger.jsonl").read_text().splitlines())]
    if code or verified.returncode:
        raise SystemExit(f"kills: the run ended with {code}; verify says\n{verified.stdout}{verified.stderr}")
    return {
        "kills": done,
        "skipped": len(set(range(max(groups) + 1)) - set(groups)),
        "twice": len(groups) - len(set(groups)),
    }


def _hosts_a_service(process: "psutil.Process") -> bool:  # type: ignore[name-defined]  # noqa: F821
    return any(_runs(child, "workers.agents.service") for child in process.children())


def _runs(process: "psutil.Process", module: str) -> bool:  # type: ignore[name-defined]  # noqa: F821
    """Whether a process was started with a module; one that it forked, with the same line, does not count."""
    line, parent = process.cmdline(), process.parent()
    return bool(module in line and (parent is None or parent.cmdline() != line))


def _steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _accuracy(run_dir: Path, setting: str, *, steps: int) -> float:
    settings = (setting, f"steps={steps}", f"evaluate.interval={steps}", "checkpoint.interval=0")
    roles = "rollout:1,actor:1,evaluate:1"
    command = [str(BIN / "asyncflow-launch"), "quickstart-tools", "--run-dir", str(run_dir), "--roles", roles]
    done = subprocess.run([*command, *_settings(settings)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines()]
    return float(next(line["accuracy"] for line in lines if line["step"] == steps))


def _settings(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
