"""The interpreters of `launcher.environments`, checked before anything starts. Torch-free.

Every interpreter that the processes of a node have checks itself, in a child: the libraries of its roles' engines, the
proof of their models, their users' functions, and that its tokenizer, chat template and end tokens give what they give
in the launcher's interpreter.

    launcher                                     child of /envs/vllm/bin/python
      |-- is there an AsyncFlow, and which? ------->|
      |-- roles, settings, first prompts ---------->|  `examining`
      |<-- a problem, or its identity --------------|
"""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncflow.agreement import Identity, differences, software
from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.job import GangSpec, own_name
from launcher.checks.models import check_libraries
from launcher.checks.proof_cache import check_proven
from launcher.checks.user_code import check_names, check_rollout_code, try_users_code
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee, search_beside
from workers.data.prompt_rows import PromptRow, ShownPrompt, prompts_of
from workers.data.tokenizer import load_tokenizer, token_identity
from workers.settings.run import RunConfig

KEY = "launcher.environments"
_ANSWER_S = 120.0
_EXAMINED_S = 900.0
"""Longest time of one interpreter's checks (s), of which the proof of an unknown model takes the most."""
_ASK = """
import json
from importlib import metadata
said, broken = {}, ""
try:
    from asyncflow.agreement import software
    said = software()
    import launcher.checks.environments
except Exception as error:
    broken = f"{type(error).__name__}: {error}"
    try:
        said = said or {"AsyncFlow version": metadata.version("asyncflow-rl")}
    except metadata.PackageNotFoundError:
        pass
print(json.dumps([said, broken]))
"""


class RowsToCheck(NamedTuple):
    """Rows that the checks of a run's data found.

    Attributes:
        first_row, first_prompt: the first row whose responses are scored, as the data has it and as the model gets it,
            with SFT of the held-out prompts; None: prompts are fed, or none are answered.
        first_chunk: with which interpreters and nodes are compared; empty for a source and for fed prompts.
    """

    first_row: PromptRow | None
    first_prompt: ShownPrompt | None
    first_chunk: tuple[PromptRow, ...]


def has_launchers_interpreter(config: RunConfig, node: int) -> Callable[[str], bool]:
    """Return whether a role's processes on this node have the launcher's interpreter."""
    others = config.launcher.interpreters(node, own_name())
    return lambda role: role not in others


def find_identity(config: RunConfig, rows: Sequence[PromptRow]) -> Identity:
    """Return what must be equal in all interpreters and on all nodes, as this interpreter has it. Raises ConfigError if
    the tokenizer cannot be loaded. `rows`: the first of the data."""
    entry = Entry("launcher.checks.environments:identifying", {"run": config.model_dump(mode="json")})
    with ExitStack() as stack:
        found = _Asked(entry, "the tokenizer", stack).answer(prompts_of(rows, config))
    return {**software(), **found["identity"]}


def check_gangs(config: RunConfig, gangs: Collection[GangSpec], node: int, *, device: str, rows: RowsToCheck) -> None:
    """Check what the processes of this node need, each with its own interpreter.

    Args:
        gangs: of the whole run.
        device: kind of this node's devices.

    Raises:
        ConfigError: an interpreter cannot be used, lacks a library, or computes, tokenizes or says something else.
    """
    _check_nodes(config, gangs, node)
    by_hand = config.launcher.external_gangs
    here = {gang.role: None for gang in gangs if node in gang.parts and gang.name not in by_hand}
    others = config.launcher.interpreters(node, own_name())
    # In the launcher's interpreter without a child: nothing is imported.
    check_libraries(config, device=device, roles=[role for role in here if role not in others])
    roles: dict[str, list[str]] = {}
    for role in here:
        if role in others:
            roles.setdefault(others[role], []).append(role)
    for python, names in roles.items():
        check_software(python, names)
    if not roles:
        return
    first = {"row": rows.first_row, "shown": rows.first_prompt}
    with ExitStack() as stack:
        asked = {
            python: _Asked(
                Entry(
                    "launcher.checks.environments:examining",
                    {"run": config.model_dump(mode="json"), "roles": names, "device": device,
                     **msgspec.to_builtins(first)},
                    python=python,
                ),
                f"{KEY}: {_text(python, names)}",
                stack,
            )
            for python, names in roles.items()
        }  # fmt: skip
        identity = find_identity(config, rows.first_chunk)
        for python, one in asked.items():
            found = one.answer(prompts_of(rows.first_chunk, config))
            if problem := found["problem"] or _differing(identity, found):
                raise ConfigError(f"{KEY}: {_text(python, roles[python])}: {problem}")


def check_hosts(config: RunConfig, gangs: Collection[GangSpec], hosts: Mapping[int, str]) -> None:
    """Refuse names of nodes that mean none of the role's, once all nodes have joined.

    Args:
        hosts: node -> its host's name; all nodes of the run.

    Raises:
        ConfigError: names the first one.
    """
    for role, named in config.launcher.environments.items():
        nodes = sorted({part for gang in gangs if gang.role == role for part in gang.parts})
        known = {name for node in nodes for name in (str(node), hosts[node])}
        for name in named if isinstance(named, dict) and nodes else ():
            if name not in known:
                places = ", ".join(f"{node} ({hosts[node]})" for node in nodes)
                raise ConfigError(
                    f"{KEY}: {role}: no node with a {role} is called {name!r}: it is on node {places}; correct it"
                )


