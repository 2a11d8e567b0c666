"""The page of `asyncflow view` and report.html in a real browser: Chromium without a window, driven by Playwright."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from asyncflow.clock import HostClock
from asyncflow.job import GangSpec
from asyncflow.process import PAUSE_SIGNAL, RESUME_SIGNAL
from asyncflow.run_files import JOB_FILE
from launcher.process.progress import Status
from launcher.run.status import RunEnd, RunStatus
from launcher.run.supervisor import RestartLog
from launcher.view.report_page import write_report
from launcher.view.run_reader import MOST_POINTS
from tests.support.logged_runs import add_steps, append, make_run

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")

WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)
EVIL = "</script><img src=x onerror=\"document.title='owned'\"> \x1b[31mred \u202eright to left"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Root may not use Chromium's sandbox; the pages are this repository's.
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Yield an empty page. What its scripts raise, or its policy refuses, fails the test."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield opened
    opened.close()
    assert errors == []


@contextmanager
def served(*run_dirs: Path, control: bool = False) -> Iterator[str]:
    """Serve runs from a thread; yields the address of the page."""
    from launcher.view.server import ViewServer

    server, address, ready = ViewServer(run_dirs, token="secret", control=control), [""], threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address[0] = f"http://127.0.0.1:{runner.addresses[0][1]}/secret/"
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(WAIT_MS / 1000)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def panel(page: Any, title: str) -> Any:
    return page.locator(".panel", has=page.locator("h3", has_text=re.compile(f"^{title} ")))


def curve_is_drawn(page: Any, title: str) -> bool:
    """Return whether a panel's canvas has pixels of a colour, not only of its axes, which are grey."""
    return bool(
        panel(page, title)
        .locator("canvas")
        .first.evaluate(
            """canvas => {
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                for (let i = 0; i < data.length; i += 4)
                    if (data[i + 3] > 128 && Math.max(data[i], data[i + 1], data[i + 2])
                        - Math.min(data[i], data[i + 1], data[i + 2]) > 60) return true;
                return false;
            }"""
        )
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first", "[]")


def test_a_finished_run_shows_its_curves_and_samples(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 30, reward=0.25)
    shares = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    append(run_dir / "evaluation.jsonl", {"step": 20, "lineage": 0, **shares})
    with served(run_dir) as address:
        page.goto(address)
        page.wait_for_selector("article.sample")
        assert curve_is_drawn(page, "Reward")
        assert "0.25" in page.locator(".figures").inner_text()
        assert "step 30" in page.locator("header").inner_text()
        assert "of 60 kept rollouts" in page.locator("body").inner_text()
        page.get_by_label("steps").fill("3")
        page.get_by_label("steps").press("Enter")
        expect(page.locator("#page")).to_contain_text("of 2 kept rollouts")
        assert page.locator("article.sample").count() == 2
        for text, says in (("3 - 4", "of 4 kept rollouts"), ("abc", '"abc" is no step'), ("4-3", "give 3-4")):
            page.get_by_label("steps").fill(text)
            page.get_by_label("steps").press("Enter")
            expect(page.locator("#page")).to_contain_text(says)
        assert page.locator("article.sample").count() == 0


def test_a_plot_takes_the_colours_of_the_scheme_that_the_reader_changes_to(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 30)
    # Whether a pixel has the colour of lines, of the scheme that is chosen.
    look = """() => {
        const named = [...document.querySelectorAll(".panel")].find(one => one.textContent.startsWith("Reward "));
        const canvas = named.querySelector("canvas");
        const line = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const wanted = [1, 3, 5].map(at => parseInt(line.slice(at, at + 2), 16));
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] === 255 && wanted.every((value, k) => data[i + k] === value)) return true;
        return false;
    }"""
    with served(run_dir) as address:
        page.goto(address)
        page.wait_for_selector("article.sample")
        for scheme in ("light", "dark", "light"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(look, timeout=WAIT_MS)


def test_drawn_tokens_are_the_redder_the_further_the_engines_differ(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    (run_dir / "trace").mkdir()
    drawn = {"tokens": ["a", " b", "<b>"], "log_probs": [-1.0, -2.0, -3.0], "versions": [[4, 2], [5, 1]]}
    line = {"step": 1, "group": 0, "index": 7, "prompt": "p", "response": "a b<b>", "reward": 9.0, "response_tokens": 3}
    append(run_dir / "samples" / "rollout-0.jsonl", line | drawn)
    append(run_dir / "trace" / "trained-0.jsonl", {"index": 7, "step": 1, "log_probs": [-1.0, -2.25, -5.0]})
    with served(run_dir) as address:
        page.goto(address)
        page.get_by_label("order").select_option("best")
        page.get_by_text("drawn tokens: engine and trainer differ by 0.75 nats").click()
        boxes = page.locator(".token")
        assert boxes.all_text_contents() == ["a", " b", "<b>"]
        assert [box.evaluate("box => box.style.getPropertyValue('--gap')") for box in boxes.all()] == [
            "0.000",
            "0.500",
            "1.000",
        ]
        colours = [box.evaluate("box => getComputedStyle(box).backgroundColor") for box in boxes.all()]
        assert len(set(colours)) == 3, colours
        assert [("later" in (box.get_attribute("class") or "")) for box in boxes.all()] == [False, False, True]
        assert "version 5" in (boxes.nth(2).get_attribute("title") or "")


def test_the_timeline_grows_zooms_and_names_a_span(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    (run_dir / "timeline").mkdir()
    spans = run_dir / "timeline" / "actor-0.jsonl"
    for second in range(20):
        append(spans, {"name": "forward_backward", "start": second, "end": second + 0.5, "step": second})
        append(spans, {"name": "wait for rows", "start": second + 0.5, "end": second + 1, "step": second})
    with served(run_dir) as address:
        page.goto(address)
        page.get_by_label("time shown").select_option("10")
        canvas = page.get_by_label("timeline", exact=True)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        said = page.locator(".panel:has(canvas.spans) .hover")
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 8)
        expect(said).to_have_text("actor-0: wait for rows 0.5 s (step 19)")
        page.mouse.move(box["x"] + 112, box["y"] + 8)
        expect(said).to_contain_text("(step 10)")
        for _ in range(12):
            page.mouse.wheel(0, -100)
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 8)
        expect(said).to_contain_text("(step 10)")
        canvas.dblclick(position={"x": 300, "y": 8})
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 8)
        expect(said).to_contain_text("(step 19)")


def test_a_row_is_followed(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    line = {"step": 1, "group": 1, "lineage": 0, "indices": [0], "versions": [0, 0], "time_s": 1.5}
    append(run_dir / "ledger.jsonl", line | {"admitted_step": 1, "epoch": 0, "staleness": 0})
    with served(run_dir) as address:
        page.goto(address)
        page.get_by_text("follow this row").first.click()
        expect(page.locator("article.sample details pre").first).to_contain_text("trained in step 1")


def timeline_says(page: Any, share: float, y: int, text: str) -> None:
    """Point at a share of the stretch that the timeline was asked for, and wait for what it says."""
    box = page.get_by_label("timeline", exact=True).bounding_box()
    page.mouse.move(box["x"] + 110 + (0.1 + share) / 1.2 * (box["width"] - 110), box["y"] + y)
    expect(page.locator(".panel:has(canvas.spans) .hover")).to_contain_text(text)


def test_a_row_is_followed_on_the_timeline(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    for folder in ("trace", "timeline"):
        (run_dir / folder).mkdir()
    append(run_dir / "metrics.jsonl", {"step": 2, "lineage": 0, "time_s": 9.5})
    lease = {"task": "actor_rollout", "token": 1, "step": 2, "rows": [0], "lineage": 0, "to": "rollout-0/0@0.abc"}
    append(run_dir / "trace" / "leases-controller-0.jsonl", lease | {"time_s": 3.0})
    append(run_dir / "trace" / "leases-controller-0.jsonl", lease | {"time_s": 6.0, "token": 2, "to": EVIL})
    line = {"step": 2, "group": 1, "lineage": 0, "indices": [0], "versions": [0, 0], "time_s": 9.0}
    append(run_dir / "ledger.jsonl", line | {"admitted_step": 1, "epoch": 0, "staleness": 0})
    spans = (("actor-0", "publish weights", 1009.25), ("rollout-0-0", "generate", 1003.25), ("ref-0-0", "old", 5000.0))
    for process, name, start in spans:
        span = {"name": name, "start": start, "end": start + 0.25, "step": 2}
        append(run_dir / "timeline" / f"{process}.jsonl", span)
    with served(run_dir) as address:
        page.goto(address)
        timeline = page.locator(".panel:has(canvas.spans)")
        expect(timeline).to_contain_text("seconds before the newest span")
        page.get_by_text("follow this row").first.click()
        entries = page.locator("article.sample").first.locator(".moments button")
        expect(entries).to_have_count(5)
        expect(entries.nth(1)).to_have_text("1: +0.000 s actor_rollout: leased to rollout-0/0@0.abc")
        expect(entries.nth(3)).to_have_text("3: +6.000 s trained in step 2")
        entries.nth(0).click()
        expect(timeline).to_contain_text("row 0, seconds since moment 1")
        expect(page.get_by_label("timeline", exact=True)).to_be_in_viewport()
        # Of the row's 6.5 s; there is a tenth as much room on both sides.
        timeline_says(page, 0, 30, "row 0, 1: actor_rollout: leased to rollout-0/0@0.abc")
        timeline_says(page, 6 / 6.5, 30, "row 0, 3: trained in step 2")
        timeline_says(page, 0.4 / 6.5, 8, "rollout-0-0: generate 0.25 s (step 2)")
        entries.nth(1).click()  # the three seconds until the second lease
        expect(timeline).to_contain_text("row 0 from moment 1, seconds since moment 1")
        timeline_says(page, 0.45 / 3, 8, "rollout-0-0: generate 0.25 s (step 2)")
        timeline_says(page, 1, 8, "row 0, 2: actor_rollout: leased to </script>")
        page.get_by_role("button", name="the newest again").click()
        expect(timeline).to_contain_text("seconds before the newest span")
        assert page.locator("img").count() == 0


@contextmanager
def launched(run_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Give a run a launcher of this host: a process that waits until it is killed."""
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    job = {"clock": {"host": HostClock.from_wall_clock().host}, "launcher_pid": launcher.pid, "started_at": time.time()}
    (run_dir / JOB_FILE).write_text(json.dumps(job))
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def drawn_steps(page: Any, title: str) -> list[float]:
    """Return the first and the last step that a panel shows."""
    find = "title => page.panels.find((one) => one.spec.title === title).plot.scales.x"
    return [page.evaluate(f"{find}.{end}", title) for end in ("min", "max")]


@pytest.mark.parametrize("end", ["done", "killed"])
def test_a_live_run_grows_without_a_reload_until_it_ends(
    run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(RunStatus, "read", lambda path: RunStatus(path, 0.0, (), {}))
    state, header, now = (
        page.locator("header .state"),
        page.locator("header"),
        page.get_by_role("link", name="What runs"),
    )
    with launched(run_dir) as launcher, served(run_dir) as address:
        page.goto(address)
        expect(state).to_have_text("running")
        expect(page.locator("#page")).to_contain_text("No step is finished yet")
        expect(page.get_by_role("link", name="Does it learn?")).to_be_hidden()
        add_steps(run_dir, 1, 4)
        expect(header).to_contain_text("step 4")
        expect(page.get_by_role("link", name="Does it learn?")).to_be_visible()
        expect(now).to_be_visible()
        assert curve_is_drawn(page, "Reward") and drawn_steps(page, "Reward") == [1, 4]
        ticks = "page.panels.find((one) => one.spec.title === 'Reward').plot.axes[0]._splits"
        assert page.evaluate(ticks) == [1, 2, 3, 4], "there is no step 1.5"
        add_steps(run_dir, 5, 9)
        expect(header).to_contain_text("step 9")
        assert drawn_steps(page, "Reward") == [1, 9]
        if end == "done":
            RunEnd(run_dir, ["done (step 9/9)"], 0, 0.0).write()
        launcher.kill()
        launcher.wait()
        expect(state).to_have_text(end)
        expect(state).to_have_class(f"state {end}")
        expect(now).to_be_hidden()
        expect(header).not_to_contain_text("left")
        told = "done (step 9/9)" if end == "done" else "ended without a word (step 9)"
        expect(page.locator("section:has(#failures)")).to_contain_text(told)
        assert drawn_steps(page, "Reward") == [1, 9]


def test_what_a_run_says_is_text(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    line = {"step": 1, "group": 1, "index": 9, "prompt": EVIL, "response": EVIL, "ground_truth": EVIL, "reward": 9.0}
    append(run_dir / "samples" / "rollout-0.jsonl", line | {"response_tokens": 1, "metrics": {EVIL: 1.0}})
    append(run_dir / "metrics.jsonl", {"step": 2, "lineage": 0, "reward_mean": 1.0, f"source/{EVIL}/reward_mean": 1.0})
    (run_dir / "logs" / "actor").mkdir()
    (run_dir / "logs" / "actor" / "0.log").write_text(f"{EVIL}\n")
    address = write_report(run_dir).as_uri()
    with served(run_dir) as live:
        for url in (live, address):
            page.goto(url)
            page.get_by_label("order").select_option("best")
            page.wait_for_selector("article.sample img, article.sample:has-text('onerror')")
            page.get_by_text("logs of every process").click()
            expect(page.locator("section:has(#failures) details pre")).to_contain_text("right to left")
            assert page.locator("img").count() == 0
            assert page.title() != "owned"
            said = page.locator("body").inner_text()
            assert "onerror" in said and "\u202e" not in said and "\x1b" not in said


def fail(run_dir: Path, said: str) -> None:
    """Write what the actor's first rank leaves when an exception ends it."""
    (run_dir / "logs" / "actor").mkdir()
    (run_dir / "logs" / "actor" / "0.error.json").write_text("{}")
    (run_dir / "logs" / "actor" / "0.log").write_text(
        f'Traceback (most recent call last):\n  File "a.py", line 7, in train\nValueError: {said}\n'
    )


def test_a_failure_has_its_stack_closed_until_somebody_wants_it(run_dir: Path, page: Any) -> None:
    add_steps(run_dir, 1, 1)
    fail(run_dir, EVIL)
    RunEnd(run_dir, ["failed (step 1): actor rank 0 failed: ValueError"], 1, 0.0).write()
    report = write_report(run_dir).as_uri()
    with served(run_dir) as live:
        for url in (live, report):
            page.goto(url)
            stack = page.locator("section:has(#failures) details.failure")
            expect(stack.locator("summary")).to_contain_text("stack of actor/0: ValueError: </script>")
            expect(stack.locator("pre")).to_be_hidden()
            stack.locator("summary").click()
            expect(stack.locator("pre")).to_contain_text('File "a.py", line 7, in train')
            assert page.locator("img").count() == 0 and "\u202e" not in page.locator("body").inner_text()


def test_a_process_that_was_started_again_leads_to_its_stack(
    run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = RestartLog()
    status = RunStatus(
        run_dir,
        1.0,
        (GangSpec("actor", "actor", 0, 1, ("cpu",)),),
        {("actor", 0): Status("training")},
        restarts=restarts,
    )
    monkeypatch.setattr(RunStatus, "read", lambda path: status)
    with launched(run_dir), served(run_dir) as address:
        page.goto(address)
        page.get_by_text("every process", exact=True).click()
        expect(page.locator("#page")).to_contain_text("Nothing failed.")
        fail(run_dir, "no row")
        restarts.started_again("actor")
        restarts.record_failure("actor rank 0 failed: ValueError: no row")
        page.get_by_role("button", name="stack").click()
        stack = page.locator("details.failure")
        expect(stack.locator("pre")).to_contain_text("in train")
        add_steps(run_dir, 1, 2)
        expect(page.locator("header")).to_contain_text("step 2")
        expect(stack.locator("pre")).to_be_visible()


def test_several_runs_are_drawn_over_each_other_with_what_differs(tmp_path: Path, run_dir: Path, page: Any) -> None:
    others = [make_run(tmp_path / name, "[]") for name in ("second", "third")]
    for number, one in enumerate((run_dir, *others)):
        add_steps(one, 1, 5, reward=number / 2)
    config = others[0] / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 7", 1))
    with served(run_dir, *others) as address:
        page.goto(address)
        page.wait_for_selector("article.sample")
        header = page.locator("header").inner_text()
        assert all(name in header for name in ("first", "second", "third"))
        expect(page.locator("section:has(#settings)")).to_contain_text("seed")
        page.get_by_label("run", exact=True).select_option("1")
        page.wait_for_selector("article.sample")


def test_an_empty_run_and_one_that_was_killed_say_so(tmp_path: Path, run_dir: Path, page: Any) -> None:
    killed, failed = (make_run(tmp_path / name, "[]") for name in ("killed", "failed"))
    add_steps(killed, 1, 3)
    add_steps(failed, 1, 3)
    RunEnd(failed, ["failed (step 3): actor rank 0 failed: out of memory"], 1, 0.0).write()
    lost = make_run(tmp_path / "lost", "[]")
    (lost / "metrics.jsonl").write_bytes(b"\x00\xff\n" * 9)
    (lost / "end.json").write_text("{")
    with served(lost) as address:
        page.goto(address)
        expect(page.locator("header .state")).to_have_text(["unknown"])
        expect(page.locator("body")).to_contain_text("No step can be read: see What failed?")
        expect(page.locator("section:has(#failures)")).to_contain_text("and 5 more lines of that file")
        expect(page.locator(".ended")).to_contain_text("end.json cannot be read")
    with served(run_dir, killed, failed) as address:
        page.goto(address)
        expect(page.locator("header .state")).to_have_text(["killed", "killed", "failed"])
        says = ["first: ended without a word (step 0)", "killed: ended without a word (step 3)", "out of memory"]
        expect(page.locator(".ended")).to_contain_text(says)
        expect(page.locator(".ended").nth(1)).to_contain_text(f"resume with: asyncflow-launch --resume {killed}")
        page.get_by_label("run", exact=True).select_option("2")
        page.wait_for_selector("article.sample")
        expect(page.locator("section:has(#failures)")).to_contain_text("out of memory")


def test_a_run_without_a_step_opens_its_logs_and_shows_no_empty_panels(run_dir: Path, page: Any) -> None:
    (run_dir / "logs" / "launcher.log").write_text("checking the model\n")
    with served(run_dir) as address:
        page.goto(address)
        expect(page.locator("section:has(#failures) details pre")).to_have_text("checking the model\n")
        expect(page.locator("#page")).to_contain_text("no samples yet")
        expect(page.get_by_role("link")).to_have_text(["What does it say?", "What failed?", "Settings"])
        expect(page.get_by_label("order")).to_be_hidden()
        (run_dir / "timeline").mkdir()
        append(run_dir / "timeline" / "actor-0.jsonl", {"name": "load", "start": 0, "end": 1})
        page.reload()
        expect(page.get_by_role("link", name="Is it fast?")).to_be_visible()


def test_several_figures_of_several_runs_are_all_named_below_their_panel(
    tmp_path: Path, run_dir: Path, page: Any
) -> None:
    others = [make_run(tmp_path / f"run-with-a-long-name-{k}", "[]") for k in range(3)]
    for one in (run_dir, *others):
        for step in (1, 2):
            shares = {"actor": 0.25, "rollout": 0.5, "ref": 0.75}
            append(one / "metrics.jsonl", {"step": step, "lineage": 0, "idle_fraction": shares})
    with served(run_dir, *others) as address:
        page.goto(address)
        said = panel(page, "Idle").locator(".hover")
        expect(said).to_contain_text("run-with-a-long-name-2 rollout 0.5")
        assert said.evaluate("node => node.scrollWidth <= node.clientWidth")
        marks = said.locator("i").evaluate_all("marks => marks.map((mark) => mark.className)")
        assert marks == ["", "dash1", "dash2"] * 4


def test_a_panel_has_every_held_out_set_and_says_nothing_of_a_run_beyond_its_end(
    tmp_path: Path, run_dir: Path, page: Any
) -> None:
    other = make_run(tmp_path / "other", "[]")
    add_steps(run_dir, 1, 4, reward=0.25)
    add_steps(other, 1, 8, reward=0.75)
    shares = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    sets = {f"{name}/{key}": value for name in ("sums", "words") for key, value in shares.items()}
    append(other / "evaluation.jsonl", {"step": 4, "lineage": 0, **shares, **sets})
    with served(run_dir, other) as address:
        page.goto(address)
        expect(panel(page, "Held-out accuracy").locator(".hover")).to_have_text(
            "newestother sums/accuracy 0.5other words/accuracy 0.5"
        )
        reward = panel(page, "Reward")
        expect(reward.locator(".hover")).to_have_text("newestfirst 0.25other 0.75")
        box = reward.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
        expect(reward.locator(".hover")).to_have_text("step 8other 0.75")


def test_what_is_selected_of_a_live_run_stays_selected(
    run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = RestartLog(last_error="actor rank 0 failed: out of memory", last_error_at=1.0)
    monkeypatch.setattr(RunStatus, "read", lambda path: RunStatus(path, 0.0, (), {}, restarts=restarts))
    with launched(run_dir), served(run_dir) as address:
        page.goto(address)
        error = page.locator(".problem")
        expect(error).to_contain_text("out of memory")
        error.evaluate("node => getSelection().selectAllChildren(node)")
        add_steps(run_dir, 1, 2)
        expect(page.locator("header")).to_contain_text("step 2")
        assert "out of memory" in page.evaluate("getSelection().toString()")


def test_the_depth_of_the_queue_is_a_curve_over_the_time_that_it_is_watched(
    run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_steps(run_dir, 1, 1)
    room = {"live_rows": 8, "row_limit": 0, "live_bytes": 0, "waiting_puts": 0, "lost_rows": 0}
    counts = {"controller": "controller-0", "waiting": 0, "leased": 0, "acked": 0, "rows_per_s": 0.0}
    seconds = itertools.count()

    def read(path: Path) -> RunStatus:
        second = next(seconds)
        tasks = [counts | {"task": "actor", "ready": 4}, counts | {"task": "ref", "ready": min(second, 3)}]
        return RunStatus(path, 1_800_000_000.0 + second, (), {}, [room | {"tasks": tasks}])

    monkeypatch.setattr(RunStatus, "read", read)
    with launched(run_dir), served(run_dir) as address:
        page.goto(address)
        depths = panel(page, "Queue depth")
        expect(depths.locator(".hover")).to_have_text("newestactor 4ref 3")
        assert curve_is_drawn(page, "Queue depth")
        expect(depths).to_contain_text("Watched since ")
        add_steps(run_dir, 2, 2)
        expect(page.locator("header")).to_contain_text("step 2")
        assert page.evaluate("page.runs[0].depths.times.every((time, place, all) => !place || time > all[place - 1])")
    report = write_report(run_dir).as_uri()
    page.goto(report)
    expect(depths).to_be_hidden()


def test_plan_and_run_are_compared_by_the_tokens_that_a_plan_counts(run_dir: Path, page: Any) -> None:
    """A step's samples have 300 tokens behind prompts of 900, and take 2 s on 4 devices, as planned."""
    counted = {"samples": 8, "response_tokens_mean": 300.0, "train_tokens_per_s": 4800.0, "step_time_s": 2.0}
    for step in range(1, 4):
        append(run_dir / "metrics.jsonl", {"step": step, "lineage": 0, "reward_mean": 0.5, **counted})
    roles = {"rollout": 3, "actor": 1}
    (run_dir / "config.yaml").write_text("roles: {rollout: 3, actor: 1}\n")
    plan = {"roles": roles, "devices": 4, "step_s": 2.0, "tokens_per_s": 1200.0, "tokens_per_s_per_device": 300.0}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    page.goto(write_report(run_dir).as_uri())
    for name, number in (
        ("time of a step (s)", "2"),
        ("response tokens/s", "1,?200"),
        ("response tokens/s and device", "300"),
    ):
        row = page.locator("tr").filter(has=page.get_by_role("cell", name=name, exact=True))
        expect(row).to_have_text(re.compile(rf"{re.escape(name)}{number}{number}1$"))


def test_ten_thousand_steps_are_painted(run_dir: Path, page: Any) -> None:
    lines = [json.dumps({"step": step, "lineage": 0, "reward_mean": step / 10_000}) for step in range(1, 10_001)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with served(run_dir) as address:
        page.goto(address)
        expect(page.locator("header")).to_contain_text("step 10000")
        assert curve_is_drawn(page, "Reward")
        assert page.evaluate("page.runs[0].steps.length") <= MOST_POINTS


@pytest.mark.parametrize("control", [False, True])
def test_buttons_are_there_only_where_they_are_allowed(
    run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch, *, control: bool
) -> None:
    add_steps(run_dir, 1, 2)
    with served(run_dir, control=control) as address:
        page.goto(address)
        page.wait_for_selector("article.sample")
        assert page.evaluate("page.control") is control
        assert page.get_by_text("save and stop").count() == 0, "it does not run"


def test_a_run_is_paused_and_goes_on_by_its_buttons(run_dir: Path, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_steps(run_dir, 1, 2)
    asked, pause = list[int](), [""]
    monkeypatch.setattr("launcher.view.server.os", SimpleNamespace(kill=lambda pid, number: asked.append(number)))
    monkeypatch.setattr("launcher.view.server.running_launcher", lambda path: 1)
    monkeypatch.setattr("launcher.view.run_reader.is_live", lambda path: True)
    monkeypatch.setattr(RunStatus, "read", lambda path: RunStatus(path, 0.0, (), {}, pause=pause[0]))
    state = page.locator("header .state")
    with served(run_dir, control=True) as address:
        page.goto(address)
        page.get_by_role("button", name="pause").click()
        pause[0] = "pausing until step 3 is trained, which was given out before"
        expect(state).to_have_text("pausing")
        expect(page.locator("header")).to_contain_text("until step 3 is trained")
        pause[0] = "paused after step 3"
        expect(state).to_have_text("paused")
        expect(page.get_by_role("button", name="save after this step")).to_have_count(0)
        page.get_by_role("button", name="resume").click()
        pause[0] = ""
        expect(state).to_have_text("running")
    assert asked == [PAUSE_SIGNAL, RESUME_SIGNAL]


def test_nothing_answers_without_the_token(run_dir: Path, browser: Any) -> None:
    add_steps(run_dir, 1, 2)
    opened = browser.new_page()
    with served(run_dir) as address:
        for path in ("/", "/secre/", "/view.js", "/api/state", "/secret/../config.yaml", "/secret/%2e%2e/config.yaml"):
            answer = opened.goto(address.replace("/secret/", path))
            assert answer is not None and answer.status == 404, path
    opened.close()
