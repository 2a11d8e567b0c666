"""What a Gantt chart shows, as a layout and as a page."""

import itertools
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from launcher.timeline.gantt_chart import WAITING, GanttChart, gantt_html
from launcher.timeline.run_timeline import RunTimeline, Span, in_order

SPANS = {
    "actor-0": [Span("wait for rows", 0, 3, {"step": 1}), Span("forward_backward", 3, 7, {"step": 1})],
    "rollout-0-0": [
        Span("check weights", 0, 1, {}),
        Span("load weights", 2, 2.0001, {}),
        Span("generate", 2.0001, 12, {"step": 1, "version": 0}),
    ],
    "rollout-1-0": [Span("generate", -5, -1, {"step": 0}), Span("wait for prompts", 4, 5, {})],
    "storage-0-0": [Span("serve", 0, 10, {})],
}


def chart_of(spans: dict[str, list[Span]], step_ends: Sequence[float] = (0, 10), title: str = "a run") -> GanttChart:
    timeline = RunTimeline(spans, dict(enumerate(step_ends)), {})
    return GanttChart.from_timeline(timeline, timeline.account_by_role(), title=title)


def run_of(num_rollouts: int, num_steps: int) -> GanttChart:
    generated = [Span("generate", step, step + 0.8, {"step": step}) for step in range(num_steps)]
    spans = {f"rollout-{index}-0": generated for index in range(num_rollouts)}
    return chart_of(spans, range(num_steps + 1))


def test_rows_are_processes_in_order_without_the_services() -> None:
    chart = chart_of(SPANS)
    assert [row.label for row in chart.rows] == ["rollout-0", "rollout-1", "actor"]
    tops = [row.top for row in chart.rows]
    assert tops[1] - tops[0] == 1 < tops[2] - tops[1], "roles are set apart"
    assert chart.height == tops[2] + 1


def test_ranks_of_a_gang_keep_their_numbers_and_count_upwards() -> None:
    names = ["actor-10", "actor-2", "weights-0-0", "rollout-10-0", "rollout-9-0"]
    assert in_order(names) == ["rollout-9-0", "rollout-10-0", "actor-2", "actor-10", "weights-0-0"]
    spans = {name: [Span("generate", 0, 1, {})] for name in ("rollout-0-0", "rollout-0-1", "rollout-1-0")}
    assert [row.label for row in chart_of(spans).rows] == ["rollout-0-0", "rollout-0-1", "rollout-1"]


def test_bars_are_cut_to_the_window_and_waiting_is_grey() -> None:
    rollout, other, actor = chart_of(SPANS).rows
    assert [(bar.start, bar.end) for bar in other.bars] == [(4, 5)]
    assert max(bar.end for bar in rollout.bars) == 10
    assert [bar.colour == WAITING for bar in actor.bars] == [True, False]
    assert [bar.told for bar in rollout.beside] == ["check weights: 1.000 s"]


def test_no_name_of_a_file_becomes_an_element() -> None:
    page = gantt_html(chart_of({"<img src=x onerror=alert(1)>-0": [Span("<b>", 0, 3, {"<i>": "<u>"})]}), width=1000)
    assert not {"<img", "<b>", "<i>", "<u>"} & set(re.findall(r"<(?:img|b>|i>|u>)", page))


def test_short_swap_of_the_weights_is_seen() -> None:
    generate, swap = chart_of(SPANS).rows[0].bars
    assert swap.told.startswith("load weights") and generate.number == "1", "it is drawn over its neighbours"
    assert swap.end - swap.start >= 10 / 1000


def test_legend_has_what_is_shown() -> None:
    assert [name for name, _ in chart_of(SPANS).legend] == [
        "generate", "load weights", "forward_backward", "check weights", "waiting",
    ]  # fmt: skip
    assert len({colour for _, colour in chart_of(SPANS).legend}) == 5


@pytest.mark.parametrize(("num_steps", "first"), [(1, [1]), (10, [1, 2, 3]), (300, [20, 40, 60])])
def test_step_numbers_do_not_crowd(num_steps: int, first: list[int]) -> None:
    chart = run_of(1, num_steps)
    numbers = chart.step_numbers(at_most=40)
    assert [step for step, _ in numbers][:3] == first
    gaps = [after - before for (_, before), (_, after) in itertools.pairwise(numbers)]
    assert all(gap >= num_steps / 40 for gap in gaps)
    assert len(chart.step_lines(at_most=100)) <= 101
    assert len(chart.time_ticks(at_most=10)) <= 11


def test_page_is_well_formed_and_escapes_names() -> None:
    page = gantt_html(chart_of(SPANS, title="a <run> & more"), width=1000)
    document = ElementTree.fromstring(page)
    assert document.findtext("body/h1") == "a <run> & more"
    chart = next(document.iter("svg"))
    assert [text.text for text in chart.iter("text") if text.get("x") == "4"] == ["rollout-0", "rollout-1", "actor"]
    assert any("generate, step 1" in (bar.findtext("title") or "") for bar in chart.iter("rect"))
    assert [cell.text for cell in document.iter("th")][-2:] == ["rollout", "actor"]


def test_run_without_steps_is_drawn() -> None:
    chart = chart_of({"rollout-0-0": [Span("wait for weights", 0, 1, {})], "storage-0-0": []}, [])
    ElementTree.fromstring(gantt_html(chart, width=1000))
    services = chart_of({"weights-0-0": [Span("seal weights", 0, 1, {})]}, [])
    ElementTree.fromstring(gantt_html(services, width=1000))
