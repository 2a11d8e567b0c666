"""`asyncflow doctor --device-check`: tries on this machine's devices, in about a minute, what the project's tests can
only try on a fake one. Its output is meant for AsyncFlow's authors, who lack the machine.

Checks like the doctor's others, in its child process. Several ranks are processes of `workers.calls`, which call
`device_ranks`.
"""

import contextlib
import json
import mmap
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.errors import UserCodeFailed, size_text
from asyncflow.job import LOOPBACK
from asyncflow.vendors import vendor_of
from launcher.doctor.findings import Facts, MachineCheck, Needs, Size, error, fatal, ok, reason, warning
from launcher.doctor.software import installed
from workers.calls.child_process import START_TIMEOUT_S
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee
from workers.engines.device_memory import ModelSizes, Parts, fsdp_memory

if TYPE_CHECKING:
    import torch

    from workers.rows.packed_rows import Sequences

_MOST_RANKS = 8
_DEADLINE_S = START_TIMEOUT_S
"""For each rank, which imports torch first: a check ends later, and must say by then which of them hang (s)."""


def rank_devices(kind: str) -> list[str]:
    """Return a device for each rank: one each, eight at most; two ranks on the CPU."""
    import torch

    if kind == "cpu":
        return ["cpu", "cpu"]
    most = min(_MOST_RANKS, torch.accelerator.device_count(), max(2, os.cpu_count() or 2))
    return [f"{kind}:{index}" for index in range(most)]


@contextlib.contextmanager
def started_ranks(mode: str, devices: list[str]) -> Iterator[tuple[Any, Callable[[], list[dict[str, Any] | str]]]]:
    """Call a function of `device_ranks` in a process per device.

    Yields their store, and a function that waits for them and returns each one's facts, or why there are none.
    """
    from asyncflow.sealed_store import serve_store

    store, port = serve_store(LOOPBACK, timedelta(seconds=_DEADLINE_S))
    pool = CallPool(
        Entry("launcher.doctor.device_check:rank"),
        what=mode, limit="the deadline", timeout_s=_DEADLINE_S, concurrency=len(devices),
    )  # fmt: skip
    try:
        calls = [
            pool.submit(mode, device, rank, len(devices), port, on=f"rank {rank}")
            for rank, device in enumerate(devices)
        ]
        yield store, lambda: [_told(call) for call in calls]
    finally:
        pool.close()


def rank() -> Callee:
    """Entry of `workers.calls`; imports torch in the call, so that all ranks do it at the same time."""

    def call(*arguments: Any) -> dict[str, Any]:
        from launcher.doctor.device_ranks import act_as_rank

        return act_as_rank(*arguments)

    return Callee(call)


def _told(call: "Future[Any]") -> dict[str, Any] | str:
    try:
        facts: dict[str, Any] = call.result()
    except UserCodeFailed as failed:
        return str(failed)
    return facts


VERSIONS, CONTEXTS, COPIES, COLLECTIVES = "versions", "contexts", "host copies", "collectives"
DEAD, UPDATE, SWAP, HANDOVER, MEMORY = "dead receiver", "update", "swap", "handover", "memory"
_PACKAGES = ("asyncflow-rl", "torch", "torch_npu", "transformers", "vllm", "vllm-ascend", "megatron-core", "mindspeed")
_COPIED = 2**26
_ROUNDS = 8
_CLOSE = {"float32": 2e-3, "bfloat16": 2e-2}
"""Largest relative difference between the CPU and a device, by autocast type; TF32 is off."""
_ESTIMATED = 0.15


def list_versions(needs: Needs) -> Facts:
    """List the versions of everything involved: other findings mean little without them."""
    import torch

    found = [f"{name} {version}" for name in _PACKAGES if (version := installed(name))]
    device = _open(needs)
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    names = [f"{count} x {_ask(device, 'get_device_name', 0) or device.type}"] if count else ["cpu"]
    for what, value in (("CUDA", torch.version.cuda), ("NCCL", _ask_nccl(device)), ("driver", _driver(device.type))):
        found += [f"{what} {value}"] if value else []
    return {"said": "; ".join([*names, *found, f"Python {platform.python_version()}", platform.release()])}


