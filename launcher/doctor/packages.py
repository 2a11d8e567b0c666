"""The packages that AsyncFlow needs, in the versions that it names; and whether its import names are really its own."""

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from asyncflow.extras import DISTRIBUTION
from launcher.doctor.finding import Finding
from launcher.doctor.needs import Needs

CHECK = "packages"
OWN_NAMES = ("asyncflow", "launcher", "workers", "tq", "weightsync", "configs")


@dataclass(frozen=True)
class PackageFacts:
    """What is installed.

    Attributes:
        python: version.
        requirements: of AsyncFlow's own metadata, as `name specifier`; None: it is not installed as a package.
        installed: version of each required package, and of `torch` and `torch-npu`; None: it is not there.
        foreign: AsyncFlow's import names that lead elsewhere -> where.
        cann: the environment of Ascend's toolkit is set.
    """

    python: str
    requirements: tuple[str, ...] | None
    installed: dict[str, str | None]
    foreign: dict[str, str]
    cann: bool


def check(needs: Needs) -> list[Finding]:
    """Look and judge."""
    if importlib.util.find_spec("packaging") is None:
        text = "packaging is not installed, so versions cannot be compared"
        return [Finding.error(CHECK, text, "pip install -e . in AsyncFlow's clone, which brings all that it needs")]
    return judge(gather(needs), needs)


def gather(needs: Needs) -> PackageFacts:
    """Read the metadata of what is installed; imports nothing of it."""
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


def judge(facts: PackageFacts, needs: Needs) -> list[Finding]:
    """Compare what is installed with what is required."""
    findings = [
        Finding.error(
            CHECK,
            f"`import {name}` finds {place}, not AsyncFlow's",
            f"remove what is in the way: pip uninstall the distribution that owns {place}, or correct PYTHONPATH",
        )
        for name, place in facts.foreign.items()
    ]
    if facts.requirements is None:
        remedy = "pip install -e . in AsyncFlow's clone"
        findings.append(Finding.warning(CHECK, f"{DISTRIBUTION} is not installed, so its needs are not known", remedy))
    findings += [found for text in facts.requirements or () if (found := _judge_one(text, facts)) is not None]
    if needs.device == "npu":
        findings += _judge_npu(facts)
    if not findings:
        many = len(facts.requirements or ())
        text = f"Python {facts.python}, torch {facts.installed['torch']}, all {many} required packages fit"
        findings.append(Finding.ok(CHECK, text))
    return findings


def _judge_one(requirement: str, facts: PackageFacts) -> Finding | None:
    from packaging.specifiers import SpecifierSet

    name, specifier = requirement.split(" ", 1)
    installed = facts.installed[name]
    remedy = f"pip install '{name}{specifier}'"
    if installed is None:
        return Finding.error(CHECK, f"{name} is not installed", remedy)
    if SpecifierSet(specifier).contains(installed, prereleases=True):
        return None
    return Finding.error(CHECK, f"{name} {installed} is installed, AsyncFlow needs {specifier}", remedy)


def _judge_npu(facts: PackageFacts) -> list[Finding]:
    findings = []
    torch, torch_npu = facts.installed["torch"], facts.installed["torch-npu"]
    if torch and torch_npu and _release(torch) != _release(torch_npu):
        findings.append(
            Finding.error(
                CHECK,
                f"torch {torch} and torch-npu {torch_npu} are of different releases",
                f"pip install 'torch=={_release(torch_npu)}.*'",
            )
        )
    if not facts.cann:
        findings.append(
            Finding.error(
                CHECK,
                "the environment of CANN is not set (ASCEND_TOOLKIT_HOME), without it torch cannot be imported",
                "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
            )
        )
    return findings


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _foreign() -> dict[str, str]:
    """Return AsyncFlow's import names whose package does not lie beside this one."""
    home = Path(__file__).resolve().parents[2]
    foreign = {}
    for name in OWN_NAMES:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ()) if spec] if spec else []
        if places != [home / name]:
            foreign[name] = str(places[0]) if places else "nothing"
    return foreign
