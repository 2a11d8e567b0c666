"""The conformance suite of generating engines on several versions of vLLM, and its worker with Ascend's refusals."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SUITE = ("-k", "vllm and not serve", "tests/engines/generating", "tests/vllm_engine/test_process.py", "tests/vendor")
_TIMEOUT_S = 1800  # of a test; the suite's own deadline is for an idle machine
_ASCEND = "npu"
_ASK = "import vllm, torch, transformers; print(vllm.__version__, torch.__version__, transformers.__version__)"


def run(*, interpreters: Sequence[str], **_: int) -> dict[str, float]:
    """Return nothing without interpreters."""
    if not interpreters:
        sys.stderr.write("vllm: skipped; give --interpreters, of environments with different versions of vLLM\n")
        return {}
    passed = ascend = 0
    for python in interpreters:
        said = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True).stdout.split("\n")[-2]
        sys.stderr.write(f"vllm: {python}: vLLM, torch, transformers {said}\n")
        results = _suite(python)
        sys.stderr.write(f"vllm: {said.split()[0]}: {len(results)} tests, failed: {_failed(results) or 'none'}\n")
        passed += bool(results) and not _failed(results)
        of_ascend = {name: result for name, result in results.items() if _ASCEND in name}
        ascend += bool(of_ascend) and not _failed(of_ascend)
    return {"vllm_versions_passed": passed, "vllm_ascend_workers_passed": ascend}


def _suite(python: str) -> dict[str, str]:
    """Return each test's result by its name; what pytest says is printed as it comes."""
    command = [python, "-u", "-m", "pytest", "-m", "", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]
    lines = []
    with subprocess.Popen(
        [*command, f"--timeout={_TIMEOUT_S}", *_SUITE], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line)
    return dict(re.findall(r"^(tests/\S+::\S.*?) (PASSED|FAILED|ERROR)\b", "".join(lines), re.M))


def _failed(results: dict[str, str]) -> str:
    return " ".join(name for name, result in results.items() if result != "PASSED")
