"""The manifests in `configs/kubernetes`: fields by the CRDs' schemas, and what follows from every exit code.

`kubernetes/*.json` are the CRDs' own schemas, trimmed to what the manifests use; each names its source. The pods
themselves run in `tests/nodes/test_pods_over_hosts.py`.
"""

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.config.load_config import load_config
from launcher.config.paths import find_recipe
from launcher.process.run_events import FAILED, RESUMABLE, USAGE
from launcher.slurm.batch_job import BatchJob, script_text
from tests.support.kubernetes import CONTROLLERS, DIRECTORY, After, faults, manifest

SCHEMAS = Path(__file__).with_name("kubernetes")
NAMES = sorted(CONTROLLERS)


def schema_of(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    return read


def test_every_manifest_is_tested() -> None:
    assert sorted(path.stem for path in DIRECTORY.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_those_of_the_crd(name: str) -> None:
    recorded, document = schema_of(name), manifest(name)
    assert recorded["source"].startswith("https://github.com/")
    assert (document["apiVersion"], document["kind"]) == (recorded["apiVersion"], recorded["kind"])
    assert list(faults(recorded["schema"], document)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_misspelt_or_of_another_type_is_found(name: str) -> None:
    schema = schema_of(name)["schema"]

    def pod_of(document: dict[str, Any]) -> dict[str, Any]:
        spec = document["spec"]
        job = spec["replicatedJobs"][0]["template"]["spec"] if name == "jobset" else spec["tasks"][0]
        pod: dict[str, Any] = job["template"]["spec"]
        return pod

    def found_after(change: dict[str, Any]) -> list[str]:
        document = copy.deepcopy(manifest(name))
        pod_of(document).update(change)
        return list(faults(schema, document))

    assert found_after({"restartPolicy": "Never"}) == []
    (unknown,) = found_after({"terminationGracePeriod": 120})
    assert unknown.endswith("spec.terminationGracePeriod: there is no such field")
    (typed,) = found_after({"terminationGracePeriodSeconds": "120"})
    assert typed.endswith("'120' is no integer")
    (missing,) = found_after({"containers": [{"image": "i"}]})
    assert missing.endswith("containers[0].name is missing")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("codes", "restarts", "expected"),
    [
        ([0, 0], 0, After.DONE),
        ([FAILED, FAILED], 0, After.FAILED),
        ([USAGE, USAGE], 0, After.FAILED),
        ([RESUMABLE, RESUMABLE], 0, After.RESTART),
        ([RESUMABLE, 137], 19, After.RESTART),
        ([137, 143], 19, After.RESTART),
        ([RESUMABLE, RESUMABLE], 20, After.FAILED),
    ],
)
def test_launchers_exit_codes_restart_what_can_be_resumed(
    name: str, codes: list[int], restarts: int, expected: After
) -> None:
    assert CONTROLLERS[name](manifest(name)).decide(codes, restarts=restarts) is expected


@pytest.mark.parametrize("name", NAMES)
def test_grace_of_a_pod_is_long_enough_to_save(name: str) -> None:
    """As `asyncflow sbatch` asks of Slurm."""
    stop_s = load_config(find_recipe(None)).launcher.stop_timeout_s
    assert all(pod.grace_s >= 2 * stop_s + 10 for pod in CONTROLLERS[name](manifest(name)).pods())


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_one_command_and_know_their_number_and_that_of_all(name: str) -> None:
    pods = CONTROLLERS[name](manifest(name)).pods()
    assert len({pod.command for pod in pods}) == 1
    shell, option, script = pods[0].command
    subprocess.run([shell, "-n"], input=script, text=True, check=True)
    assert (shell, option) == ("bash", "-c")
    assert re.search(r"^exec asyncflow-launch ", script, re.MULTILINE), "TERM is for the launcher, not for bash"
    assert f"--nnodes {len(pods)} " in script
    unset = [one for one in re.findall(r"\$\{?([A-Z][A-Z_]+)", script) if one not in pods[0].environment]
    assert unset == []


def test_pods_resume_as_batch_jobs_do() -> None:
    slurm = BatchJob(
        name="run", nodes=2, time_limit="1:00:00", gather_s=70, workdir=Path("/w"), run_dir=Path("/r"),
        launch=(("asyncflow-launch",),),
    )  # fmt: skip
    for name in NAMES:
        (script,) = {pod.command[-1] for pod in CONTROLLERS[name](manifest(name)).pods()}
        for line in ("$run_dir/config.yaml", "--resume latest", 'ulimit -n "$(ulimit -Hn)"'):
            assert line in script and line in script_text(slurm)
