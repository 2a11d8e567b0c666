"""Checks of software: installed packages and their versions, libraries of the run's engines and, inside a Slurm job,
the tools with which a preempted run requeues itself.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.extras import DISTRIBUTION, is_installed
from launcher.checks.models import install
from launcher.doctor.findings import Finding, Needs, reason
from workers.engines.device_memory import ModelSizes, Parts, fsdp_memory

if TYPE_CHECKING:
    import torch

    from workers.rows.packed_rows import Sequences


PACKAGES, ENGINES, SLURM = "packages", "engines", "slurm"
_OWN_NAMES = ("asyncflow", "launcher", "workers", "tq", "weightsync", "configs")
_ANSWER_S = 8.0
_SLURM_TOOLS = ("sbatch", "srun", "scontrol")


@dataclass(frozen=True)
class Library:
    """A library of engines; importing `module` shows whether it works."""

    module: str
    install: str


_TRANSFORMERS = Library("transformers.models.auto.modeling_auto", "pip install 'transformers>=5.16,<6'")
_FSDP = Library("torch.distributed.fsdp", "pip install 'torch>=2.10'")
_VLLM = Library("vllm", install("vllm", "cuda"))
_VLLM_CPU = Library("vllm", install("vllm", "cpu"))
_HTTPX = Library("httpx2", install("openai", "cpu"))
_VLLM_ASCEND = Library("vllm_ascend", install("vllm", "npu"))
_MEGATRON = Library("megatron.core", install("megatron", "cuda"))
_MINDSPEED = Library("mindspeed", "pip install git+https://github.com/Ascend/MindSpeed (PyPI's is a placeholder)")
_TORCH_NPU = Library("torch_npu", "pip install torch==2.10.0 torch-npu==2.10.0")

_OF_ENGINE = {
    "hf": (_TRANSFORMERS,),
    "fsdp": (_FSDP, _TRANSFORMERS),
    "vllm": (_VLLM,),
    "openai": (_HTTPX,),
    "megatron": (_MEGATRON,),
}
_ON_NPU = {"vllm": (_VLLM_ASCEND,), "megatron": (_MINDSPEED,)}
_OPTIONAL = {"cuda": (_VLLM, _MEGATRON), "npu": (_VLLM, _VLLM_ASCEND, _MEGATRON, _MINDSPEED)}
"""Device -> libraries that other engines would need."""


@dataclass(frozen=True)
class PackageFacts:
    """Installed packages.

    Attributes:
        requirements: from AsyncFlow's own metadata, as `name specifier`; None: it is not installed as a package.
        installed: each required package, `torch` and `torch-npu` -> version; None: not installed.
        foreign: AsyncFlow's import names that lead elsewhere -> where.
        cann: whether the environment of Ascend's toolkit is set.
    """

    python: str
    requirements: tuple[str, ...] | None
    installed: dict[str, str | None]
    foreign: dict[str, str]
    cann: bool


@dataclass(frozen=True)
class EngineFacts:
    """Results of importing libraries.

    Attributes:
        errors: module -> why it cannot be imported; empty: it can.
        seconds: for all imports together.
        installed, absent: optional modules, found or not without importing them.
    """

    errors: dict[str, str]
    seconds: float = 0.0
    installed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm says about this host and job.

    Attributes:
        job: its number; empty: this is not a job.
        job_text: output of `scontrol show job`; empty: it was not asked, or failed (`error`).
    """

    job: str
    tools: tuple[str, ...]
    job_text: str = ""
    error: str = ""


def check_packages(needs: Needs) -> list[Finding]:
    """Compare the installed packages with the requirements."""
    if importlib.util.find_spec("packaging") is None:
        text = "packaging is not installed, so versions cannot be compared"
        return [Finding.error(PACKAGES, text, "pip install -e . in AsyncFlow's clone, which brings all that it needs")]
    return judge_packages(read_packages(needs), needs)


