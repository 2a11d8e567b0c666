"""A teacher behind a server, outside of a run: gives each drawn token its log-probability, for distillation.

    vllm serve org/math-7b                                     any server that gives a prompt's log-probabilities so
    asyncflow-launch CONFIG --set 'algorithm={name: distill, teacher_coef: 1.0}' \
        --roles rollout:1,actor:1,teacher:0 --run-dir runs/mine
    python examples/external_teacher.py runs/mine http://127.0.0.1:8000 org/math-7b

MODEL is the name under which it is served, and a directory or a name on the Hub with its tokenizer, which must number
tokens as the policy's does. The server applies no temperature to a prompt, so the run's must be 1; and its positions
must exceed the longest sample by one. Ends with the run; one that leaves or is killed costs only what it had in hand.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # at the end of a run the store is gone: no traces of that

import yaml
from torch import Tensor
from transformers import AutoTokenizer

import asyncflow
from asyncflow.errors import AsyncFlowError

TIMEOUT_S = 600
AT_A_TIME = 16  # requests
PAUSES_S = (0.5, 2.0, 8.0, 30.0)  # before a request is sent again that failed in a way that may pass


def check_run(config: dict[str, dict[str, object]], model: str) -> None:
    """Exit if the server's log-probabilities are not those that the run needs."""
    if config["rollout"]["temperature"] != 1:
        sys.exit(f"Error: rollout.temperature {config['rollout']['temperature']}: a server scores at 1; set it to that")
    policy, teacher = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (config["model"]["path"], model))
    if other := [token for token, number in policy.items() if teacher.get(token) != number]:
        sys.exit(f"Error: {model} has other tokens than the policy, e.g. for {other[0]!r}; serve one with the same")


def score(url: str, model: str, tokens: Tensor) -> list[float]:
    """Like `score_once`; tried again if the server is away, busy or restarting."""
    for pause_s in PAUSES_S:
        try:
            return score_once(url, model, tokens)
        except OSError as error:
            if 400 <= getattr(error, "code", 500) < 500:  # a refusal, which is final
                raise
            time.sleep(pause_s)
    return score_once(url, model, tokens)


def score_once(url: str, model: str, tokens: Tensor) -> list[float]:
    """Return a number for each token of a sample, given those before it; the first one's means nothing."""
    body = {"model": model, "prompt": tokens.tolist(), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        known = json.load(answer)["choices"][0].get("prompt_logprobs")
    if known is None or len(known) != len(tokens):
        raise OSError(f"{url} does not return `prompt_logprobs`")
    return [0.0, *(one[str(token)]["logprob"] for one, token in zip(known[1:], tokens[1:].tolist(), strict=True))]


def samples_of(rows: Sequence[Tensor], lengths: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the samples of each row, which lie one after another."""
    return [list(row.split(own.tolist())) for row, own in zip(rows, lengths, strict=True)]


def serve(run_dir: Path, url: str, model: str) -> None:
    """Score until the run ends."""
    check_run(yaml.safe_load((run_dir / "config.yaml").read_text()), model)
    with asyncflow.connect(run_dir, name=f"teacher-{os.getpid()}") as run, ThreadPoolExecutor(AT_A_TIME) as requests:
        for lease in run.stream("teacher_log_probs", num_rows=64):
            rows = samples_of(list(lease["tokens"].rows()), list(lease["sample_lengths"].rows()))
            scored = requests.map(partial(score, url, model), [sample for row in rows for sample in row])
            masks = [mask.tolist() for mask in lease["response_mask"].rows()]
            values = [[value for _ in row for value in next(scored)] for row in rows]
            drawn = [
                [value for value, mask in zip(row, own, strict=True) if mask]
                for row, own in zip(values, masks, strict=True)
            ]
            if lease.put({"teacher_log_probs": drawn}):
                print(f"scored {len(lease)} rows of step {lease.partition}", flush=True)  # noqa: T201


try:
    serve(Path(sys.argv[1]), *sys.argv[2:4])
except (AsyncFlowError, OSError) as error:
    sys.exit(f"Error: {error}")