def use_from_threads(needs: Needs) -> Facts:
    """Let a process use the last device, also from threads, and see what it takes of the first one."""
    import torch

    device = _open(needs)
    if device.type == "cpu" or torch.accelerator.device_count() < 2:
        return {"taken": 0, "said": "there is one device, and no other that a process could touch by mistake"}
    last = f"{device.type}:{torch.accelerator.device_count() - 1}"
    with started_ranks(CONTEXTS, [last]) as (store, finish):
        before = _free(device)
        store.wait(["here"], timedelta(seconds=_DEADLINE_S))
        taken = None if before is None else before - (_free(device) or 0)
        store.set("looked", "1")
        finish()
    silent = f"a process used {last} from threads; {device.type} does not report free memory"
    said = silent if taken is None else f"a process that used {last} from threads took no memory of {device}"
    return {"taken": Size(taken or 0), "last": last, "first": device, "said": said}


def measure_copies(needs: Needs) -> Facts:
    """Measure copies between host and device by kind of host memory, and compare what arrives with what was sent."""
    import numpy as np
    import torch

    from asyncflow.device import pin

    device = _open(needs)
    if device.type == "cpu":
        return {"wrong": "", "said": "none: models compute in the host's memory", "locked": True}
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
    return {"wrong": " and ".join(wrong), "said": f"GB/s: {', '.join(said)}", "locked": release is not None}


def try_collectives(needs: Needs) -> Facts:
    """Try each collective that training uses, over Gloo and the devices' backend in one default group."""
    names = rank_devices(needs.device)
    with started_ranks(COLLECTIVES, names) as (_, finish):
        said = finish()
    found = [one for one in said if not isinstance(one, str)]
    facts = {"ranks": len(names), "missing": len(names) - len(found), "size": Size(2**24), "failed": [], "fine": ""}
    if len(found) < len(names):
        return {**facts, "last": next(one for one in said if isinstance(one, str))}
    failed = {name: value for each in found for name, value in each.items() if isinstance(value, str)}
    fine = [f"{name} {max(each[name] for each in found) * 1e3:.1f}" for name in found[0] if name not in failed]
    megatron = "Megatron's context and pipeline parallelism use it"
    users = {name: megatron if "all_to" in name or "send" in name else "FSDP" for name in failed}
    wrong = [{"name": name, "users": users[name], "why": why} for name, why in failed.items()]
    return {**facts, "fine": ", ".join(fine), "failed": wrong}


def kill_receiver(needs: Needs) -> Facts:
    """See whether the sender gets an error in time, and survives, when a receiver dies between two broadcasts."""
    names = rank_devices(needs.device)[:2]
    if len(names) < 2:
        return {"died": "", "what": "", "stuck": False, "said": "there is one device; this needs two"}
    with started_ranks(DEAD, names) as (_, finish):
        one = finish()[0]
    if isinstance(one, str):
        return {"died": one}
    what = "noticed nothing" if not one["error"] else "" if one["computed"] else "could not compute afterwards"
    said = f"the sender noticed after {one['seconds']:.1f} s ({one['error']}), and still computes"
    return {"died": "", "what": what, "one": one, "stuck": not one["aborted"], "said": said}


def compare_updates(needs: Needs) -> Facts:
    """Compare the gradient norms of two updates of the quickstart's model with the CPU's, in each autocast type."""
    import torch

    device, said, wrong = _open(needs), [], False
    with default_group(device):
        for autocast, close in _CLOSE.items():
            _, expected, _ = _updates(torch.device("cpu"), autocast)
            _, norms, seconds = _updates(device, autocast)
            apart = max(abs(one / other - 1) for one, other in zip(expected, norms, strict=True))
            said.append(f"{autocast}: two updates in {seconds:.2f} s, gradient norms {apart:.1e} from the CPU's")
            wrong |= not apart <= close  # also true for NaN
    return {"wrong": wrong, "said": "; ".join(said)}