def read_packages(needs: Needs) -> PackageFacts:
    """Read the metadata of installed packages without importing them."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        texts = None
    requirements = None
    if texts is not None:
        parsed = [Requirement(text) for text in texts]
        wanted = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
        requirements = tuple(f"{each.name} {each.specifier}" for each in wanted)
    names = {text.split(" ", 1)[0] for text in requirements or ()} | {"torch", "torch-npu"}
    cann = any(os.environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"))
    return PackageFacts(
        platform.python_version(), requirements, {name: _version(name) for name in names}, _foreign(), cann
    )


def judge_packages(facts: PackageFacts, needs: Needs) -> list[Finding]:
    findings = []
    for name, place in facts.foreign.items():
        remedy = f"remove what is in the way: pip uninstall the distribution that owns {place}, or correct PYTHONPATH"
        findings.append(Finding.error(PACKAGES, f"`import {name}` finds {place}, not AsyncFlow's", remedy))
    if facts.requirements is None:
        text = f"{DISTRIBUTION} is not installed, so its requirements are unknown"
        findings.append(Finding.warning(PACKAGES, text, "pip install -e . in AsyncFlow's clone"))
    findings += [found for text in facts.requirements or () if (found := _judge_one(text, facts)) is not None]
    if needs.device == "npu":
        findings += _judge_npu(facts)
    if not findings:
        many = len(facts.requirements or ())
        text = f"Python {facts.python}, torch {facts.installed['torch']}, all {many} required packages fit"
        findings.append(Finding.ok(PACKAGES, text))
    return findings


def needed_libraries(needs: Needs) -> tuple[Library, ...]:
    """Return the libraries that the run's engines need on this device, without duplicates."""
    libraries = [library for engine in needs.engines for library in _OF_ENGINE.get(engine, ())]
    if needs.device == "cpu":  # vLLM has a build of its own for CPUs
        libraries = [_VLLM_CPU if library is _VLLM else library for library in libraries]
    if needs.device == "npu":
        libraries += [_TORCH_NPU, *(library for engine in needs.engines for library in _ON_NPU.get(engine, ()))]
    return tuple(dict.fromkeys(libraries))


def import_engines(needs: Needs) -> EngineFacts:
    """Import the needed libraries, and look for the optional ones."""
    began = time.monotonic()
    needed = [library.module for library in needed_libraries(needs)]
    errors = {module: _import_error(module) for module in needed}
    optional = [library.module for library in _OPTIONAL.get(needs.device, ()) if library.module not in needed]
    there = tuple(module for module in optional if is_installed(module))
    absent = tuple(module for module in optional if module not in there)
    return EngineFacts(errors, time.monotonic() - began, there, absent)


def judge_engines(facts: EngineFacts, needs: Needs) -> list[Finding]:
    install = {library.module: library.install for library in needed_libraries(needs)}
    findings = [
        Finding.error(ENGINES, f"{module} cannot be imported ({error})", install[module])
        for module, error in facts.errors.items()
        if error
    ]
    if findings:
        return findings
    names = " ".join(needs.engines)
    others = [f"{module} is there" for module in facts.installed] + [f"no {module}" for module in facts.absent]
    extra = f"; for other engines: {', '.join(others)}" if others else ""
    imported = f", {' '.join(facts.errors)} imported in {facts.seconds:.1f} s" if facts.errors else ""
    return [Finding.ok(ENGINES, f"{names}{imported}{extra}")]


