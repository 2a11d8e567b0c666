"""What looking at a run costs: the page of `asyncflow view`, `asyncflow trace`, and the run that is looked at.

    python benchmarks/view.py [--json [FILE]] [--only page|browser|rows|trace|live|overhead ...] [--steps 10000]
                              [--seconds 20] [--rows 1000000] [--rounds 5] [--run-steps 60]

`page` writes a run of 10,000 steps (60 figures a step, two samples), starts the command and asks like a page, while a
step is added every half second:

    start_s             from the command to the first whole answer, as one page gets it (s)
    first_state_s       the first answer alone (s)
    first_state_mb      its size (MB); each point is a mean over some steps
    update_ms           median of the later answers, which have what is new (ms)
    update_kb           median size of these (KB)
    samples_ms          twenty rollouts of the highest reward, all of them indexed (ms)
    server_mb           largest memory of the server (RSS, MB)
    server_core_share   its processor time over the time in which it was asked as a page does

`browser` shows the same run in Chromium without a window (Playwright, Debian's `chromium`):

    first_paint_s       from the request to the first contentful paint, mean of three loads (s)
    first_curve_s       to the first drawn curve (s)
    update_s            from a step's line to the page that has it, the longest of five (s); the page asks every 1.5 s

`rows` writes a run that kept a million rollouts, and asks for twenty of them by order, and for a text:

    rows_index_s        the first answer, which reads all of them (s)
    rows_page_ms        median of the later ones (ms)
    rows_search_s       those with a text that one of them has (s)
    rows_server_mb      largest memory of the server (RSS, MB)

`trace` writes the ledger and the kept rows of a run of a million rows, and looks some up while a step is added before
each look:

    trace_build_s       the first look, which builds the index (s)
    trace_index_mb      size of the index (MB)
    trace_lookup_ms     median of 50 later ones, from opening the index to the text (ms)
    trace_lookup_max_ms the longest of them (ms)

`live` runs the quickstart and its page, which is asked as a browser does:

    live_server_mb          largest memory of the page's server (RSS, MB)
    live_server_core_share  its processor time over the time of the run

`overhead` runs the quickstart twice at once, without records of rows and without a page (`rollout.samples_per_step` 0),
and with both, and a page that asks; each on a core of its own, and then once more with the cores swapped. So whatever
changes the machine's speed meanwhile changes it for both:

    view_overhead       processor time of all processes of the run, with over without: mean of the rounds
    view_overhead_low, view_overhead_high   its 95 % interval (Student's t)
    kept_kb_per_step    size of samples/ and trace/ (KB)
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from asyncflow.clock import HostClock
from asyncflow.run_files import JOB_FILE
from benchmarks import say
from benchmarks.intervals import mean_of
from benchmarks.json_option import add_json_option, report

COMMAND = Path(sys.executable).parent / "asyncflow"
POLL_S = 1.5
STEP_S = 0.5
NUM_FIGURES = 60


def step_line(step: int, draw: random.Random) -> str:
    values = {f"figure_{number}": draw.random() for number in range(NUM_FIGURES)}
    return json.dumps({"step": step, "lineage": 0, "time_s": 2.0 * step, "reward_mean": draw.random(), **values}) + "\n"


def write_run(run_dir: Path, num_steps: int, draw: random.Random) -> None:
    (run_dir / "samples").mkdir(parents=True)
    (run_dir / "logs").mkdir()
    (run_dir / "config.yaml").write_text(f"steps: {2 * num_steps}\n")
    # This process is its launcher, so that it counts as live.
    clock, now = {"host": HostClock.from_wall_clock().host}, time.time()
    (run_dir / JOB_FILE).write_text(json.dumps({"clock": clock, "launcher_pid": os.getpid(), "started_at": now}))
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


def have_of(state: Mapping[str, Any]) -> str:
    """Return what a page says that it has after this answer, of a run without evaluations; see `Have`."""
    curves, queue = state["curves"], state["queue_depths"]
    points, queue_points = curves["from"] + len(curves["steps"]), queue["from"] + len(queue["times"])
    return f"{curves['generation']}.{curves['stride']}.{points}.0.{queue['stride']}.{queue_points}"


def measure(run_dir: Path, seconds: float, num_steps: int, draw: random.Random) -> dict[str, float]:
    began = time.monotonic()
    process = subprocess.Popen([COMMAND, "view", str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        first, first_s = ask(f"{address}api/state")
        start_s = time.monotonic() - began
        state = json.loads(first)["runs"][0]
        _, samples_s = ask(f"{address}api/samples?order=best")
        server = psutil.Process(process.pid)
        before, since = sum(server.cpu_times()[:2]), time.monotonic()
        times, sizes, memory = [], [], server.memory_info().rss
        asked_at, step = since, num_steps
        with (run_dir / "metrics.jsonl").open("a", buffering=1) as metrics:
            while time.monotonic() - since < seconds:
                step += 1
                metrics.write(step_line(step, draw))
                if time.monotonic() - asked_at >= POLL_S:
                    asked_at = time.monotonic()
                    news, took_s = ask(f"{address}api/state?have={have_of(state)}")
                    state = json.loads(news)["runs"][0]
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


def measure_browser(run_dir: Path, num_steps: int, draw: random.Random) -> dict[str, float]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise SystemExit("browser: playwright is not installed; pip install playwright") from error
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("browser: there is no chromium; apt-get install chromium")
    process = subprocess.Popen([COMMAND, "view", str(run_dir)], stdout=subprocess.PIPE, text=True)
    paints, curves, updates = [], [], []
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            for _ in range(3):
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                began = time.monotonic()
                page.goto(address)
                page.wait_for_selector(".plot canvas", timeout=60_000)
                curves.append(time.monotonic() - began)
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                paints.append(page.evaluate(paint) / 1e3)
                if len(paints) < 3:
                    page.close()
            for step in range(num_steps + 1, num_steps + 6):
                began = time.monotonic()
                with (run_dir / "metrics.jsonl").open("a") as metrics:
                    metrics.write(step_line(step, draw))
                page.locator("header", has_text=f"step {step}/").wait_for(timeout=60_000)
                updates.append(time.monotonic() - began)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    return {
        "first_paint_s": statistics.fmean(paints), "first_curve_s": statistics.fmean(curves), "update_s": max(updates),
    }  # fmt: skip


def measure_rows(run_dir: Path, num_rows: int, draw: random.Random) -> dict[str, float]:
    for name in ("samples", "logs"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "config.yaml").write_text("steps: 1\n")
    with (run_dir / "samples" / "rollout-0.jsonl").open("w") as samples:
        for row in range(num_rows):
            said = "needle" if row == num_rows // 2 else "x" * 100
            line = {"step": 1 + row // 64, "group": row // 8, "index": row, "prompt": "1+1=", "response": said}
            samples.write(json.dumps({**line, "reward": draw.random()}) + "\n")
    process = subprocess.Popen([COMMAND, "view", str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        server = psutil.Process(process.pid)
        memory = 0
        took = []
        orders = ("newest", "best", "worst")
        for query in ("order=newest", *(f"order={orders[k % 3]}&skip={100 * k}" for k in range(9)), "search=needle"):
            answer, took_s = ask(f"{address}api/samples?{query}")
            took.append(took_s)
            memory = max(memory, server.memory_info().rss)
        assert json.loads(answer)["total"] == 1
    finally:
        process.terminate()
        process.wait()
    return {
        "rows_index_s": took[0], "rows_page_ms": 1e3 * statistics.median(took[1:-1]), "rows_search_s": took[-1],
        "rows_server_mb": memory / 1e6,
    }  # fmt: skip


ROWS_PER_GROUP = 8
GROUPS_PER_STEP = 64


def ledger_line(step: int, group: int) -> str:
    rows = range(group * ROWS_PER_GROUP, (group + 1) * ROWS_PER_GROUP)
    line = {
        "lineage": 0, "step": step, "admitted_step": step, "group": group, "epoch": 0, "indices": list(rows),
        "versions": [step - 2, step - 1], "staleness": 1, "prompt_hash": "0" * 16, "token_hash": "0" * 16,
        "time_s": 1.0 * step,
    }  # fmt: skip
    return json.dumps(line) + "\n"


def write_step(run_dir: Path, step: int) -> None:
    """Append a step's ledger lines, and the samples, leases and log-probabilities of its first group."""
    first = (step - 1) * GROUPS_PER_STEP
    with (run_dir / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(ledger_line(step, group) for group in range(first, first + GROUPS_PER_STEP))
    rows = [first * ROWS_PER_GROUP + k for k in range(ROWS_PER_GROUP)]
    with (run_dir / "samples" / "rollout-0.jsonl").open("a") as samples:
        for row in rows:
            sample = {"step": step, "group": first, "index": row, "prompt": "1+1=", "response": "x" * 300}
            more = {"versions": [[step - 1, 64]], "response_tokens": 64, "reward": 1.0, "log_probs": [-0.5] * 64}
            samples.write(json.dumps({**sample, **more}) + "\n")
    with (run_dir / "trace" / "leases-controller-0.jsonl").open("a") as leases:
        line = {"task": "actor", "token": step, "step": step, "rows": rows, "to": "actor/0", "time_s": 1.0 * step}
        leases.write(json.dumps(line) + "\n")
    with (run_dir / "trace" / "trained-0.jsonl").open("a") as trained:
        for row in rows:
            line = {"index": row, "step": step, "lineage": 0, "time_s": 1.0 * step, "log_probs": [-0.5] * 64}
            trained.write(json.dumps(line) + "\n")


def measure_trace(run_dir: Path, num_rows: int, draw: random.Random) -> dict[str, float]:
    from launcher.view.row_trace import INDEX_FILE, RowTrace

    for name in ("samples", "trace", "logs"):
        (run_dir / name).mkdir(parents=True)
    per_step = ROWS_PER_GROUP * GROUPS_PER_STEP
    steps = math.ceil(num_rows / per_step)
    (run_dir / "config.yaml").write_text(f"steps: {steps}\n")
    for step in range(1, steps + 1):
        write_step(run_dir, step)
    began = time.monotonic()
    RowTrace.read(run_dir, 0)
    build_s = time.monotonic() - began
    looks = []
    for number in range(50):
        write_step(run_dir, steps + 1 + number)
        # A kept row and one that is not, in turn.
        row = draw.randrange(steps) * per_step + number % 2 * (per_step - 1)
        began = time.monotonic()
        assert RowTrace.read(run_dir, row).as_text()
        looks.append(time.monotonic() - began)
    size = (run_dir / "trace" / INDEX_FILE).stat().st_size
    return {
        "trace_build_s": build_s, "trace_index_mb": size / 1e6, "trace_lookup_ms": 1e3 * statistics.median(looks),
        "trace_lookup_max_ms": 1e3 * max(looks),
    }  # fmt: skip


def run_once(
    run_dir: Path, num_steps: int, *, looked_at: bool, core: int | None = None
) -> tuple[float, dict[str, float]]:
    """Run the quickstart, on one core if it is given; return the processor time of all its processes (s), and what its
    page cost."""
    if core is not None:
        os.sched_setaffinity(0, [core])  # of this thread, and of what it starts
    options = ["--run-dir", str(run_dir), "--steps", str(num_steps), "--quiet", "--set", "checkpoint.export_hf=false"]
    kept = [] if looked_at else ["--set", "rollout.samples_per_step=0"]
    launcher = subprocess.Popen([COMMAND.with_name("asyncflow-launch"), *options, *kept], stdout=subprocess.DEVNULL)
    ended = threading.Event()
    cost: dict[str, float] = {}
    page = threading.Thread(target=look, args=(run_dir, ended, cost)) if looked_at else None
    if page is not None:
        page.start()
    _, status, used = os.wait4(launcher.pid, 0)
    launcher.returncode = os.waitstatus_to_exitcode(status)
    ended.set()
    if page is not None:
        page.join()
    if launcher.returncode:
        raise SystemExit(f"the quickstart ended with code {launcher.returncode}")
    return used.ru_utime + used.ru_stime, cost


def look(run_dir: Path, ended: threading.Event, cost: dict[str, float]) -> None:
    """Show a run's page, and ask as it does, until the run has ended; `cost` gets what the server took."""
    while not (run_dir / "job.json").exists():
        if ended.wait(0.1):
            return
    process = subprocess.Popen([COMMAND, "view", str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        server, began, memory, polls, have = psutil.Process(process.pid), time.monotonic(), 0, 0, ""
        before = sum(server.cpu_times()[:2])
        while not ended.wait(POLL_S):
            have = have_of(json.loads(ask(f"{address}api/state?have={have}")[0])["runs"][0])
            if polls % 5 == 0:
                ask(f"{address}api/timeline?last=60")
            if polls % 15 == 0:
                ask(f"{address}api/samples?order=newest")
                ask(f"{address}api/account")
            polls += 1
            memory = max(memory, server.memory_info().rss)
        cost["live_server_mb"] = memory / 1e6
        cost["live_server_core_share"] = (sum(server.cpu_times()[:2]) - before) / (time.monotonic() - began)
    finally:
        process.terminate()
        process.wait()


def measure_overhead(directory: Path, rounds: int, num_steps: int) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("overhead: needs two cores")
    ratios, kept = [], 0.0
    for number in range(rounds):
        of_cores = []
        for core, other in (cores, cores[::-1]):
            without, looked_at = (directory / f"{name}-{number}-{core}" for name in ("without", "looked-at"))
            with ThreadPoolExecutor(2) as pool:
                one = pool.submit(run_once, without, num_steps, looked_at=False, core=core)
                two = pool.submit(run_once, looked_at, num_steps, looked_at=True, core=other)
            without_s, with_s = one.result()[0], two.result()[0]
            of_cores.append(with_s / without_s)
            say(f"round {number + 1}: {without_s:.1f} s without, {with_s:.1f} s with")
            files = [path for name in ("samples", "trace") for path in (looked_at / name).iterdir()]
            kept = sum(path.stat().st_size for path in files) / num_steps / 1e3
        ratios.append(statistics.geometric_mean(of_cores))
    overhead = mean_of(ratios)
    return {
        "view_overhead": overhead.value,
        "view_overhead_low": overhead.value - overhead.half_width,
        "view_overhead_high": overhead.value + overhead.half_width,
        "kept_kb_per_step": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parts = ("page", "browser", "rows", "trace", "live", "overhead")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run-steps", type=int, default=60)
    options = parser.parse_args()
    draw = random.Random(0)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        if "page" in options.only:
            write_run(run_dir, options.steps, draw)
            figures |= measure(run_dir, options.seconds, options.steps, draw)
        if "browser" in options.only:
            write_run(Path(directory) / "shown", options.steps, draw)
            figures |= measure_browser(Path(directory) / "shown", options.steps, draw)
        if "rows" in options.only:
            figures |= measure_rows(Path(directory) / "many", options.rows, draw)
        if "trace" in options.only:
            figures |= measure_trace(Path(directory) / "traced", options.rows, draw)
        if "live" in options.only:
            figures |= run_once(Path(directory) / "live", options.run_steps, looked_at=True)[1]
        if "overhead" in options.only:
            figures |= measure_overhead(Path(directory), options.rounds, options.run_steps)
    report(options.json, figures, "\n".join(f"{name:20} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
