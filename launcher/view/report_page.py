"""`report.html`: the page of `asyncflow view` over one run, frozen into a file that needs no other, with a summary.

Its security policy allows the scripts and styles inside, by their hashes, and nothing from elsewhere. Torch-free.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from asyncflow.errors import ConfigError
from asyncflow.run_files import REPORT_FILE
from launcher.process.progress import accuracy_text, plain
from launcher.report.report import read_curves
from launcher.run.rundir import write_inside
from launcher.run.several_runs import LAST_STEPS
from launcher.view.run_reader import RunReader

_PAGE = Path(__file__).parent / "page"
_FIGURES = {
    "reward_mean": "reward", "cross_entropy": "cross entropy (nats)", "accuracy": "accuracy", "kl": "KL (nats)",
    "entropy": "entropy (nats)", "response_tokens_mean": "response length (tokens)", "train_tokens_per_s": "tokens/s",
    "step_time_s": "step (s)",
}  # fmt: skip
_MOST_SAMPLES, _SAMPLES_BYTES = 60, 2**20
_TIMELINE_S = 10.0  # the last ones: a file that is sent around should stay small
_MOST_LOGS, _LOG_CHARS = 24, 8000


@dataclass(frozen=True)
class _Inline:
    """A script or style in the page, and its hash for the policy."""

    text: str

    @property
    def digest(self) -> str:
        return base64.b64encode(hashlib.sha256(self.text.encode()).digest()).decode()


def write_report(run_dir: Path) -> Path:
    """Write the report of a run, which may be live, and return its path.

    Raises:
        ConfigError: the run has no finished step, or a file cannot be read or written.
    """
    read_curves(run_dir)  # refuses a run without a finished step, and a damaged file
    run = RunReader(run_dir, plain(run_dir.name))
    state = run.state()
    environment = Environment(loader=PackageLoader("launcher.view", "page"), autoescape=True)
    try:
        data = {
            "state": {"control": False, "runs": [state]},
            "samples": _samples(run),
            "logs": _logs(run),
            "stacks": run.stacks(),
            "account": run.account(),
            "timeline": run.timeline(_TIMELINE_S),
            "settings": {"text": [run.settings_text()], "differences": []},
        }
        figures = run.final_figures(_FIGURES, LAST_STEPS)
        text = environment.get_template("report.html.jinja").render(
            title=run.name,
            steps=state["step"],
            summary=_summary(run, state, figures),
            figures=figures,
            data=script_json(data),
            styles=[_Inline((_PAGE / name).read_text(encoding="utf-8")) for name in ("uPlot.min.css", "view.css")],
            scripts=[_Inline((_PAGE / name).read_text(encoding="utf-8")) for name in ("uPlot.iife.min.js", "view.js")],
        )
        return write_inside(run_dir, REPORT_FILE, text)
    except OSError as error:
        raise ConfigError(f"RUN: no report can be written: {error}; make {run_dir} readable and writable") from error


def script_json(value: Any) -> str:
    """Return JSON that may stand in a <script>: no text in it can end the element, or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _summary(run: RunReader, state: dict[str, Any], figures: list[tuple[str, str]]) -> list[tuple[str, str]]:
    end = state["end"]
    rows = [("state", end["lines"][-1] if end and end["lines"] else state["state"])]
    evaluation = run.newest_evaluation()
    if evaluation is not None and {"accuracy_low", "accuracy_high"} <= evaluation.keys():
        rows.append(("held-out accuracy", f"{accuracy_text(evaluation)}, 95 % interval, at step {evaluation['step']}"))
    rows += figures
    if (time_s := state["time_s"]) is not None:
        rows.append(("time", f"{time_s / 60:.1f} minutes for {state['step']} steps"))
    model = run.newest_model()
    said = (
        "none is saved; see checkpoint.interval" if model is None else f"{model} (AutoModelForCausalLM.from_pretrained)"
    )
    return [(label, plain(text)) for label, text in (*rows, ("model", said))]


def _samples(run: RunReader) -> dict[str, Any]:
    """Return the newest, the best and the worst rollouts, up to a size."""
    found: dict[str, Any] = {"steps": None}
    rows: dict[str, Any] = {}
    size = 0
    for order in ("newest", "best", "worst"):
        found = run.samples(order=order, number=_MOST_SAMPLES // 3)
        for row in found["rows"]:
            key = json.dumps(row)
            if key not in rows and size + len(key) <= _SAMPLES_BYTES:
                rows[key] = row
                size += len(key)
    return {"steps": found["steps"], "rows": list(rows.values())}


def _logs(run: RunReader) -> dict[str, str]:
    """Return the ends of some logs: the launcher's, and of each role those of its first ranks."""
    labels = sorted((log.label for log in run.logs()), key=_log_order)
    tails = {label: run.log_tail(label) for label in labels[:_MOST_LOGS]}
    texts = {label: tail["text"][-_LOG_CHARS:] for label, tail in tails.items() if tail is not None}
    if more := labels[_MOST_LOGS:]:
        texts["the others"] = "not in this report, but in the run's logs/:\n" + "\n".join(more)
    return texts


def _log_order(label: str) -> tuple[bool, int, str]:
    rank = label.rpartition("/")[2]
    return not label.startswith("launcher"), int(rank) if rank.isdigit() else 0, label
