"""`asyncflow doctor --device-check`: tries on this machine's devices, in about a minute, what the project's tests can
only try on a fake one. Its output is meant for AsyncFlow's authors, who lack the machine.

Every check is a `Check` of the doctor and runs in its child process. Several ranks are processes of `device_ranks`,
started by `started_ranks`.
"""

import contextlib
import importlib.metadata
import json
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.errors import size_text
from asyncflow.job import LOOPBACK
from launcher.doctor.doctor_child import Check
from launcher.doctor.findings import Finding, Needs, reason
from launcher.doctor.software import train, write_model

if TYPE_CHECKING:
    import torch


# Processes of `device_ranks`, one per device, started so that every wait has a deadline.

_MOST_RANKS = 8
_DEADLINE_S = 60.0
"""For all ranks together: a check ends after 90 s and must say by then which of them hang (s)."""
_LEAST_S = 1.0
"""For a rank whose answer may be there already, after the others took all the time (s)."""
_LONGEST = 200


def rank_devices(kind: str) -> list[str]:
    """Return a device for each rank: one each, eight at most; two ranks on the CPU."""
    import torch

    if kind == "cpu":
        return ["cpu", "cpu"]
    most = min(_MOST_RANKS, torch.accelerator.device_count(), max(2, os.cpu_count() or 2))
    return [f"{kind}:{index}" for index in range(most)]


