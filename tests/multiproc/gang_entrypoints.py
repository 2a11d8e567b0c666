"""What the workers of `test_gang` do. The fork server finds this file through PYTHONPATH.

Each entrypoint gets the run directory and the name of its gang, like `workers.roles.main:run_worker`.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from asyncflow.job import Job
from asyncflow.sealed_store import SealedStore, connect_store

DEADLINE_S = 300.0
SERVICES = ("controller", "storage")


def leave_at_once(run_dir: str, gang: str) -> None:
    """Exit 0, services when they are told."""
    if gang.startswith(SERVICES):
        obey_phase(run_dir, gang)
    print(f"{gang} was here, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    sys.stderr.write("and on stderr\n")


def raise_in_second_rollout(run_dir: str, gang: str) -> None:
    """`rollout-1` fails, with a thread that does not end; the others obey the phase."""
    if gang == "rollout-1":
        threading.Thread(target=_stuck).start()
        raise ValueError(f"no such token\n  in {gang}")
    obey_phase(run_dir, gang)


def raise_in_actor_rank_one(run_dir: str, gang: str) -> None:
    """Rank 1 of the actor fails while rank 0 is stuck."""
    if gang == "actor" and os.environ["RANK"] == "1":
        raise RuntimeError("loss is not finite")
    if gang == "actor":
        _stuck()
    obey_phase(run_dir, gang)


def fail_on_a_full_disk(run_dir: str, gang: str) -> None:
    """`rollout-0` fails and cannot write down why."""
    if gang == "rollout-0":
        _store(run_dir).set("left/rollout-0/0", "error: OSError: no space\nleft")
        os._exit(1)
    obey_phase(run_dir, gang)


def exit_without_finishing(run_dir: str, gang: str) -> None:
    """The process is gone with code 0, but its function never returned."""
    if gang == "rollout-0":
        os._exit(0)
    obey_phase(run_dir, gang)


def die_as_storage(run_dir: str, gang: str) -> None:
    """The storage unit dies at each of its starts; the others obey the phase."""
    if gang == "storage-0":
        os.kill(os.getpid(), signal.SIGKILL)
    obey_phase(run_dir, gang)


def die_again_and_again(run_dir: str, gang: str) -> None:
    """`rollout-0` is killed as soon as all are at work, whenever it starts."""
    if gang == "rollout-0":
        store = _store(run_dir)
        _report(store, gang, "generating")
        deadline = time.monotonic() + DEADLINE_S
        while not all(store.check([f"status/{name}/0"]) for name in ("actor", "rollout-1", "controller", "storage-0")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(1.0)  # the launcher looks twice a second
        os.kill(os.getpid(), signal.SIGKILL)
    obey_phase(run_dir, gang)


def hang_once(run_dir: str, gang: str) -> None:
    """`rollout-0` works on something that does not end, the first time."""
    if gang == "rollout-0" and os.environ["ASYNCFLOW_ATTEMPT"] == "0":
        store = _store(run_dir)
        began = time.monotonic()
        while time.monotonic() < began + DEADLINE_S:
            _report(store, gang, "generating", idle_s=time.monotonic() - began)
            time.sleep(0.1)
    obey_phase(run_dir, gang)


def never_leave(run_dir: str, gang: str) -> None:
    """Say that work began and ignore everything."""
    _report(_store(run_dir), gang, "stuck")
    _stuck()


def save_slowly(run_dir: str, gang: str) -> None:
    """Told to stop, the actor saves until `saved` is there."""
    if gang != "actor":
        obey_phase(run_dir, gang)
        return
    store = _store(run_dir)
    _report(store, gang, "training")
    _until(lambda: store.check(["phase"]) and store.get("phase") == b"stop")
    _report(store, gang, "saving")
    _until((Path(run_dir) / "saved").exists)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def never_start(run_dir: str, gang: str) -> None:
    """The rollout stays silent."""
    if gang == "rollout-0":
        _stuck()
    obey_phase(run_dir, gang)


def train_to_the_end(run_dir: str, gang: str) -> None:
    """The actor finishes two steps, the others wait for it."""
    if gang != "actor":
        obey_phase(run_dir, gang)
        return
    store = _store(run_dir)
    _report(store, gang, "training")
    with (Path(run_dir) / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "lineage": 0, "reward_mean": step / 2}) + "\n")
    store.set("done", "1")


def obey_phase(run_dir: str, gang: str) -> None:
    """Say that work began; work gangs leave in `stop`, services in `exit`."""
    store = _store(run_dir)
    _report(store, gang, "waiting for the end")
    leave = {b"exit"} if gang.startswith(SERVICES) else {b"stop", b"exit"}
    deadline = time.monotonic() + DEADLINE_S
    while store.get("phase") not in leave:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def touch_torch(run_dir: str, gang: str) -> None:
    """Write down which modules this process had to import itself, and how it was set up."""
    before = set(sys.modules)
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    facts = {
        "imported": sorted(set(sys.modules) - before),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "sys_path": sys.path,
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "rank": os.environ["RANK"],
    }
    (Path(run_dir) / f"{gang}-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def _stuck() -> None:
    """Block where neither a Python signal handler nor an exception gets in."""
    ctypes.CDLL(None).sleep(int(DEADLINE_S))


def _store(run_dir: str) -> SealedStore:
    job = Job.load(Path(run_dir))
    client = connect_store(job.store_host, job.store_port, timedelta(seconds=30))
    return SealedStore(client, bytes.fromhex(job.secret))


def _report(store: SealedStore, gang: str, state: str, *, idle_s: float = 0.0) -> None:
    status = {"state": state, "step": 1, "version": 0, "time": time.time(), "pid": os.getpid(), "idle_s": idle_s}
    store.set(f"status/{gang}/{os.environ['RANK']}", json.dumps(status))