def swap_weights(needs: Needs) -> Facts:
    """Pass weights from a trainer's device through shared memory into an engine that generates with them."""
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
        copies.start_copies(Version(0, 1), writer.target(slot), list(engine.shards()))
        copies.wait()
        sampling = SamplingConfig.model_validate({"max_response_tokens": 8, "batch_size": 8})
        hf = HfEngine(model, ModelConfig(path=str(model), dtype="float32"), sampling=sampling, device=device)
        views = Region(slot, writer.layout).view_matched(match_needs(plan, hf.weight_needs()))
        hf.load_weights(views)
        seconds = time.monotonic() - began
        prompt = torch.arange(3, 8)
        drawn = list(generate(hf, [GenerateRequest(row, prompt, seed=row, ticket=row) for row in range(8)]))
        ours = engine.log_probs(Sequences.from_turns([prompt] * 8, [one.response_R for one in drawn])).cpu()
        apart = float((ours - torch.cat([one.log_probs_R for one in drawn])).abs().max())
        copies.close()
    engines = "the generating engine's log-probabilities are"
    return {"apart": apart, "said": f"a version in {seconds:.2f} s; {engines} {apart:.1e} from the trainer's"}


def hand_over(needs: Needs) -> Facts:
    """Read memory that other processes exported, on each rank's device: the way of weights in colocated runs."""
    facts: dict[str, Any] = {"missing": 0, "wrong": 0, "refused": ""}
    if not vendor_of(needs.device).has_ipc:
        return facts | {"said": f"{needs.device}: colocated weights go through shared memory"}
    names = rank_devices(needs.device)
    names = names * 2 if len(names) == 1 else names  # two processes of one device are what colocated roles are
    with started_ranks(HANDOVER, names) as (_, finish):
        told = finish()
    found = [each for one in told if not isinstance(one, str) for each in one.values()]
    lost = [one for one in told if isinstance(one, str)]
    rates = [each["gb_s"] for each in found if "gb_s" in each]
    said = (
        f"{len(names)} ranks read other processes' memory, {min(rates):.1f} to {max(rates):.1f} GB/s" if rates else ""
    )
    return facts | {
        "missing": len(lost), "ranks": len(names), "last": lost[0] if lost else "", "said": said,
        "wrong": sum(each.get("wrong", 0) for each in found),
        "refused": "; ".join(sorted({each["refused"] for each in found if "refused" in each})),
    }  # fmt: skip


def measure_memory(needs: Needs) -> Facts:
    """Compare the peak memory of training a model with the estimate by which `--dry-run` refuses."""
    import torch

    device = _open(needs)
    if device.type == "cpu":
        return {"apart": 0.0, "said": "not measured on the CPU"}
    module: Any = torch.get_device_module(device)
    with tempfile.TemporaryDirectory() as place, default_group(device):
        sizes = write_model(Path(place), large=(_free(device) or 0) > 16e9)
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        estimated = sum(train(Path(place), sizes, device, 1, autocast="bfloat16").values())
        held = module.max_memory_allocated() - before
    apart = estimated / held - 1
    return {"apart": apart, "said": f"{size_text(held)} at most, {size_text(estimated)} estimated ({apart:+.0%})"}