@contextlib.contextmanager
def started_ranks(mode: str, devices: list[str]) -> Iterator[tuple[Any, Any]]:
    """Start a process per device.

    Yields their store, and a function that waits for them and returns each one's facts. Instead of facts it returns why
    there are none: the last line of errors of a rank that died, or that it hangs.
    """
    from asyncflow.sealed_store import serve_store

    store, port = serve_store(LOOPBACK, timedelta(seconds=_DEADLINE_S))
    command = [sys.executable, "-P", "-m", "launcher.doctor.device_ranks", mode]
    processes = [
        subprocess.Popen(
            [*command, device, str(rank), str(len(devices)), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]

    def finish() -> list[dict[str, Any] | str]:
        deadline = time.monotonic() + _DEADLINE_S
        return [_said(process, max(_LEAST_S, deadline - time.monotonic())) for process in processes]

    try:
        yield store, finish
    finally:
        for process in processes:
            with process:  # closes the pipes and reaps the process
                process.kill()


def _said(process: "subprocess.Popen[str]", timeout_s: float) -> dict[str, Any] | str:
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {_DEADLINE_S:g} s"
    if process.returncode == 0:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    last = (errors.splitlines() or [f"code {process.returncode}"])[-1]
    return last[:_LONGEST]


VERSIONS, CONTEXTS, COPIES, COLLECTIVES = "versions", "contexts", "host copies", "collectives"
DEAD, CONNECTING, UPDATE, SWAP, MEMORY = "dead receiver", "connecting", "update", "swap", "memory"
_PACKAGES = ("asyncflow-rl", "torch", "torch_npu", "transformers", "vllm", "vllm-ascend", "megatron-core", "mindspeed")
_COPIED = 2**26
_ROUNDS = 8
_TIMEOUT = timedelta(seconds=30)
_CLOSE = {"float32": 2e-3, "bfloat16": 2e-2}
"""Largest relative difference between the CPU and a device, by autocast type; TF32 is off."""
_ESTIMATED = 0.15


def check_versions(needs: Needs) -> list[Finding]:
    """List the versions of everything involved: other findings mean little without them."""
    import torch

    found = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    device = _open(needs)
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    names = [f"{count} x {_ask(device, 'get_device_name', 0) or device.type}"] if count else ["cpu"]
    for what, value in (("CUDA", torch.version.cuda), ("NCCL", _ask_nccl(device)), ("driver", _driver(device.type))):
        found += [f"{what} {value}"] if value else []
    return [
        Finding.ok(VERSIONS, "; ".join([*names, *found, f"Python {platform.python_version()}", platform.release()]))
    ]


def check_contexts(needs: Needs) -> list[Finding]:
    """Check that a process which uses the last device, also from threads, takes nothing of the first one."""
    import torch

    device = _open(needs)
    if device.type == "cpu" or torch.accelerator.device_count() < 2:
        return [Finding.ok(CONTEXTS, "there is one device, and no other that a process could touch by mistake")]
    last = f"{device.type}:{torch.accelerator.device_count() - 1}"
    with started_ranks(CONTEXTS, [last]) as (store, finish):
        before = _free(device)
        store.wait(["here"], _TIMEOUT)
        taken = None if before is None else before - (_free(device) or 0)
        store.set("looked", "1")
        finish()
    if taken is None:
        return [Finding.ok(CONTEXTS, f"a process used {last} from threads; {device.type} does not report free memory")]
    if taken > 2**26:
        text = f"a process that uses {last} took {size_text(taken)} of {device}"
        return [Finding.error(CONTEXTS, text, "send us this report: a thread uses a device that is not its own")]
    return [Finding.ok(CONTEXTS, f"a process that used {last} from threads took no memory of {device}")]


def check_copies(needs: Needs) -> list[Finding]:
    """Measure copies between host and device by kind of host memory, and compare what arrives with what was sent."""
    import numpy as np
    import torch

    from asyncflow.device import pin

    device = _open(needs)
    if device.type == "cpu":
        return [Finding.ok(COPIES, "none: models compute in the host's memory")]
    registered = torch.from_numpy(np.frombuffer(mmap.mmap(-1, _COPIED), dtype=np.uint8))
    release = pin(registered.data_ptr(), _COPIED, device, writable=True)
    hosts = {"pageable": torch.empty(_COPIED, dtype=torch.uint8)}
    hosts["page-locked by torch"] = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    hosts |= {"page-locked where it lies": registered} if release is not None else {}
    there = torch.arange(256, device=device).to(torch.uint8).repeat(_COPIED // 256)
    said, wrong = [], []
    for name, host in hosts.items():
        host.fill_(255)
        out = _seconds(partial(host.copy_, there, non_blocking=True))
        back = torch.empty_like(there)
        into = _seconds(partial(back.copy_, host, non_blocking=True))
        wrong += [] if torch.equal(back, there) else [name]
        said.append(f"{name} {_COPIED / out / 1e9:.1f} out {_COPIED / into / 1e9:.1f} in")
    if release is not None:
        release()
    if wrong:
        return [
            Finding.error(
                COPIES, f"other bytes came back through memory that is {' and '.join(wrong)}", "send us this report"
            )
        ]
    findings = [Finding.ok(COPIES, f"GB/s: {', '.join(said)}")]
    if release is None and needs.device == "cuda":
        findings.append(Finding.warning(COPIES, "shared memory cannot be page-locked", "ulimit -l unlimited"))
    return findings


def check_collectives(needs: Needs) -> list[Finding]:
    """Try each collective that training uses, over Gloo and the devices' backend in one default group."""
    names = rank_devices(needs.device)
    with started_ranks(COLLECTIVES, names) as (_, finish):
        said = finish()
    found = [one for one in said if not isinstance(one, str)]
    if len(found) < len(names):
        last = next(one for one in said if isinstance(one, str))
        text = f"{len(names) - len(found)} of {len(names)} ranks did not answer ({last})"
        return [Finding.error(COLLECTIVES, text, "send us this report")]
    failed = {name: value for each in found for name, value in each.items() if isinstance(value, str)}
    fine = [f"{name} {max(each[name] for each in found) * 1e3:.1f}" for name in found[0] if name not in failed]
    text = f"{len(names)} ranks, ms of {size_text(2**24)}: {', '.join(fine)}"
    findings = [Finding.ok(COLLECTIVES, text)] if fine else []
    for name, error in failed.items():
        users = "Megatron's context and pipeline parallelism use it" if "all_to" in name or "send" in name else "FSDP"
        findings.append(Finding.error(COLLECTIVES, f"{name} ({users}): {error}", "send us this report"))
    return findings


def check_dead_receiver(needs: Needs) -> list[Finding]:
    """Check that when a receiver dies between two weight broadcasts, the sender gets an error in time and survives."""
    names = rank_devices(needs.device)[:2]
    if len(names) < 2:
        return [Finding.ok(DEAD, "there is one device; this needs two")]
    with started_ranks(DEAD, names) as (_, finish):
        one = finish()[0]
    if isinstance(one, str):
        text = f"the sender died with its receiver ({one})"
        return [Finding.error(DEAD, text, "use weightsync.path=staged; send this report")]
    if not one["error"] or not one["computed"]:
        what = "noticed nothing" if not one["error"] else "could not compute afterwards"
        return [Finding.error(DEAD, f"the sender {what} ({one})", "use weightsync.path=staged; send this report")]
    text = f"the sender noticed after {one['seconds']:.1f} s ({one['error']}), and still computes"
    if one["aborted"]:
        return [Finding.ok(DEAD, text)]
    return [Finding.warning(DEAD, f"{text}; but its group cannot be aborted", "send this report")]


def check_connecting(needs: Needs) -> list[Finding]:
    """Check whether another thread can abort a connection attempt to a receiver that never connects.

    If it can, `connect_group` should do so.
    """
    names = rank_devices(needs.device)[:2]
    if needs.device != "cuda" or len(names) < 2:
        return [Finding.ok(CONNECTING, "not tried: it is a setting of NCCL's, and needs two devices")]
    with started_ranks(CONNECTING, names) as (_, finish):
        one = finish()[0]
    if isinstance(one, str):
        return [Finding.warning(CONNECTING, f"with blocking=0 the process ended ({one})", "send this report")]
    if one["early"]:
        return [Finding.warning(CONNECTING, f"with blocking=0 nothing was waited for ({one})", "send this report")]
    ended = "hung" if one["hung"] else "ended"
    return [Finding.ok(CONNECTING, f"with blocking=0 a connection that was aborted {ended} ({one['seconds']:.1f} s)")]


def check_update(needs: Needs) -> list[Finding]:
    """Check that two updates of the quickstart model have the CPU's gradient norms, in each autocast type."""
    import torch

    device, said, wrong = _open(needs), [], False
    with default_group(device):
        for autocast, close in _CLOSE.items():
            _, expected, _ = _updates(torch.device("cpu"), autocast)
            _, norms, seconds = _updates(device, autocast)
            apart = max(abs(one / other - 1) for one, other in zip(expected, norms, strict=True))
            said.append(f"{autocast}: two updates in {seconds:.2f} s, gradient norms {apart:.1e} from the CPU's")
            wrong |= not apart <= close  # also true for NaN
    if wrong:
        return [Finding.error(UPDATE, "; ".join(said), "the device computes something else; send this report")]
    return [Finding.ok(UPDATE, "; ".join(said))]


def check_swap(needs: Needs) -> list[Finding]:
    """Check that weights pass from a trainer's device through shared memory into an engine that generates with them."""
    import torch

    from asyncflow.timeline import NoTimeline
    from weightsync.plan import match_needs, plan_transfer
    from weightsync.sender import ShardCopies, ShardWriter, describe
    from weightsync.slot_memory import Region, SlotMemory, map_slot
    from weightsync.version import Version
    from workers.engines.base import GenerateRequest, generate
    from workers.engines.hf.engine import HfEngine
    from workers.rows.packed_rows import Sequences
    from workers.settings.rollout import SamplingConfig
    from workers.settings.run import ModelConfig

    device, model = _open(needs), _quickstart()
    with default_group(device):
        engine, _, _ = _updates(device)
        plan = plan_transfer([describe(engine.shards())], bucket_bytes=2**20, dtype="float32")
        memory = SlotMemory(plan.region_bytes)
        slot = map_slot(memory.offer, write=True)
        writer = ShardWriter(plan, 0)
        copies = ShardCopies(writer, device=device, timeline=NoTimeline())
        began = time.monotonic()
        copies.run(Version(0, 1), writer.target(slot), list(engine.shards()))
        copies.wait()
        sampling = SamplingConfig.model_validate({"max_response_tokens": 8, "batch_size": 8})
        hf = HfEngine(model, ModelConfig(path=str(model), dtype="float32"), sampling=sampling, device=device)
        views = Region(slot, writer.layout).views(match_needs(plan, hf.weight_needs()))
        hf.load_weights(views)
        seconds = time.monotonic() - began
        prompt = torch.arange(3, 8)
        drawn = list(generate(hf, [GenerateRequest(row, prompt, seed=row, ticket=row) for row in range(8)]))
        ours = engine.log_probs(Sequences.of([prompt] * 8, [one.response_R for one in drawn])).cpu()
        apart = float((ours - torch.cat([one.log_probs_R for one in drawn])).abs().max())
        copies.close()
    text = f"a version in {seconds:.2f} s; the generating engine's log-probabilities are {apart:.1e} from the trainer's"
    if not apart < _CLOSE["float32"]:
        return [Finding.error(SWAP, text, "weights are lost on their way; send this report")]
    return [Finding.ok(SWAP, text)]


def check_memory(needs: Needs) -> list[Finding]:
    """Compare the peak memory of training a model with the estimate by which `--dry-run` refuses."""
    import torch

    device = _open(needs)
    if device.type == "cpu":
        return [Finding.ok(MEMORY, "not measured on the CPU")]
    module: Any = torch.get_device_module(device)
    with tempfile.TemporaryDirectory() as place, default_group(device):
        sizes = write_model(Path(place), large=(_free(device) or 0) > 16e9)
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        estimated = sum(train(Path(place), sizes, device, 1, autocast="bfloat16").values())
        held = module.max_memory_allocated() - before
    text = f"{size_text(held)} at most, {size_text(estimated)} estimated ({estimated / held - 1:+.0%})"
    if abs(estimated / held - 1) > _ESTIMATED:
        return [Finding.warning(MEMORY, text, "send us this report: --dry-run refuses by this estimate")]
    return [Finding.ok(MEMORY, text)]


def _updates(device: "torch.device", autocast: str = "float32") -> tuple[Any, list[float], float]:
    """Return an engine after two updates on responses to one prompt, the gradient norms, and the seconds of both."""
    import torch

    from workers.engines.fsdp.sharding import FsdpEngine
    from workers.rows.packed_rows import Sequences
    from workers.settings.engines import ActorConfig

    # In bfloat16 the engine takes the attention kernel of accelerators, and computes the shared prompt once.
    actor = ActorConfig.model_validate({"lr": 1e-3, "autocast": autocast})
    engine = FsdpEngine(_quickstart(), actor=actor, temperature=1.0, device=device, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 12, (8, 24), generator=generator)
    batch = Sequences.of([tokens[0, :8]] * 8, list(tokens[:, 8:]))
    norms, began = [], time.monotonic()
    for _ in range(2):
        engine.forward_backward(batch, lambda log_probs, _: -log_probs.sum())
        norms.append(engine.step(1 / 128).grad_norm)
    return engine, norms, time.monotonic() - began


def _quickstart() -> Path:
    from launcher.config.paths import find_recipe

    return find_recipe(None).parent / "quickstart" / "model"


def _open(needs: Needs) -> "torch.device":
    from asyncflow.device import open_device

    return open_device(needs.device if needs.device == "cpu" else f"{needs.device}:0")


@contextlib.contextmanager
def default_group(device: "torch.device") -> Iterator[None]:
    """Provide a default group of this process alone."""
    import torch.distributed as dist

    from asyncflow.device import group_backends

    dist.init_process_group(group_backends(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seconds(copy: Callable[[], object]) -> float:
    """Return the shortest time of a copy, including the wait for it."""
    import torch

    took = []
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize()
        began = time.monotonic()
        copy()
        torch.accelerator.synchronize()
        took.append(time.monotonic() - began)
    return min(took)


def _free(device: "torch.device") -> int | None:
    import torch

    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ask(device: "torch.device", name: str, *given: Any) -> str:
    import torch

    try:
        return str(getattr(torch.get_device_module(device), name)(*given))
    except (AttributeError, RuntimeError):
        return ""


def _ask_nccl(device: "torch.device") -> str:
    import torch

    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version())) if device.type == "cuda" else ""


def _driver(kind: str) -> str:
    """Return the driver's version as the vendor's tool reports it; empty: no such tool is known."""
    command = {
        "cuda": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "npu": ["npu-smi", "-v"],
    }.get(kind)
    if command is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return " ".join(done.stdout.split())[:80]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({reason(error)})"


REGISTRY = "launcher.doctor.device_check:CHECKS"
_HANGS = "send us this report, with what `py-spy dump --pid` says of the process that hangs"
CHECKS = (
    Check(VERSIONS, check_versions, 60, _HANGS),
    Check(CONTEXTS, check_contexts, 120, _HANGS),
    Check(COPIES, check_copies, 60, _HANGS),
    Check(COLLECTIVES, check_collectives, 90, _HANGS),
    Check(DEAD, check_dead_receiver, 90, _HANGS),
    Check(CONNECTING, check_connecting, 90, _HANGS),
    Check(UPDATE, check_update, 60, _HANGS),
    Check(SWAP, check_swap, 60, _HANGS),
    Check(MEMORY, check_memory, 90, _HANGS),
)
"""In the order in which they run."""
