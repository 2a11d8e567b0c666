"""A prompt feed outside of a run: rows come from standard input, a line of JSON each, and the run trains on them.

    asyncflow-launch --set data.path=null --set data.source=feed --run-dir runs/mine
    my_rows | python examples/external_prompts.py runs/mine math

The end of the input ends the run, once all steps that the rows fill are trained. A feeder that was killed is started
again with the same name and the same rows from the first one on: it leaves out those that the run has. Several of them
may feed at once, under a name each; the first one that says `end` ends it for all.
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # at the end of a run the store is gone: no traces of that

import asyncflow
from asyncflow.errors import AsyncFlowError

BATCH = 8


def feed(run_dir: Path, name: str) -> None:
    """Feed until the input ends."""
    with asyncflow.connect(run_dir) as run:
        prompts = run.feed(name)
        rows = map(json.loads, islice(sys.stdin, prompts.last_sequence, None))
        while batch := list(islice(rows, BATCH)):
            print(f"fed {prompts.put(batch)} rows", flush=True)  # noqa: T201
        prompts.end()


try:
    feed(Path(sys.argv[1]), sys.argv[2])
except AsyncFlowError as error:
    sys.exit(f"Error: {error}")
