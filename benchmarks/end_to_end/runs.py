"""Runs of the workload, ours and the peer's, each in processes of its own; nothing else runs meanwhile."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from asyncflow.json_lines import LineReader
from benchmarks.end_to_end.workload import RESPONSES, TOKENS, Workload, our_config, write_prompts

_ROOT = Path(__file__).parents[2]
_LAUNCH = "from launcher.cli.launch import launch; launch()"
_PEER = Path(__file__).with_name("trl_peer.py")
_TIMEOUT_S = 7200.0


@dataclass
class Lab:
    """What all parts share; rounds that one part ran are there for the others.

    Attributes:
        model: Hugging Face directory of the model.
        directory: for runs; temporary.
        peer_python: interpreter of the peer's environment.
        engine_pythons: interpreters with engines that this one has not.
        rounds: runs of each side, in turn.
        steps: of a run.
        skipped: first steps of a run, which do not count: caches and pipelines fill.
        threads: of each process of a run.
        settings: over ours, `section.name` -> value.
    """

    model: Path
    directory: Path
    peer_python: Path | None = None
    engine_pythons: Mapping[str, Path] = field(default_factory=dict)
    rounds: int = 3
    steps: int = 8
    skipped: int = 3
    threads: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    _rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def rates(self, engine: str, dtype: str) -> tuple[list[float], list[float]]:
        """Return response tokens trained per second of every round: ours with `engine`, and the peer's."""
        sides = (engine, dtype), ("trl", dtype)
        while any(len(self._rates.get(side, ())) < self.rounds for side in sides):
            for side in sides:
                done = self._rates.setdefault(side, [])
                if len(done) < self.rounds:
                    done.append(self._peer(dtype) if side[0] == "trl" else self._ours(engine, dtype))
                    print(f"{side[0]} {dtype}: {done[-1]:.1f} response tokens/s", file=sys.stderr, flush=True)
        return self._rates[sides[0]], self._rates[sides[1]]

    def ours(self, engine: str, dtype: str) -> list[float]:
        """Return response tokens trained per second of every round of ours."""
        done = self._rates.setdefault((engine, dtype), [])
        done += [self._ours(engine, dtype) for _ in range(self.rounds - len(done))]
        return done

    def _workload(self, dtype: str) -> Workload:
        prompts = self.directory / "prompts.jsonl"
        if not prompts.is_file():
            write_prompts(prompts)
        return Workload(self.model, prompts, dtype, self.steps, self.threads)

    def _ours(self, engine: str, dtype: str) -> float:
        run_dir = Path(tempfile.mkdtemp(prefix=f"{engine}-", dir=self.directory))
        config = our_config(self._workload(dtype), engine=engine, settings=dict(self.settings))
        (run_dir / "recipe.yaml").write_text(yaml.safe_dump(config))
        python = self.engine_pythons.get(engine, Path(sys.executable))
        arguments = [str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir / "run")]
        _run([str(python), "-c", _LAUNCH, *arguments], environment={"PYTHONPATH": str(_ROOT)})
        lines = LineReader(run_dir / "run" / "metrics.jsonl").read()
        tokens = [line["response_tokens_mean"] * line["samples"] for line in lines]
        return self._rate([line["time_s"] for line in lines], tokens)

    def _peer(self, dtype: str) -> float:
        if self.peer_python is None:
            raise SystemExit("--peer-python: this part compares with TRL; give the Python of an environment with it")
        workload = self._workload(dtype)
        description = {
            "model": str(workload.model), "prompts": str(workload.prompts), "dtype": dtype, "steps": workload.steps,
            "threads": workload.threads, "responses": RESPONSES, "tokens": TOKENS,
        }  # fmt: skip
        file = self.directory / "workload.json"
        file.write_text(json.dumps(description))
        printed = _run([str(self.peer_python), str(_PEER), str(file), str(workload.threads)], environment={})
        done = json.loads(printed.splitlines()[-1])
        return self._rate(done["ended_s"], done["tokens"])

    def _rate(self, ended_s: list[float], tokens: list[float]) -> float:
        """Return tokens per second from the end of the last skipped step to the end of the last one."""
        return sum(tokens[self.skipped :]) / (ended_s[-1] - ended_s[self.skipped - 1])


def ratio_of_medians(ours: list[float], theirs: list[float]) -> float:
    """Return how many times theirs ours is."""
    return statistics.median(ours) / statistics.median(theirs)


def _run(command: list[str], *, environment: Mapping[str, str]) -> str:
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(f"{command[0]}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return done.stdout
