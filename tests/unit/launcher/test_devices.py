from pathlib import Path

import pytest

from asyncflow.errors import ConfigError
from launcher.checks.placement import Devices, find_devices


def make_dev(tmp_path: Path, *names: str) -> Path:
    for name in (*names, "nvidiactl", "nvidia-uvm", "davinci_manager", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_auto_takes_the_cpu_when_no_accelerator_is_there(tmp_path: Path) -> None:
    assert find_devices("auto", dev=make_dev(tmp_path), env={}, installed=True) == Devices("cpu")


def test_auto_counts_device_files_only(tmp_path: Path) -> None:
    dev = make_dev(tmp_path, "nvidia0", "nvidia1")
    assert find_devices("auto", dev=dev, env={}, installed=True) == Devices("cuda", 2)


def test_auto_finds_an_npu(tmp_path: Path) -> None:
    dev = make_dev(tmp_path, *(f"davinci{n}" for n in range(8)))
    assert find_devices("auto", dev=dev, env={}, installed=True) == Devices("npu", 8)


def test_auto_takes_the_cpu_when_torch_cannot_use_the_accelerator(tmp_path: Path) -> None:
    assert find_devices("auto", dev=make_dev(tmp_path, "nvidia0"), env={}, installed=False) == Devices("cpu")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("1,0", 2), ("3,-1,0", 1), ("0,9,1", 1), ("GPU-8932f937,GPU-1", 2), ("0,1,2,3,3", 4)],
)
def test_visible_devices_limit_the_count(tmp_path: Path, visible: str, count: int) -> None:
    dev = make_dev(tmp_path, *(f"nvidia{n}" for n in range(4)))
    assert find_devices("cuda", dev=dev, env={"CUDA_VISIBLE_DEVICES": visible}, installed=True).count == count


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_hidden_devices_are_not_there(tmp_path: Path, visible: str) -> None:
    dev = make_dev(tmp_path, "davinci0")
    with pytest.raises(ConfigError, match=r"launcher.device: 'npu'.*ASCEND_RT_VISIBLE_DEVICES"):
        find_devices("npu", dev=dev, env={"ASCEND_RT_VISIBLE_DEVICES": visible}, installed=True)


def test_requested_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher.device: 'cuda' cannot be used: this machine.*set launcher.device"):
        find_devices("cuda", dev=make_dev(tmp_path), env={}, installed=True)


def test_requested_device_without_its_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its PyTorch is missing"):
        find_devices("cuda", dev=make_dev(tmp_path, "nvidia0"), env={}, installed=False)


def test_cpu_looks_at_nothing(tmp_path: Path) -> None:
    assert find_devices("cpu", dev=tmp_path / "missing", env={}) == Devices("cpu")
