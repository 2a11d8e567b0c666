"""`asyncflow samples`: what the policy said in a step, as a person reads it."""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncflow.errors import ConfigError
from asyncflow.json_lines import readable_lines
from asyncflow.run_files import SAMPLES

_RULE = "=" * 100


def samples_text(run_dir: Path, *, step: int | None, worst: int, best: int, number: int) -> str:
    """Return the rollouts of a step.

    Args:
        run_dir: of a run, which may be live.
        step: None: the newest.
        worst, best: so many with the lowest, the highest reward; 0 both: the first ones.
        number: of the first ones.

    Raises:
        ConfigError: there are none.
    """
    lines = list(_lines(run_dir))
    if not lines:
        raise ConfigError(f"RUN_DIR: {run_dir / SAMPLES} has no samples; see rollout.samples_per_step")
    steps = sorted({line["step"] for line in lines})
    step = steps[-1] if step is None else step
    chosen = [line for line in lines if line["step"] == step]
    if not chosen:
        raise ConfigError(f"--step: {step} has no samples; there are steps {steps[0]} to {steps[-1]}")
    if worst or best:
        scored = [line for line in chosen if line["reward"] is not None]
        low = heapq.nsmallest(worst, scored, key=lambda line: line["reward"])
        high = heapq.nlargest(best, scored, key=lambda line: line["reward"])
        shown = low + [line for line in reversed(high) if line not in low]
    else:
        shown = chosen[:number]
    return "\n".join(map(_text, shown)) + f"\n{_RULE}\n{len(shown)} of {len(chosen)} rollouts kept of step {step}"


def _lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield what whole lines hold; a live run may be writing the last one."""
    for path in sorted((run_dir / SAMPLES).glob("rollout-*.jsonl")):
        yield from readable_lines(path)


def _text(line: dict[str, Any]) -> str:
    """Return a rollout: its conversations, and their tokens, those that are trained in angle quotation marks."""
    reward = "no reward" if line["reward"] is None else f"reward {line['reward']:g}"
    versions = ", ".join(f"{count} by version {version}" for version, count in line["versions"])
    cut = ", truncated" if line["truncated"] else ""
    tokens = f"{line['response_tokens']} tokens ({versions}){cut}"
    head = f"{_RULE}\ngroup {line['group']}, row {line['index']}: {reward}, {tokens}"
    conversations = line.get("conversations") or [
        [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line["response"]}]
    ]
    if line.get("metrics"):
        head += "\n" + ", ".join(f"{name} {value:g}" for name, value in line["metrics"].items())
    bodies = ["\n".join(map(_message_text, messages)) for messages in conversations]
    for place, runs in enumerate(line.get("samples") or ()):
        bodies[place] += "\n[tokens] " + "".join(f"«{plain(text)}»" if drawn else plain(text) for drawn, text in runs)
    return f"{head}\n" + f"\n{'-' * 100}\n".join(bodies) + f"\n[ground truth] {plain(line.get('ground_truth', ''))}"


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        content += f"\n  -> {call['function']['name']}({call['function']['arguments']})"
    if thought := message.get("reasoning_content"):
        content = f"<thinks> {thought} </thinks> {content}"
    return f"[{message['role']}] {plain(content)}"


def plain(text: str) -> str:
    """Return a text without what would command a terminal; lines stay."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
