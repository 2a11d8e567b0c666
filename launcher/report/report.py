"""A run for people to look at: curves and samples, as a picture and as text. The page is `launcher.view`."""

import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from asyncflow.decoding import UNREADABLE, json_decoder, json_object, json_step
from asyncflow.errors import ConfigError
from asyncflow.extras import check_installed
from asyncflow.json_lines import LineReader
from asyncflow.run_files import CONFIG_FILE, EVALUATION_FILE, METRICS_FILE, SAMPLES
from launcher.config.load_config import flatten, read_yaml
from launcher.loggers.feed import figures
from launcher.process.progress import plain

# Curves of runs, read from their files, and drawn by matplotlib (extra `plot`). Torch-free.

Curves = Mapping[str, Mapping[int, float]]
"""Name of a figure -> step -> value."""


def read_curves(run_dir: Path) -> Curves:
    """Read every figure of a run, which may be live. Those of evaluations are named `evaluation/...`.

    Raises:
        ConfigError: the run has no finished step, or a line is damaged.
    """
    curves: dict[str, dict[int, float]] = {}
    lines = [(line["step"], line) for line in LineReader(run_dir / METRICS_FILE, json_step).read()]
    evaluations = LineReader(run_dir / EVALUATION_FILE, json_step).read()
    for step, line in [*lines, *((each["step"], {"evaluation": each}) for each in evaluations)]:
        for name, value in figures(line).items():
            curves.setdefault(name, {})[step] = value
    if not lines:
        raise ConfigError(f"RUN: {run_dir} has no finished step; name the directory of a run that has begun")
    return curves


@dataclass
class TimeSpent:
    """How long a run took over all of its starts (s); each counts `time_s` of its steps anew."""

    total: float = 0.0
    last: float = 0.0
    lineage: float | None = None

    def add_step(self, figures: Mapping[str, float | None]) -> None:
        """Count a step by its `time_s`, `step_time_s` and `lineage`."""
        if (ended := figures.get("time_s")) is None:
            return
        # The trainer of a later lineage began after the earlier one's last step, or by another start's clock.
        same = figures.get("lineage") == self.lineage
        began = ended if same else ended - (figures.get("step_time_s") or 0.0)
        self.total += ended - self.last if began >= self.last else ended
        self.last, self.lineage = ended, figures.get("lineage")