_HANGS = "send us this report, with what `py-spy dump --pid` says of the process that hangs"
_SEND, _STAGED = "send us this report", "use weightsync.path=staged; send this report"
_INSTEAD = "colocated runs take such weights from shared memory"
CHECKS = (
    MachineCheck(VERSIONS, list_versions, (), "{said}", 120, _HANGS),
    MachineCheck(CONTEXTS, use_from_threads, (
        error(lambda f: f.taken > 2**26, "a process that uses {last} took {taken} of {first}",
              f"{_SEND}: a thread uses a device that is not its own"),
    ), "{said}", 240, _HANGS),
    MachineCheck(COPIES, measure_copies, (
        fatal("wrong", "other bytes came back through memory that is {wrong}", _SEND),
        ok("said", "{said}"),
        warning(lambda f: f.device == "cuda" and not f.locked, "shared memory cannot be page-locked",
                "ulimit -l unlimited"),
    ), "{said}", 120, _HANGS),
    MachineCheck(COLLECTIVES, try_collectives, (
        fatal("missing", "{missing} of {ranks} ranks did not answer ({last})", _SEND),
        ok("fine", "{ranks} ranks, ms of {size}: {fine}"),
        error("failed", "{name} ({users}): {why}", _SEND),
    ), "{fine}", 180, _HANGS),
    MachineCheck(DEAD, kill_receiver, (
        fatal("died", "the sender died with its receiver ({died})", _STAGED),
        fatal("what", "the sender {what} ({one})", _STAGED),
        warning("stuck", "{said}; but its group cannot be aborted", "send this report"),
    ), "{said}", 180, _HANGS),
    MachineCheck(UPDATE, compare_updates, (
        error("wrong", "{said}", "the device computes something else; send this report"),
    ), "{said}", 120, _HANGS),
    MachineCheck(SWAP, swap_weights, (
        error(lambda f: not f.apart < _CLOSE["float32"], "{said}", "weights are lost on their way; send this report"),
    ), "{said}", 120, _HANGS),
    MachineCheck(HANDOVER, hand_over, (
        fatal("missing", "{missing} of {ranks} ranks did not answer ({last})", _SEND),
        error("wrong", "{wrong} numbers came out wrong", f"{_SEND}: {_INSTEAD}"),
        warning("refused", "{refused}", f"{_SEND}: {_INSTEAD}"),
        ok("said", "{said}"),
    ), "{said}", 180, _HANGS),
    MachineCheck(MEMORY, measure_memory, (
        warning(lambda f: abs(f.apart) > _ESTIMATED, "{said}", f"{_SEND}: --dry-run refuses by this estimate"),
    ), "{said}", 180, _HANGS),
)  # fmt: skip
"""In the order in which they run."""


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
    batch = Sequences.from_turns([tokens[0, :8]] * 8, list(tokens[:, 8:]))
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
    except (OSError, subprocess.TimeoutExpired) as raised:
        return f"unknown ({reason(raised)})"


# A model with random weights that trains for a moment, to compare its memory with the estimate of device memory.
#
# Its proportions are those that matter: the head's tiles are full, and activations weigh as much as the state. Used
# by the check `memory` and by the project's tests.

SAMPLES, PROMPT, RESPONSE = 24, 16, 72
TOKENS = SAMPLES * (PROMPT + RESPONSE)
"""Tokens of a micro-batch."""
_LARGE = 4
"""Factor on the model's widths on a real device."""


def write_model(path: Path, *, large: bool = False) -> ModelSizes:
    """Write a Hugging Face directory of about 15 million parameters, or 150 million if large."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    factor = _LARGE if large else 1
    config = Qwen2Config(
        vocab_size=24576, hidden_size=256 * factor, intermediate_size=1024 * factor, num_hidden_layers=8,
        num_attention_heads=4 * factor, num_key_value_heads=2 * factor, tie_word_embeddings=True, eos_token_id=1,
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = ModelSizes.from_config(json.loads((path / "config.json").read_text()), parameters)
    assert sizes is not None
    return sizes


def random_batch() -> "Sequences":
    import torch

    from workers.rows.packed_rows import Sequences

    tokens_NT = torch.randint(2, 1000, (SAMPLES, PROMPT + RESPONSE))
    return Sequences.from_turns(list(tokens_NT[:, :PROMPT]), list(tokens_NT[:, PROMPT:]))


def train(path: Path, sizes: ModelSizes, device: "torch.device", num_ranks: int, **settings: Any) -> Parts:
    """Run two updates of two micro-batches each, in an existing default group of `num_ranks`. Return the estimate.

    `settings` are those of `actor`.
    """
    from workers.engines.fsdp.sharding import FsdpEngine
    from workers.settings.engines import ActorConfig

    actor = ActorConfig.model_validate(settings)
    engine = FsdpEngine(path, actor=actor, temperature=1.0, device=device, seed=0)
    for _ in range(2):
        for _ in range(2):
            engine.forward_backward(random_batch(), lambda log_probs, entropy: (log_probs - entropy.detach()).sum())
        engine.step(0.001)
    return fsdp_memory(sizes, actor, num_ranks, TOKENS)
