"""The shipped Kubernetes manifests, read as a cluster reads them: fields by their schema, pods, and what follows when
pods end.

The rules are those of the controllers' sources: JobSet's `pkg/controllers/failure_policy.go` over the Job controller's
`podFailurePolicy` and `backoffLimit`; Volcano's `pkg/controllers/job/job_controller_util.go` (`applyPolicies`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

import configs

DIRECTORY = Path(next(iter(configs.__path__))) / "kubernetes"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float),
}  # fmt: skip


def manifest(name: str) -> dict[str, Any]:
    """Return a shipped manifest."""
    read: dict[str, Any] = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text())
    return read


def faults(schema: Mapping[str, Any], value: Any, at: str = "") -> Iterator[str]:
    """Yield what an API server would refuse or drop: unknown and missing fields, wrong types and values."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{at}: {value!r} is neither a number nor a text"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at}: {value!r} is no {kind}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{at}: {value} is out of range"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(schema.get("items", {}), item, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from (f"{at}.{name} is missing" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            if name in schema.get("properties", {}):
                yield from faults(schema["properties"][name], item, f"{at}.{name}")
            elif "additionalProperties" in schema:
                yield from faults(schema["additionalProperties"], item, f"{at}.{name}")
            elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{at}.{name}: there is no such field"


class After(StrEnum):
    """What a controller does once pods have ended."""

    DONE = "done"
    FAILED = "failed"
    RESTART = "restart all"


@dataclass(frozen=True)
class Pod:
    """What the kubelet starts.

    Attributes:
        host: the name by which other pods reach it.
    """

    host: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: int


class Controller(Protocol):
    """Starts a manifest's pods, and decides what follows from how they end."""

    def pods(self) -> list[Pod]: ...

    def decide(self, exit_codes: Sequence[int], *, restarts: int) -> After:
        """Return what follows when all pods have ended, `restarts` starts after the first one."""


class JobSet:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._name = document["metadata"]["name"]
        self._spec = document["spec"]
        (self._replicated,) = self._spec["replicatedJobs"]
        assert self._replicated["replicas"] == 1
        self._job = self._replicated["template"]["spec"]
        assert self._job["completionMode"] == "Indexed" and self._job["parallelism"] == self._job["completions"]

    def pods(self) -> list[Pod]:
        network, head = self._spec["network"], self._spec["coordinator"]
        assert network["enableDNSHostnames"], "names of pods"
        subdomain = network.get("subdomain", self._name)
        prefix = f"{self._name}-{self._replicated['name']}-0"
        coordinator = f"{self._name}-{head['replicatedJob']}-{head['jobIndex']}-{head['podIndex']}.{subdomain}"
        annotations = {"jobset.sigs.k8s.io/coordinator": coordinator}
        numbers = range(self._job["completions"])
        return [
            _pod(self._job["template"], f"{prefix}-{k}.{subdomain}", {"JOB_COMPLETION_INDEX": str(k)}, annotations)
            for k in numbers
        ]

    def decide(self, exit_codes: Sequence[int], *, restarts: int) -> After:
        reason = self._why_failed([code for code in exit_codes if code])
        if not reason:
            return After.DONE
        policy = self._spec["failurePolicy"]
        rules = (one for one in policy["rules"] if reason in one.get("onJobFailureReasons", [reason]))
        action = next((one["action"] for one in rules), "RestartJobSet")
        assert action in ("FailJobSet", "RestartJobSet")
        return After.FAILED if action == "FailJobSet" or restarts >= policy["maxRestarts"] else After.RESTART

    def _why_failed(self, codes: Sequence[int]) -> str:
        """Return the reason of the Job's condition `Failed`; "": all pods succeeded."""
        assert self._job["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"
        for code in codes:
            for rule in self._job["podFailurePolicy"]["rules"]:
                exits = rule["onExitCodes"]
                if (code in exits["values"]) == (exits["operator"] == "In"):
                    assert rule["action"] == "FailJob"
                    return "PodFailurePolicy"
        return "BackoffLimitExceeded" if len(codes) > self._job["backoffLimit"] else ""


class Volcano:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._name = document["metadata"]["name"]
        self._spec = document["spec"]
        (self._task,) = self._spec["tasks"]
        assert self._spec["minAvailable"] == self._task["replicas"], "no pod starts without the others"

    def pods(self) -> list[Pod]:
        assert self._spec["plugins"].keys() == {"svc", "env"}
        task, count = self._task["name"], self._task["replicas"]
        hosts = [f"{self._name}-{task}-{k}.{self._name}" for k in range(count)]
        shared = {f"VC_{task.upper()}_HOSTS": ",".join(hosts), f"VC_{task.upper()}_NUM": str(count)}
        return [_pod(self._task["template"], host, {**shared, "VC_TASK_INDEX": str(k)}) for k, host in enumerate(hosts)]

    def decide(self, exit_codes: Sequence[int], *, restarts: int) -> After:
        code = next((code for code in exit_codes if code), 0)
        if not code:
            return After.DONE
        for policy in self._spec["policies"]:
            assert ("exitCode" in policy) != ("events" in policy or "event" in policy), "webhooks refuse both"
            if policy.get("exitCode") == code or "PodFailed" in policy.get("events", []):
                if policy["action"] == "AbortJob":
                    return After.FAILED
                assert policy["action"] == "RestartJob"
                return After.FAILED if restarts >= self._spec["maxRetry"] else After.RESTART
        return After.FAILED


CONTROLLERS: Mapping[str, type[JobSet] | type[Volcano]] = {"jobset": JobSet, "volcano": Volcano}


def _pod(
    template: Mapping[str, Any], host: str, given: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> Pod:
    spec = template["spec"]
    (container,) = spec["containers"]
    environment = dict(given)
    for variable in container.get("env", []):
        path = variable["valueFrom"]["fieldRef"]["fieldPath"] if "valueFrom" in variable else ""
        found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
        environment[variable["name"]] = variable["value"] if found is None else (annotations or {})[found[1]]
    command = (*container["command"], *container.get("args", []))
    return Pod(host, command, environment, spec["terminationGracePeriodSeconds"])