def _check_nodes(config: RunConfig, gangs: Collection[GangSpec], node: int) -> None:
    """Refuse nodes that have no process of the role: on the node that was meant, it would have the launcher's
    interpreter. Names of other hosts are not known before all nodes have joined."""
    for role, named in config.launcher.environments.items():
        nodes = {part for gang in gangs if gang.role == role for part in gang.parts}
        for name in named if isinstance(named, dict) and nodes else ():
            is_other = nodes == {node} or (name.isdecimal() and int(name) not in nodes)
            if is_other and name not in (str(node), own_name()):
                places = ", ".join(map(str, sorted(nodes)))
                raise ConfigError(
                    f"{KEY}: {role}: node {name!r} has no {role}, which is on node {places}; node {node} is called "
                    f"{own_name()!r}: correct it"
                )


def _differing(identity: Identity, found: Mapping[str, Any]) -> str:
    differing = differences(identity, found["identity"])
    return differing and (
        f"its {found['libraries']} makes something else of model.path and data than that of the launcher: {differing}; "
        f"use the same versions of transformers and tokenizers"
    )


def check_software(python: str, roles: Sequence[str]) -> None:
    """Check that an interpreter exists, and has this AsyncFlow; raises ConfigError. `roles`: that have it."""
    name = f"{KEY}: {_text(python, roles)}"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else f"no answer within {_ANSWER_S:g} s"
        raise ConfigError(f"{name}: cannot be run ({why}); name the Python interpreter of an environment") from error
    try:
        said, broken = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (ValueError, TypeError) as error:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        words = lines[-1 if lines[0].startswith("Traceback") else 0]  # an old Python explains its usage at length
        raise ConfigError(
            f"{name}: is no Python interpreter that can be used ({words}); name another, of Python 3.11 or newer"
        ) from error
    if not said:
        raise ConfigError(f"{name}: has no AsyncFlow; install {software()['AsyncFlow version']} there, as here")
    if differing := differences(software(), {"wire format": "of another version", **said}):
        raise ConfigError(f"{name}: has another AsyncFlow than the launcher: {differing}; install the same one there")
    if broken:
        raise ConfigError(f"{name}: cannot import AsyncFlow ({broken}); install its requirements there")


def _text(python: str, roles: Sequence[str]) -> str:
    return f"{python} ({', '.join(roles)})"


class _Asked:
    """A child with one question, which starts at once; `stack` ends it."""

    def __init__(self, entry: Entry, what: str, stack: ExitStack) -> None:
        self._pool = CallPool(entry, what=what, limit="the deadline", timeout_s=_EXAMINED_S, concurrency=1)
        stack.callback(self._pool.close)

    def answer(self, prompts: Sequence[Any]) -> dict[str, Any]:
        """Ask, and return the answer; raises ConfigError if there is none."""
        try:
            self._pool.until_ready()
            return dict(self._pool.call_and_wait(prompts, on="its roles"))
        except UserCodeFailed as error:
            raise ConfigError(str(error)) from error


def identifying(run: Mapping[str, Any]) -> Callee:
    """Entry of `workers.calls`: the callee takes a run's first prompts, and returns the interpreter's identity."""
    config = RunConfig.model_validate(run)
    return Callee(lambda prompts: _identity_here(config, prompts))


def examining(
    run: Mapping[str, Any],
    roles: Sequence[str],
    device: str,
    row: Mapping[str, Any] | None,
    shown: Mapping[str, Any] | None,
) -> Callee:
    """Entry of `workers.calls` for another interpreter: the callee takes a run's first prompts, checks what the roles
    need, and returns a problem, or this interpreter's identity."""
    config = RunConfig.model_validate(run)
    search_beside(config.code_directory)
    first = None if row is None else msgspec.convert(row, PromptRow)
    first_shown = None if shown is None else msgspec.convert(shown, ShownPrompt)

    def examine(prompts: Sequence[Any]) -> dict[str, Any]:
        def here(role: str) -> bool:
            return role in roles

        try:
            check_libraries(config, device=device, roles=roles)
            found = _identity_here(config, prompts)
            check_proven(config, roles)
            check_names(config, here)
            check_rollout_code(config, here)
            try_users_code(config, first, first_shown, here)
        except ConfigError as error:
            return {"problem": str(error)}
        return found

    return Callee(examine)


def _identity_here(config: RunConfig, prompts: Sequence[Any]) -> dict[str, Any]:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # blocks the import, which takes several seconds
    import tokenizers
    import transformers

    tokenizer = load_tokenizer(Path(config.model.path), config.data.templates)
    identity = token_identity(tokenizer, chat=config.data.chat_template, prompts=prompts)
    libraries = f"transformers {transformers.__version__} with tokenizers {tokenizers.__version__}"
    return {"problem": "", "identity": identity, "libraries": libraries}
