"""What `asyncflow view` costs on a run of 10,000 steps.

    python benchmarks/view.py [--json [FILE]] [--steps 10000] [--seconds 20]

Writes such a run (60 figures a step, two samples), starts the command and asks like a page, while a step is added every
half second:

    start_s             from the command to the first whole answer, as one page gets it (s)
    first_state_s       the first answer alone (s)
    first_state_mb      its size (MB); each point is a mean over some steps
    update_ms           median of the later answers, which have what is new (ms)
    update_kb           median size of these (KB)
    samples_ms          twenty rollouts of the highest reward, all of them indexed (ms)
    server_mb           largest memory of the server (RSS, MB)
    server_core_share   its processor time over the time in which it was asked every two seconds
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from benchmarks.json_option import add_json_option, report

COMMAND = Path(sys.executable).parent / "asyncflow"
POLL_S = 2.0
STEP_S = 0.5
NUM_FIGURES = 60


def step_line(step: int, draw: random.Random) -> str:
    values = {f"figure_{number}": draw.random() for number in range(NUM_FIGURES)}
    return json.dumps({"step": step, "lineage": 0, "time_s": 2.0 * step, "reward_mean": draw.random(), **values}) + "\n"


def write_run(run_dir: Path, num_steps: int, draw: random.Random) -> None:
    (run_dir / "samples").mkdir(parents=True)
    (run_dir / "logs").mkdir()
    (run_dir / "config.yaml").write_text(f"steps: {num_steps}\n")
    with (run_dir / "metrics.jsonl").open("w") as metrics:
        metrics.writelines(step_line(step, draw) for step in range(1, num_steps + 1))
    with (run_dir / "samples" / "rollout-0.jsonl").open("w") as samples:
        for number in range(2 * num_steps):
            row = {"step": 1 + number // 2, "group": number, "index": number, "prompt": "1+1=", "response": "x" * 300}
            samples.write(json.dumps({**row, "reward": draw.random(), "response_tokens": 300}) + "\n")


def ask(address: str) -> tuple[bytes, float]:
    began = time.monotonic()
    with urllib.request.urlopen(address) as answer:
        data: bytes = answer.read()
    return data, time.monotonic() - began


def measure(run_dir: Path, seconds: float, num_steps: int, draw: random.Random) -> dict[str, float]:
    began = time.monotonic()
    process = subprocess.Popen([COMMAND, "view", str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        first, first_s = ask(f"{address}api/state")
        start_s = time.monotonic() - began
        curves = json.loads(first)["runs"][0]["curves"]
        _, samples_s = ask(f"{address}api/samples?order=best")
        server = psutil.Process(process.pid)
        before, since = sum(server.cpu_times()[:2]), time.monotonic()
        times, sizes, memory = [], [], server.memory_info().rss
        asked_at, step, points = since, num_steps, len(curves["steps"])
        with (run_dir / "metrics.jsonl").open("a", buffering=1) as metrics:
            while time.monotonic() - since < seconds:
                step += 1
                metrics.write(step_line(step, draw))
                if time.monotonic() - asked_at >= POLL_S:
                    asked_at = time.monotonic()
                    have = f"{curves['generation']}.{curves['stride']}.{points}.0"
                    news, took_s = ask(f"{address}api/state?have={have}")
                    curves = json.loads(news)["runs"][0]["curves"]
                    points = curves["from"] + len(curves["steps"])
                    times.append(took_s)
                    sizes.append(len(news))
                    memory = max(memory, server.memory_info().rss)
                time.sleep(STEP_S)
        share = (sum(server.cpu_times()[:2]) - before) / (time.monotonic() - since)
    finally:
        process.terminate()
        process.wait()
    return {
        "start_s": start_s,
        "first_state_s": first_s,
        "first_state_mb": len(first) / 1e6,
        "update_ms": 1e3 * statistics.median(times),
        "update_kb": statistics.median(sizes) / 1e3,
        "samples_ms": 1e3 * samples_s,
        "server_mb": memory / 1e6,
        "server_core_share": share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        write_run(run_dir, options.steps, draw)
        figures = measure(run_dir, options.seconds, options.steps, draw)
    report(options.json, figures, "\n".join(f"{name:20} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
