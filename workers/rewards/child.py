"""The process in which `workers.rewards.isolated` compares answers: a JSON line in, one out, until its input ends.

python -m workers.rewards.child '{"function": "regex", "pattern": "..."}'
{"response": "...", "answer": "..."}  ->  true
"""

import json
import os
import resource
import sys

from asyncflow.lifeline import die_with_parent
from workers.rewards.math_verify import VerifiedMath
from workers.rewards.regex import LastMatch

_MEMORY_BYTES = 4 * 2**30
"""A power tower in an answer would otherwise take what the machine has."""


def main() -> None:
    """Answer until there is no more to answer."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    settings = json.loads(sys.argv[1])
    compare = VerifiedMath() if settings["function"] == "math_verify" else LastMatch(settings["pattern"])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints, also from C, must not answer
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(compare(question["response"], question["answer"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
