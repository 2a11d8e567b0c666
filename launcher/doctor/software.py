"""Checks of software: installed packages and their versions, libraries of the run's engines and, inside a Slurm job,
the tools with which a preempted run requeues itself.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncflow.extras import DISTRIBUTION
from launcher.doctor.findings import Facts, MachineCheck, Needs, error, fatal, reason, warning

_OWN_NAMES = ("asyncflow", "launcher", "workers", "tq", "weightsync", "configs")
_ANSWER_S = 8.0
_IMPORT_S = 150.0
_SLURM_TOOLS = ("sbatch", "srun", "scontrol")
_CANN = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")

_TRANSFORMERS, _FSDP = "transformers.models.auto.modeling_auto", "torch.distributed.fsdp"
_LIBRARIES = {
    "hf": (_TRANSFORMERS,), "fsdp": (_FSDP, _TRANSFORMERS), "vllm": ("vllm",), "openai": ("httpx2",),
    "megatron": ("megatron.core",),
}  # fmt: skip
"""Engine -> modules that it imports."""
_ON_NPU = {"vllm": ("vllm_ascend",), "megatron": ("mindspeed",)}
_INSTALLS = {
    _TRANSFORMERS: "pip install 'transformers>=5.5.4,<6'",
    _FSDP: "pip install 'torch>=2.10'",
    "mindspeed": "pip install git+https://gitcode.com/Ascend/MindSpeed@core_r0.16.0 (PyPI's is a placeholder)",
    "torch_npu": "pip install torch==2.10.0 torch-npu==2.10.0.post4",
}
_EXTRAS = {"vllm": ("vllm", "cuda"), "httpx2": ("openai", "cuda"), "vllm_ascend": ("vllm", "npu"),
           "megatron.core": ("megatron", "cuda")}  # fmt: skip
"""Module -> the engine whose extra brings it, and the device whose extra that is."""
DRIVER = (
    "try nvidia-smi or npu-smi info: a driver that hangs wants a reboot; or is the disk with Python's packages slow?"
)


def look_at_packages(needs: Needs) -> Facts:
    """Read the metadata of installed packages without importing them."""
    torch, torch_npu, texts = installed("torch"), installed("torch-npu"), requirements()
    facts: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch, "torch_npu": torch_npu, "release": _release(torch_npu),
        "npu": needs.device == "npu", "cann": any(os.environ.get(name) for name in _CANN), "foreign": foreign(),
        "incomparable": importlib.util.find_spec("packaging") is None, "unknown": texts is None,
        "absent": [], "unfit": [],
    }  # fmt: skip
    if facts["incomparable"]:
        return facts
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in texts or ()]
    wanted = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in wanted:
        version = installed(one.name)
        item = {"name": one.name, "specifier": one.specifier, "version": version}
        if version is None:
            facts["absent"].append(item)
        elif not one.specifier.contains(version, prereleases=True):
            facts["unfit"].append(item)
    return {**facts, "many": len(wanted)}


_INSTALL = "pip install '{name}{specifier}'"
_CLONE = "pip install -e . in AsyncFlow's clone"
PACKAGES = MachineCheck(
    "packages", look_at_packages, (
        fatal("incomparable", "packaging is not installed, so versions cannot be compared",
              f"{_CLONE}, which brings all that it needs"),
        error("foreign", "`import {name}` finds {place}, not AsyncFlow's",
              "remove what is in the way: pip uninstall the distribution that owns {place}, or correct PYTHONPATH"),
        warning("unknown", f"{DISTRIBUTION} is not installed, so its requirements are unknown", _CLONE),
        error("absent", "{name} is not installed", _INSTALL),
        error("unfit", "{name} {version} is installed, AsyncFlow needs {specifier}", _INSTALL),
        error(lambda f: f.npu and f.torch and f.torch_npu and _release(f.torch) != _release(f.torch_npu),
              "torch {torch} and torch-npu {torch_npu} are of different releases", "pip install 'torch=={release}.*'"),
        error(lambda f: f.npu and not f.cann,
              "the environment of CANN is not set (ASCEND_TOOLKIT_HOME); without it, torch cannot be imported",
              "source /usr/local/Ascend/ascend-toolkit/set_env.sh"),
    ),
    "Python {python}, torch {torch}, all {many} required packages fit",
    30, "is the disk with Python's packages reachable? python -m site, df",
)  # fmt: skip


def requirements() -> list[str] | None:
    """Return AsyncFlow's requirements by its own metadata; None: it is not installed as a package."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(name: str) -> str | None:
    """Return a distribution's version; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def foreign() -> list[Facts]:
    """Return AsyncFlow's import names whose package is not next to this one, and where it is."""
    home = Path(__file__).resolve().parents[2]
    found: list[Facts] = []
    for name in _OWN_NAMES:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ())] if spec else []
        if places != [home / name]:
            found.append({"name": name, "place": str(places[0]) if places else "nothing"})
    return found