def number_text(value: float, digits: int) -> str:
    """Return a number to so many digits, and a large one without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < 1e15 else text


def plot(
    run_dirs: Sequence[Path],
    metrics: Sequence[str],
    output: Path,
    *,
    steps: tuple[int, int] | None = None,
    group: str | None = None,
) -> None:
    """Draw a panel per metric, with a curve per run, into a PNG, SVG or PDF file.

    Args:
        steps: the first and the last one; None: all.
        group: a setting, such as `actor.lr`: runs with the same value are one curve, the mean over the steps that all
            of them have, with a band of one standard deviation on both sides; None: each run has its own.

    Raises:
        ConfigError: matplotlib is not installed, a run has no such figure, setting or steps, or the file cannot be
            written.
    """
    check_installed("matplotlib", "plot", "plot: ", "or see each run's report.html")
    runs = {run_dir: read_curves(run_dir) for run_dir in run_dirs}
    known = sorted(set().union(*runs.values()))
    for metric in metrics:
        if metric not in known:
            near = get_close_matches(metric, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they have {' '.join(known)}"
            raise ConfigError(f"--metric: no run has {metric!r}; {hint}")
    first, last = steps or (0, math.inf)
    all_steps = runs
    runs = {
        run_dir: {name: {step: y for step, y in curve.items() if first <= step <= last} for name, curve in own.items()}
        for run_dir, own in runs.items()
    }
    if not any(own.get(metric) for own in runs.values() for metric in metrics):
        there = sorted({step for name in metrics for curve in all_steps.values() for step in curve.get(name, ())})
        raise ConfigError(
            f"--step: no run has {' or '.join(metrics)} in steps {first} to {last}; they have steps {there[0]} to "
            f"{there[-1]}"
        )
    groups = {str(run_dir): [run_dir] for run_dir in run_dirs} if group is None else grouped_runs(run_dirs, group)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2 * len(metrics)), layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(len(metrics), 1, number, xlabel="step", ylabel=metric)
        for label, members in groups.items():
            curves = [curve for run_dir in members if (curve := runs[run_dir].get(metric))]
            if curves:
                at, means, low, high = mean_curve(curves)
                if not at:
                    raise ConfigError(f"--group: {label} have no step of {metric} in common; leave one of them out")
                (line,) = axes.plot(at, means, label=label)
                axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise ConfigError(f"-o: {output} cannot be written: {error.strerror}; name a file elsewhere") from error
    except ValueError as error:
        raise ConfigError(f"-o: {output} cannot be written ({error}); name a .png, .svg or .pdf file") from error


def mean_curve(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return (steps, means, and these minus and plus one standard deviation) of the steps that all curves have.

    With others the mean would jump where one of them ends.
    """
    steps = sorted(set(curves[0]).intersection(*curves[1:]))
    values = [[curve[step] for curve in curves] for step in steps]
    means, spreads = list(map(fmean, values)), [stdev(ys) if len(ys) > 1 else 0.0 for ys in values]
    low, high = ([y + sign * s for y, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
    return steps, means, low, high


def grouped_runs(run_dirs: Sequence[Path], setting: str) -> dict[str, list[Path]]:
    """Return label -> runs with the same value of a setting. Raises ConfigError if no run has it."""
    found = {run_dir: flatten(read_yaml(run_dir / CONFIG_FILE).values) for run_dir in run_dirs}
    known = sorted(set().union(*found.values()))
    if setting not in known:
        near = get_close_matches(setting, known, n=1)
        differ = [key for key in known if len({str(settings.get(key)) for settings in found.values()}) > 1]
        hint = f"did you mean {near[0]!r}?" if near else f"they differ in {' '.join(differ) or 'none'}"
        raise ConfigError(f"--group: no run has a setting {setting!r}; {hint}")
    values: dict[str, list[Path]] = {}
    for run_dir, settings in found.items():
        values.setdefault(str(settings.get(setting, "-")), []).append(run_dir)
    return {f"{setting} {value}, {len(runs)} run{'s'[: len(runs) > 1]}": runs for value, runs in values.items()}


# `asyncflow samples`: what the policy said in a step, as text for a person.

_RULE = "=" * 80
_NEWEST_BYTES = 2**20


def samples_text(
    run_dir: Path,
    *,
    steps: tuple[int, int] | None,
    worst: int,
    best: int,
    number: int,
    group: int | None = None,
    search: str = "",
) -> str:
    """Return rollouts of a run, which may be live.

    Args:
        steps: the first and the last step; None: the newest step, or all of them with `group` or `search`.
        worst, best: numbers of rollouts with the lowest and highest reward; both 0: the first `number` ones.
        group: only this group's.
        search: only those whose prompt, response, conversation or ground truth has this text, in any case.

    Raises:
        ConfigError: the run has no such samples.
    """
    lines, unreadable = _kept_lines(run_dir)
    if not lines:
        why = f"{unreadable} damaged lines and no others" if unreadable else "no samples; see rollout.samples_per_step"
        raise ConfigError(f"RUN_DIR: {run_dir / SAMPLES} has {why}")
    lines, again = _newest_of_rows(lines)
    there = sorted({line.step for line in lines})
    if steps is None:
        steps = (there[0], there[-1]) if search or group is not None else (there[-1], there[-1])
    first, last = steps
    where = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [line for line in lines if first <= line.step <= last]
    if not lines:
        named = str(first) if first == last else f"{first}-{last}"
        raise ConfigError(f"--step: {named} has no samples; there are steps {there[0]} to {there[-1]}")
    chosen = [line for line in lines if group in (None, line.group) and (not search or has_text(line.read(), search))]
    if not chosen:
        what = f"--group: {group}" if group is not None else f"--search: {search!r}"
        raise ConfigError(
            f"{what} is in none of the {len(lines)} rollouts kept of {where}; see rollout.samples_per_step"
        )
    if worst or best:
        scored = [line for line in chosen if line.reward is not None]
        low = heapq.nsmallest(worst, scored, key=lambda line: line.reward or 0.0)
        high = heapq.nlargest(best, scored, key=lambda line: line.reward or 0.0)
        shown = low + [line for line in reversed(high) if line not in low]
    else:
        shown = chosen[:number]
    texts = [_text_or_damage(line) for line in shown]
    told = f"{len(shown)} of {len(chosen)} rollouts kept of {where}"
    told += f"; {again} of this run that were drawn again after it went back are left out" if again else ""
    told += f"; {unreadable} lines of this run cannot be read" if unreadable else ""
    return plain("\n".join([*texts, _RULE, told]))


def has_text(line: Mapping[str, Any], search: str) -> bool:
    """Return whether a rollout's prompt, response, ground truth or conversations have a text, in any case."""
    wanted = search.casefold()
    parts = (line.get(name) for name in ("prompt", "response", "ground_truth", "conversations"))
    return not search or any(wanted in text.casefold() for part in parts for text in _texts(part))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON, without keys and roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each) if name != "role" else ()
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def newest_sample(run_dir: Path) -> dict[str, Any] | None:
    """Return the rollout that was kept last, without reading the others; None: there is none."""
    try:
        paths = [(path.stat().st_mtime_ns, path) for path in (run_dir / SAMPLES).glob("rollout-*.jsonl")]
        with max(paths)[1].open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _NEWEST_BYTES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return json_object(line)
    except (OSError, ValueError, *UNREADABLE):
        return None


class _Choice(msgspec.Struct):
    """What rollouts are chosen by."""

    step: int
    group: int = -1
    index: int | None = None
    lineage: int = 0
    reward: float | None = None


class _KeptLine(NamedTuple):
    """Where a rollout stands: those of a long run are gigabytes."""

    step: int
    group: int
    row: int | None
    lineage: int
    reward: float | None
    path: Path
    place: int  # bytes

    def read(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.place)
            return json_object(file.readline())


_decode_choice = json_decoder(_Choice).decode


def _kept_lines(run_dir: Path) -> tuple[list[_KeptLine], int]:
    """Return the rollouts, and how many lines are none."""
    found: list[_KeptLine] = []
    unreadable = 0
    for path in sorted((run_dir / SAMPLES).glob("rollout-*.jsonl")):
        place = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    try:
                        one = _decode_choice(line)
                        found.append(_KeptLine(one.step, one.group, one.index, one.lineage, one.reward, path, place))
                    except UNREADABLE:
                        unreadable += 1  # a crash may have torn it
                    place += len(line)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable") from error
    return found, unreadable


def _newest_of_rows(lines: Sequence[_KeptLine]) -> tuple[list[_KeptLine], int]:
    """Return the lines without those whose row a later lineage drew again, and how many these are."""
    newest: dict[int | None, int] = {}
    for line in lines:
        newest[line.row] = max(line.lineage, newest.get(line.row, line.lineage))
    kept = [line for line in lines if line.row is None or line.lineage == newest[line.row]]
    return kept, len(lines) - len(kept)


class KeptRow(msgspec.Struct):
    """What people are shown of a kept rollout. Lines of other versions may lack some of it."""

    step: int
    index: int | None = None
    group: int | None = None
    lineage: int = 0
    time_s: float = 0.0
    versions: list[tuple[int, int]] = []
    tokens: list[str] = []
    log_probs: list[float | None] = []
    reward: float | None = None
    turn_rewards: list[float | None] = []
    response_tokens: int = 0
    conversations: list[list[dict[str, Any]]] = []
    samples: list[list[tuple[int, str]]] = []
    metrics: dict[str, float | None] = {}


def _text_or_damage(line: _KeptLine) -> str:
    try:
        fields = line.read()
        msgspec.convert(fields, KeptRow)
    except UNREADABLE as error:
        return f"{_RULE}\nstep {line.step}: {line.path}: a line cannot be read: {error}"
    return _text(fields)


def reward_text(line: Mapping[str, Any]) -> str:
    """Return a sample's reward, and those of its turns if it has several."""
    if line.get("reward") is None:
        return "no reward"
    turns = line.get("turn_rewards") or ()
    return f"reward {line['reward']:g}" + (f" (turns: {', '.join(map(_figure, turns))})" if turns else "")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"  # what is no number is null in JSON


def _text(line: dict[str, Any]) -> str:
    """Return a rollout: its conversations and their tokens, with those that are trained in guillemets."""
    reward = reward_text(line)
    # Lines of other versions may lack some of it.
    versions = ", ".join(f"{count} by version {version}" for version, count in line.get("versions") or ())
    cut = ", truncated" if line.get("truncated") else ""
    tokens = f"{line.get('response_tokens', '?')} tokens{f' ({versions})' if versions else ''}{cut}"
    head = f"{_RULE}\nstep {line['step']}, group {line.get('group')}, row {line.get('index')}: {reward}, {tokens}"
    conversations = line.get("conversations") or [
        [{"role": "user", "content": line.get("prompt")}, {"role": "assistant", "content": line.get("response")}]
    ]
    if line.get("metrics"):
        head += "\n" + ", ".join(f"{name} {_figure(value)}" for name, value in line["metrics"].items())
    bodies = ["\n".join(map(_message_text, messages)) for messages in conversations]
    for place, runs in enumerate(line.get("samples") or ()):
        bodies[place] += "\n[tokens] " + "".join(f"«{text}»" if drawn else text for drawn, text in runs)
    return f"{head}\n" + f"\n{'-' * 80}\n".join(bodies) + f"\n[ground truth] {line.get('ground_truth', '')}"


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        content += f"\n  -> {call['function']['name']}({call['function']['arguments']})"
    if thought := message.get("reasoning_content"):
        content = f"<thinks> {thought} </thinks> {content}"
    return f"[{message['role']}] {content}"
