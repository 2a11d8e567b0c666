"""Whole runs of quickstart-tools: what it learns, and what kills cost it."""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncflow.json_lines import LineReader

BIN = Path(sys.executable).parent
KILL_EVERY_S = 3.0
VICTIMS = (
    *(("workers.agents.worker", signal.SIGKILL), ("workers.agents.worker", signal.SIGSTOP)),
    *(("workers.agents.service", signal.SIGKILL), ("workers.agents.service", signal.SIGSTOP)),
    ("rollout", signal.SIGKILL),
)
"""A user worker and the session service, killed or hung, and the rollout that has both."""
REPLACED_S = 600.0
"""How long a hung process may stay (s): one that starts may take long, and one that is idle holds nothing up."""
AGENT = """
import json, os, urllib.request as web
row = json.load(open(os.environ["ASYNCFLOW_TASK_FILE"]))
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
def reply(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    answer = web.urlopen(web.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head))
    return json.load(answer)["choices"][0]["message"]
messages = [{"role": "user", "content": row["prompt"]}]
said = reply(messages)
for call in said.get("tool_calls") or ():
    numbers = json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": str(numbers["a"] * numbers["b"])}
    said = reply([*messages, said, result])
    break
json.dump({"reward": float(said["content"] == row["answer"])}, open(os.environ["ASYNCFLOW_RESULT"], "w"))
"""
"""The recipe's rollout as a program that knows nothing of training; it is a victim in a run of its own."""
AGENT_VICTIMS = (("ASYNCFLOW_AGENT", signal.SIGKILL), ("workers.agents.service", signal.SIGKILL))


def accuracies(*, seeds: int, steps: int) -> dict[str, float]:
    """Return the median held-out accuracy over seeds, with the tool and, of one seed, without."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found = [_accuracy(root / f"with-{seed}", f"seed={seed}", steps=steps) for seed in range(seeds)]
        without = _accuracy(root / "without", "rollout.tools=[]", steps=steps)
    return {"tools_accuracy": statistics.median(found), "tools_accuracy_without": without}


def kills(*, number: int, seed: int) -> dict[str, float]:
    """Kill or hang processes of two runs, one after the other, and return what `asyncflow verify` and the ledgers say.

    A third of them is in a run whose agent is a program.
    """
    agents = number // 3
    of_functions = _killed(number - agents, random.Random(seed), VICTIMS, ())
    command = json.dumps([sys.executable, "-c", AGENT, "ASYNCFLOW_AGENT"])
    settings = (  # each rollout starts a process: small steps
        "rollout.function=null", "rollout.tools=[]", "schedule.rollout_batch_size=4", "actor.micro_batch_size=16",
        "schedule.n_samples_per_prompt=4", f"rollout.agent_command={command}",
    )  # fmt: skip
    of_agents = _killed(agents, random.Random(seed), AGENT_VICTIMS, settings)
    return {name: figure + of_agents[name] for name, figure in of_functions.items()}


def _killed(
    number: int, chance: random.Random, victims: "tuple[tuple[str, signal.Signals], ...]", settings: tuple[str, ...]
) -> dict[str, float]:
    import psutil

    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        steps = 20 + 4 * number
        restarts = ("launcher.max_restarts=1000", "launcher.max_global_restarts=1000", f"steps={steps}", *settings)
        command = [str(BIN / "asyncflow-launch"), "quickstart-tools", "--run-dir", str(run_dir), *_settings(restarts)]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        done = 0
        while done < number and run.poll() is None:
            time.sleep(KILL_EVERY_S)
            if not _steps(run_dir):
                continue
            found: list[psutil.Process] = []
            wanted, blow = chance.choice(victims)
            for process in psutil.Process(run.pid).children(recursive=True):
                try:
                    if _hosts_a_service(process) if wanted == "rollout" else _runs(process, wanted):
                        found.append(process)
                except psutil.NoSuchProcess:
                    continue
            if found:
                victim = chance.choice(found)
                victim.send_signal(blow)
                if blow == signal.SIGSTOP:
                    victim.wait(REPLACED_S)  # it is noticed, killed and replaced
                done += 1
        code = run.wait()
        verified = subprocess.run([BIN / "asyncflow", "verify", run_dir], capture_output=True, text=True, check=False)
        groups = [line["group"] for line in LineReader(run_dir / "ledger.jsonl").read()]
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
    return len(LineReader(run_dir / "metrics.jsonl").read())


def _accuracy(run_dir: Path, setting: str, *, steps: int) -> float:
    settings = (setting, f"steps={steps}", f"evaluate.interval={steps}", "checkpoint.interval=0")
    roles = "rollout:1,actor:1,evaluate:1"
    command = [str(BIN / "asyncflow-launch"), "quickstart-tools", "--run-dir", str(run_dir), "--roles", roles]
    done = subprocess.run([*command, *_settings(settings)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = LineReader(run_dir / "evaluation.jsonl").read()
    return float(next(line["accuracy"] for line in lines if line["step"] == steps))


def _settings(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