def _release(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])


def needed_modules(needs: Needs) -> tuple[str, ...]:
    """Return the modules that the run's engines import on this device, without duplicates."""
    modules = [module for engine in needs.engines for module in _LIBRARIES.get(engine, ())]
    if needs.device == "npu":
        modules += ["torch_npu", *(module for engine in needs.engines for module in _ON_NPU.get(engine, ()))]
    return tuple(dict.fromkeys(modules))


def import_engines(needs: Needs) -> Facts:
    """Import what the engines need."""
    from launcher.checks.models import install

    began, broken, needed = time.monotonic(), [], needed_modules(needs)
    for module in needed:
        if why := _import_error(module):
            engine, device = _EXTRAS.get(module, ("", ""))
            # vLLM has a build of its own for CPUs.
            how = _INSTALLS.get(module) or install(engine, "cpu" if needs.device == "cpu" else device)
            broken.append({"module": module, "why": why, "how": how})
    took = f", {' '.join(needed)} imported in {time.monotonic() - began:.1f} s" if needed else ""
    return {"broken": broken, "imported": f"{' '.join(needs.engines)}{took}"}


ENGINES = MachineCheck(
    "engines", import_engines, (error("broken", "{module} cannot be imported ({why})", "{how}"),), "{imported}",
    180, DRIVER,
)  # fmt: skip


def look_at_environments(needs: Needs) -> Facts:
    """Ask each interpreter of `launcher.environments` for its AsyncFlow, and have it import its roles' engines."""
    from asyncflow.errors import ConfigError
    from launcher.checks.environments import check_software

    unfit: list[Facts] = []
    broken: list[Facts] = []
    for python, engines in needs.environments:
        try:
            check_software(python, engines)
        except ConfigError as raised:
            text, _, how = str(raised).removeprefix("launcher.environments: ").rpartition("; ")
            unfit.append({"text": text, "how": how})
            continue
        own = replace(needs, engines=engines, environments=())
        for module in needed_modules(own):
            done = subprocess.run(
                [python, "-P", "-c", f"import {module}"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_IMPORT_S, check=False,
            )  # fmt: skip
            if done.returncode:
                why = (done.stderr.strip() or f"ended with code {done.returncode}").rpartition("\n")[2]
                broken.append({"python": python, "module": module, "why": why})
    return {"unfit": unfit, "broken": broken, "places": " ".join(python for python, _ in needs.environments) or "none"}


ENVIRONMENTS = MachineCheck(
    "environments", look_at_environments, (
        error("unfit", "{text}", "{how}"),
        error("broken", "{python}: {module} cannot be imported ({why})", "install it in that environment"),
    ),
    "launcher.environments: {places}",
    600, DRIVER,
)  # fmt: skip


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as raised:  # noqa: BLE001 (third-party code at import raises anything)
        return reason(raised)
    return ""


def nodes_of_job(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of the surrounding Slurm job; 1 if there is none."""
    text = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    return max(1, int(text)) if text.isdigit() else 1


def ask_slurm(needs: Needs, env: Mapping[str, str] = os.environ) -> Facts:
    """Look for Slurm's tools, and inside a job ask about it."""
    job = env.get("SLURM_JOB_ID", "")
    paths = {name: path for name in _SLURM_TOOLS if (path := shutil.which(name, path=env.get("PATH")))}
    found = f", found {' '.join(paths)}" if paths else ""
    fine = f"job {job} can be requeued" if job else f"not inside a job{found}"
    facts = {"job": job, "reached": "scontrol" in paths, "shown": "", "problem": "", "fine": fine}
    if not job or "scontrol" not in paths:
        return facts
    command = [paths["scontrol"], "show", "job", "--oneliner", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as raised:
        return facts | {"problem": reason(raised)}
    shown = done.stdout.split() if done.returncode == 0 else ()
    return facts | {"shown": shown, "problem": "" if shown else " ".join(done.stderr.split()) or "no such job"}


SLURM = MachineCheck(
    "slurm", ask_slurm, (
        warning(lambda f: f.job and not f.reached,
                "job {job}: scontrol is not on PATH, so a run that is preempted cannot requeue itself",
                "add Slurm's bin directory to PATH; in a container, mount it and its munge socket"),
        warning("problem", "job {job}: scontrol does not show it ({problem})",
                "scontrol show job {job}; does munge run on this node?"),
        warning(lambda f: "Requeue=0" in f.shown,
                "job {job} was submitted without --requeue, so Slurm does not start it again when a node fails",
                "scontrol update JobId={job} Requeue=1; next time #SBATCH --requeue"),
    ),
    "{fine}",
    15, "does scontrol ping answer?",
)  # fmt: skip
