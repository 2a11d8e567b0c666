"""Engines: can the libraries be imported that the run's engines, or this device, ask for."""

import importlib
import time
from dataclasses import dataclass

from launcher.doctor.finding import Finding, reason
from launcher.doctor.needs import Needs
from launcher.engine_libraries import install, is_installed

CHECK = "engines"


@dataclass(frozen=True)
class Library:
    """A library of engines.

    Attributes:
        module: whose import says whether it works.
        install: the command.
    """

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
_TORCH_NPU = Library("torch_npu", "install the torch-npu of your torch's release, as docs/engines.md says")

_OF_ENGINE = {
    "hf": (_TRANSFORMERS,),
    "fsdp": (_FSDP, _TRANSFORMERS),
    "vllm": (_VLLM,),
    "openai": (_HTTPX,),
    "megatron": (_MEGATRON,),
}
_ON_NPU = {"vllm": (_VLLM_ASCEND,), "megatron": (_MINDSPEED,)}
_OPTIONAL = {"cuda": (_VLLM, _MEGATRON), "npu": (_VLLM, _VLLM_ASCEND, _MEGATRON, _MINDSPEED)}
"""What other engines of that device would need."""


@dataclass(frozen=True)
class EngineFacts:
    """What was imported.

    Attributes:
        errors: module -> why it cannot be imported; empty: it can.
        seconds: that all of them took.
        installed: optional modules that are there, not imported.
        absent: optional modules that are not.
    """

    errors: dict[str, str]
    seconds: float = 0.0
    installed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    return judge(gather(needs), needs)


def needed_libraries(needs: Needs) -> tuple[Library, ...]:
    """Return what the engines need on this device, each once."""
    libraries = [library for engine in needs.engines for library in _OF_ENGINE.get(engine, ())]
    if needs.device == "cpu":  # another build of it
        libraries = [_VLLM_CPU if library is _VLLM else library for library in libraries]
    if needs.device == "npu":
        libraries += [_TORCH_NPU, *(library for engine in needs.engines for library in _ON_NPU.get(engine, ()))]
    return tuple(dict.fromkeys(libraries))


def gather(needs: Needs) -> EngineFacts:
    """Import what is needed, and look for the rest."""
    began = time.monotonic()
    needed = [library.module for library in needed_libraries(needs)]
    errors = {module: _import_error(module) for module in needed}
    optional = [library.module for library in _OPTIONAL.get(needs.device, ()) if library.module not in needed]
    there = tuple(module for module in optional if is_installed(module))
    absent = tuple(module for module in optional if module not in there)
    return EngineFacts(errors, time.monotonic() - began, there, absent)


def judge(facts: EngineFacts, needs: Needs) -> list[Finding]:
    """Say what is missing."""
    install = {library.module: library.install for library in needed_libraries(needs)}
    findings = [
        Finding.error(CHECK, f"{module} cannot be imported ({error})", install[module])
        for module, error in facts.errors.items()
        if error
    ]
    if findings:
        return findings
    names = " ".join(needs.engines)
    others = [f"{module} is there" for module in facts.installed] + [f"no {module}" for module in facts.absent]
    extra = f"; for other engines: {', '.join(others)}" if others else ""
    imported = f", {' '.join(facts.errors)} imported in {facts.seconds:.1f} s" if facts.errors else ""
    return [Finding.ok(CHECK, f"{names}{imported}{extra}")]


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (third-party code at import raises anything)
        return reason(error)
    return ""
