"""What is possible in `benchmarks/colocated`, and the planner's simulated run of the same."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.ablation.workloads import WORKLOADS
from benchmarks.colocated.part_ideal import FORMS, Form, halved, ideal_step_s, run_config, signs, values_of
from launcher.plan.scenario import Latency, Scenario, Times
from launcher.plan.world import simulate

_STEPS, _SKIP = 8, 2
_FREE = Latency(0, 0, 0, 0, 0, 0, 0, 0, 0)


def simulated_s(values: Mapping[str, Any]) -> float:
    config = run_config(values)
    times = replace(Times.of_sim(config, prompt_tokens=0), latency=_FREE)
    return simulate(Scenario.from_config(config, times), steps=_STEPS).step_s(_SKIP)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("name", "switch_s"), [("w0", 2.0), ("w3", 2.0)])
def test_without_latencies_a_simulated_run_takes_what_is_possible(name: str, switch_s: float, form: Form) -> None:
    workload = halved(WORKLOADS[name])
    ideal_s = ideal_step_s(workload, form, switch_s=switch_s, seed=0, steps=_STEPS, skip=_SKIP)
    ran_s = simulated_s(values_of(workload, form, switch_s=switch_s, steps=_STEPS, seed=0))
    # Ranks of the trainer get rounds of whole rows, never exactly even.
    assert ideal_s == pytest.approx(ran_s, rel=0.03)


def test_long_tails_and_long_switches_favour_the_separated_form() -> None:
    def gain(name: str, switch_s: float) -> float:
        rival, ours = (
            ideal_step_s(halved(WORKLOADS[name]), form, switch_s=switch_s, seed=0, steps=_STEPS, skip=_SKIP)
            for form in (FORMS[0], FORMS[-1])
        )
        return rival / ours

    assert gain("w0", 0.0) < gain("w3", 0.0)
    assert gain("w0", 0.0) < gain("w0", 2.0) < gain("w0", 10.0)


def test_only_pairs_that_differ_for_sure_have_a_sign() -> None:
    known = dict.fromkeys(FORMS, 1.0) | {FORMS[0]: 1.04, FORMS[1]: 1.06, FORMS[2]: 0.9, FORMS[3]: 2.0}
    for predicted, wrong in (({}, 0), ({FORMS[0]: 0.5, FORMS[3]: 0.5}, 0), ({FORMS[1]: 0.99, FORMS[2]: 1.01}, 2)):
        step_s, predicted_s = (
            {("w0", 2.0, form): each for form, each in of.items()} for of in (known, known | predicted)
        )
        assert signs(step_s, predicted_s) == (2, wrong)