def nodes_of_job(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of the surrounding Slurm job; 1 if there is none."""
    text = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    return max(1, int(text)) if text.isdigit() else 1


def ask_slurm(needs: Needs, env: Mapping[str, str] = os.environ) -> SlurmFacts:
    """Look for Slurm's tools, and inside a job ask about it."""
    job = env.get("SLURM_JOB_ID", "")
    paths = {name: path for name in _SLURM_TOOLS if (path := shutil.which(name, path=env.get("PATH")))}
    tools = tuple(paths)
    if not job or "scontrol" not in paths:
        return SlurmFacts(job, tools)
    command = [paths["scontrol"], "show", "job", "--oneliner", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return SlurmFacts(job, tools, error=reason(error))
    return SlurmFacts(job, tools, done.stdout.strip(), "" if done.returncode == 0 else done.stderr.strip())


def judge_slurm(facts: SlurmFacts, needs: Needs) -> list[Finding]:
    """Report what would keep the job from being requeued."""
    if not facts.job:
        there = f"not inside a job, found {' '.join(facts.tools)}" if facts.tools else "not inside a job"
        return [Finding.ok(SLURM, there)]
    job = f"job {facts.job}"
    if "scontrol" not in facts.tools:
        text = f"{job}: scontrol is not on PATH, so a run that is preempted cannot requeue itself"
        remedy = "add Slurm's bin directory to PATH; in a container, mount it and its munge socket"
        return [Finding.warning(SLURM, text, remedy)]
    if facts.error or not facts.job_text:
        text = f"{job}: scontrol does not show it ({' '.join(facts.error.split()) or 'no such job'})"
        return [Finding.warning(SLURM, text, f"scontrol show job {facts.job}; does munge run on this node?")]
    if "Requeue=0" in facts.job_text.split():
        text = f"{job} was submitted without --requeue, so Slurm does not start it again when a node fails"
        remedy = f"scontrol update JobId={facts.job} Requeue=1; next time #SBATCH --requeue"
        return [Finding.warning(SLURM, text, remedy)]
    return [Finding.ok(SLURM, f"{job} can be requeued")]


def _judge_one(requirement: str, facts: PackageFacts) -> Finding | None:
    from packaging.specifiers import SpecifierSet

    name, specifier = requirement.split(" ", 1)
    installed = facts.installed[name]
    remedy = f"pip install '{name}{specifier}'"
    if installed is None:
        return Finding.error(PACKAGES, f"{name} is not installed", remedy)
    if SpecifierSet(specifier).contains(installed, prereleases=True):
        return None
    return Finding.error(PACKAGES, f"{name} {installed} is installed, AsyncFlow needs {specifier}", remedy)


def _judge_npu(facts: PackageFacts) -> list[Finding]:
    findings = []
    torch, torch_npu = facts.installed["torch"], facts.installed["torch-npu"]
    if torch and torch_npu and _release(torch) != _release(torch_npu):
        text = f"torch {torch} and torch-npu {torch_npu} are of different releases"
        findings.append(Finding.error(PACKAGES, text, f"pip install 'torch=={_release(torch_npu)}.*'"))
    if not facts.cann:
        text = "the environment of CANN is not set (ASCEND_TOOLKIT_HOME); without it, torch cannot be imported"
        findings.append(Finding.error(PACKAGES, text, "source /usr/local/Ascend/ascend-toolkit/set_env.sh"))
    return findings


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _foreign() -> dict[str, str]:
    """Return AsyncFlow's import names whose package is not next to this one -> where it is."""
    home = Path(__file__).resolve().parents[2]
    foreign = {}
    for name in _OWN_NAMES:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ()) if spec] if spec else []
        if places != [home / name]:
            foreign[name] = str(places[0]) if places else "nothing"
    return foreign


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (third-party code at import raises anything)
        return reason(error)
    return ""


# A model with random weights that trains for a moment, to compare its memory with the estimate of device memory.
#
# Its proportions are those that matter: the head's tiles are full, and activations weigh as much as the state. Used by
# `launcher.doctor.device_check` and by the project's tests.

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
    sizes = ModelSizes.of(json.loads((path / "config.json").read_text()), parameters)
    assert sizes is not None
    return sizes


def random_batch() -> "Sequences":
    import torch

    from workers.rows.packed_rows import Sequences

    tokens_NT = torch.randint(2, 1000, (SAMPLES, PROMPT + RESPONSE))
    return Sequences.of(list(tokens_NT[:, :PROMPT]), list(tokens_NT[:, PROMPT:]))


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
