"""The exporter with a feed in memory, and notifications to real HTTP servers on loopback."""

import json
import logging
import queue
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

import weightsync.notify
from weightsync.config import ExportConfig, NotifyTarget
from weightsync.export import WeightExporter, directory_name
from weightsync.notify import fill_in, weight_sync_notify
from weightsync.version import Version
from workers.engines.hf.weights import copy_without_weights, write_weights

DEADLINE_S = 20


class FakeFeed:
    """Has whatever version it is given; `loads` is what was read."""

    def __init__(self) -> None:
        self._newest: Version | None = None
        self._changed = threading.Condition()
        self.closed = False

    @property
    def newest(self) -> Version | None:
        return self._newest

    @newest.setter
    def newest(self, version: Version) -> None:
        with self._changed:
            self._newest = version
            self._changed.notify_all()

    def wait_newer(self, version: Version | None, *, timeout_s: float, stop: threading.Event) -> bool:
        with self._changed:
            while True:
                if self._newest is not None and (version is None or self._newest > version):
                    return True
                if stop.is_set():
                    return False
                self._changed.wait(0.01)

    def load(self, apply: Callable[[Mapping[str, Tensor]], None], *, newer_than: Version | None) -> Version | None:
        version = self.newest
        assert version is not None and (newer_than is None or version > newer_than)
        apply(weights_of(version))
        return version

    def close(self) -> None:
        self.closed = True


def weights_of(version: Version) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * version.lineage + version.step)
    memory = torch.rand(48, generator=generator).bfloat16()  # one storage, as in a slot
    return {"b": memory[:8].view(2, 4), "a": memory[8:40].view(8, 4), "scalar": memory[47]}


@pytest.fixture(name="model_dir")
def _model_dir(tmp_path: Path) -> Path:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text("{}")
    (model_dir / "model.safetensors").write_text("the initial weights, which are not copied")
    return model_dir


@pytest.fixture(name="server")
def _server() -> Iterator[ThreadingHTTPServer]:
    """Answers by path; `seen` gets (path, body), `hold` ends what hangs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            attempts[self.path] = attempts.get(self.path, 0) + 1
            server.seen.put((self.path, body))
            if self.path == "/hangs":
                server.hold.wait(DEADLINE_S)
            code = {"/broken": 500, "/refuses": 400, "/moved": 302}.get(self.path, 200)
            if self.path == "/starts" and attempts[self.path] == 1:
                code = 503
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/ok")
            answer = b'{"success": false,\n "message": "no such model"}' if code == 400 else b"{}"
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    attempts: dict[str, int] = {}
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = queue.Queue()
    server.hold = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


Start = Callable[..., tuple[FakeFeed, WeightExporter]]


@pytest.fixture(name="start")
def _start(tmp_path: Path, model_dir: Path, server: Any) -> Iterator[Start]:
    """Return a function that starts an exporter whose engine is `server`; `write` replaces the writer."""
    exporters: list[WeightExporter] = []

    def start(
        write: Any = write_weights, run_dir: Path = tmp_path, also: Sequence[NotifyTarget] = (), **config: Any
    ) -> tuple[FakeFeed, WeightExporter]:
        feed: Any = FakeFeed()
        export = ExportConfig(notify=(NotifyTarget(url=f"{server.url}/ok"), *also), **config)
        copy_rest = partial(copy_without_weights, model_dir)
        exporters.append(WeightExporter(feed, export, run_dir, copy_rest=copy_rest, write_weights=write))
        return feed, exporters[-1]

    yield start
    for exporter in exporters:
        exporter.close()


def told(server: Any) -> tuple[str, str]:
    """Wait for the next notification; returns version and directory."""
    _, body = server.seen.get(timeout=DEADLINE_S)
    return body["weight_version"], body["model_path"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_export_has_the_weights_and_the_rest_of_the_model(start: Start, server: Any, tmp_path: Path) -> None:
    feed, _ = start()
    feed.newest = Version(0, 12)
    root = tmp_path / "weights"
    assert told(server) == ("0.12", str(root / "step_000012"))
    assert names(root) == ["latest", "step_000012"]
    assert names(root / "latest") == ["config.json", "export.json", "model.safetensors"]
    exported = load_file(root / "latest" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in exported.items()} == dict.fromkeys(exported, torch.bfloat16)
    assert all(torch.equal(tensor, weights_of(Version(0, 12))[name]) for name, tensor in exported.items())


def test_a_restore_gets_directories_of_its_own_and_counts_as_newer(start: Start, server: Any, tmp_path: Path) -> None:
    feed, _ = start(keep_last=2, directory=str(tmp_path / "elsewhere"))
    for version in (Version(0, 5), Version(0, 6), Version(1, 5), Version(1, 6)):
        feed.newest = version
        told(server)
    root = tmp_path / "elsewhere"
    assert names(root) == ["latest", "step_000005-lineage1", "step_000006-lineage1"]
    assert (root / "latest").resolve().name == "step_000006-lineage1"


def test_steps_in_between_are_not_written(start: Start, server: Any, tmp_path: Path) -> None:
    feed, exporter = start(every=3)
    feed.newest = Version(0, 3)
    told(server)
    feed.newest = Version(0, 4)
    exporter.close()
    assert names(tmp_path / "weights") == ["latest", "step_000003"]
    assert feed.closed


def test_the_last_version_is_exported_at_the_end(start: Start, tmp_path: Path) -> None:
    feed, exporter = start()
    feed.newest = Version(0, 1)
    exporter.close()
    exporter.close()
    assert names(tmp_path / "weights") == ["latest", "step_000001"]


def test_older_exports_go_and_those_of_others_stay(start: Start, server: Any, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    (root / "step_000000").mkdir(parents=True)  # somebody's, without a marker
    (root / "step_000001").mkdir()
    (root / "step_000001" / "export.json").write_text(json.dumps({"run": "/other", "lineage": 0, "step": 1}))
    feed, exporter = start(keep_last=2)
    for step in (2, 3, 4):
        feed.newest = Version(0, step)
        told(server)
        if step == 2:  # a copy has our marker, and is the user's
            shutil.copytree(root / "step_000002", root / "step_000002_best")
    exporter.close()
    assert names(root) == ["latest", "step_000000", "step_000001", "step_000002_best", "step_000003", "step_000004"]


def test_what_latest_names_stays(start: Start, server: Any, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    newer = root / "step_000001-lineage9"
    newer.mkdir(parents=True)
    feed, _ = start(keep_last=1)
    identity = (tmp_path / "export-id").read_text()
    (newer / "export.json").write_text(json.dumps({"run": identity, "lineage": 9, "step": 1}))
    for step in (2, 3):
        feed.newest = Version(0, step)
        told(server)
    assert names(root) == ["latest", "step_000001-lineage9", "step_000003"]
    assert (root / "latest").resolve().name == "step_000003"


def test_a_new_run_in_the_same_directory_takes_nothing_over(
    start: Start, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed, exporter = start()
    feed.newest = Version(0, 1)
    told(server)
    exporter.close()
    (tmp_path / "export-id").unlink()
    feed, _ = start()
    feed.newest = Version(0, 1)
    wait_for_log(caplog, "was not exported by this run")


def test_directory_of_somebody_else_is_not_replaced(
    start: Start, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights" / "step_000001").mkdir(parents=True)
    (tmp_path / "weights" / "step_000001" / "mine").write_text("")
    feed, _ = start()
    feed.newest = Version(0, 1)
    wait_for_log(caplog, "step_000001 exists and was not exported by this run")
    feed.newest = Version(0, 2)
    assert told(server)[0] == "0.2"
    assert names(tmp_path / "weights" / "step_000001") == ["mine"]


def test_exporter_that_starts_again_tells_of_what_is_there(start: Start, server: Any) -> None:
    feed, exporter = start()
    feed.newest = Version(0, 7)
    first = told(server)
    exporter.close()

    def write(*_: Any) -> None:
        raise AssertionError("it is written already")

    feed, _ = start(write)
    feed.newest = Version(0, 7)
    assert told(server) == first


def test_a_failed_write_leaves_the_former_export(
    start: Start, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = threading.Event()

    def write(target: Path, shapes: Any, read: Any) -> None:
        with limited_files(100) if full.is_set() else nullcontext():
            write_weights(target, shapes, read)

    feed, _ = start(write)
    feed.newest = Version(0, 1)
    told(server)
    full.set()
    feed.newest = Version(0, 2)
    wait_for_log(caplog, "weights of step 2: not exported")
    assert (tmp_path / "weights" / "latest").resolve().name == "step_000001"
    full.clear()
    feed.newest = Version(0, 3)
    assert told(server)[0] == "0.3"
    assert names(tmp_path / "weights") == ["latest", "step_000001", "step_000003"]


def test_an_error_that_nobody_expects_costs_one_export(
    start: Start, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = ["a tensor"]

    def write(target: Path, shapes: Any, read: Any) -> None:
        if unknown:
            unknown.clear()
            raise ValueError("a tensor of an unknown kind")
        write_weights(target, shapes, read)

    feed, _ = start(write)
    feed.newest = Version(0, 1)
    wait_for_log(caplog, "(ValueError: a tensor of an unknown kind); earlier exports stay")
    feed.newest = Version(0, 2)
    assert told(server)[0] == "0.2"
    assert names(tmp_path / "weights") == ["latest", "step_000002"]


def test_a_directory_that_cannot_be_made_is_a_warning(
    start: Start, server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights").write_text("a file")
    feed, _ = start()
    feed.newest = Version(0, 1)
    wait_for_log(caplog, "weights of step 1: not exported")
    (tmp_path / "weights").unlink()
    feed.newest = Version(0, 2)
    assert told(server)[0] == "0.2"


def test_leftovers_of_a_killed_exporter_are_removed(start: Start, server: Any, tmp_path: Path) -> None:
    feed, exporter = start()
    exporter._beside.mkdir(parents=True)
    (exporter._beside / "half.safetensors").write_text("")
    feed.newest = Version(0, 1)
    told(server)
    assert names(tmp_path / "weights") == ["latest", "step_000001"]
    assert "half.safetensors" not in names(tmp_path / "weights" / "latest")


@contextmanager
def limited_files(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size_bytes`, as on a full disk."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    came = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                came.set()

    watch = Watch()
    logging.getLogger("weightsync").addHandler(watch)
    try:
        assert text in caplog.text or came.wait(DEADLINE_S) or text in caplog.text, caplog.text
    finally:
        logging.getLogger("weightsync").removeHandler(watch)


def target(server: Any, path: str, **options: Any) -> NotifyTarget:
    return NotifyTarget(url=server.url + path, **options)


def test_targets_are_told_what_sglang_takes(server: Any) -> None:
    assert weight_sync_notify([target(server, "/ok")], Path("/exports/step_000003"), Version(1, 3)) == []
    assert server.seen.get_nowait() == ("/ok", {"model_path": "/exports/step_000003", "weight_version": "1.3"})


def test_bodies_of_other_engines_are_filled_in(server: Any) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": "{directory}"}, "steps": ["{step}", "at {step}", 7]}
    weight_sync_notify(
        [target(server, "/rpc", body=body), target(server, "/reset", body={})], Path("/x"), Version(0, 3)
    )
    filled = {"method": "reload_weights", "kwargs": {"weights_path": "/x"}, "steps": [3, "at 3", 7]}
    assert [server.seen.get_nowait(), server.seen.get_nowait()] == [("/rpc", filled), ("/reset", {})]


def test_what_a_path_contains_is_no_place() -> None:
    assert fill_in("{directory}", Path("/runs/{step}"), Version(0, 3)) == "/runs/{step}"


def test_an_engine_that_is_starting_is_told_again(server: Any) -> None:
    assert weight_sync_notify([target(server, "/starts")], Path("/x"), Version(0, 1), pauses_s=(0.01,)) == []
    assert server.seen.qsize() == 2


def test_engines_that_fail_are_named_and_do_not_stop_the_others(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    nobody = NotifyTarget(url="http://127.0.0.1:1/nobody")
    targets = [target(server, "/broken"), nobody, target(server, "/refuses"), target(server, "/moved"),
               target(server, "/ok")]  # fmt: skip
    failures = weight_sync_notify(targets, Path("/x"), Version(0, 1), pauses_s=(0.01, 0.01))
    assert [failure.removeprefix(server.url) for failure in failures[:1] + failures[2:]] == [
        "/broken: answered 500 {}",
        '/refuses: answered 400 {"success": false, "message": "no such model"}',
        "/moved: answered 302 {}",
    ]
    assert failures[1].startswith("http://127.0.0.1:1/nobody: URLError") and "refused" in failures[1]
    assert [path for path, _ in server.seen.queue] == ["/broken"] * 3 + ["/refuses", "/moved", "/ok"]
    assert all(failure in caplog.text for failure in failures)


def test_an_engine_that_hangs_is_waited_for_until_its_deadline(server: Any) -> None:
    failures = weight_sync_notify([target(server, "/hangs", timeout_s=0.3)], Path("/x"), Version(0, 1))
    assert len(failures) == 1 and failures[0].startswith(f"{server.url}/hangs: ")
    assert server.seen.get(timeout=DEADLINE_S)[0] == "/hangs"
    assert server.seen.empty(), "what loads slowly is not told again"


def test_a_hanging_server_does_not_delay_another(server: Any) -> None:
    elsewhere = target(server, "/ok").model_copy(update={"url": f"http://localhost:{server.server_port}/ok"})
    done = threading.Thread(
        target=weight_sync_notify, args=([target(server, "/hangs", timeout_s=5), elsewhere], Path("/x"), Version(0, 1))
    )
    done.start()
    assert {server.seen.get(timeout=3)[0], server.seen.get(timeout=3)[0]} == {"/hangs", "/ok"}
    server.hold.set()
    done.join(DEADLINE_S)


def test_an_engine_that_hangs_holds_up_neither_exports_nor_other_engines(start: Start, server: Any) -> None:
    hanging = target(server, "/hangs", timeout_s=DEADLINE_S).model_copy(
        update={"url": f"http://localhost:{server.server_port}/hangs"}
    )
    feed, exporter = start(also=[hanging])
    for step in (1, 2, 3):
        feed.newest = Version(0, step)
        while server.seen.get(timeout=DEADLINE_S)[1].get("weight_version") != f"0.{step}":
            pass
    exporter.close(timeout_s=0.2)
    assert feed.closed
    server.hold.set()


def test_exported_files_may_be_read_by_whoever_may_list_them(start: Start, server: Any, tmp_path: Path) -> None:
    feed, _ = start()
    feed.newest = Version(0, 1)
    told(server)
    modes = {path.stat().st_mode & 0o044 for path in (tmp_path / "weights" / "step_000001").iterdir()}
    assert modes == {(tmp_path / "weights" / "step_000001" / "config.json").stat().st_mode & 0o044}


def test_nothing_is_tried_again_after_a_stop(server: Any) -> None:
    stop = threading.Event()
    stop.set()
    assert len(weight_sync_notify([target(server, "/broken")], Path("/x"), Version(0, 1), stop=stop)) == 1
    assert server.seen.qsize() == 1


def test_proxies_of_the_environment_are_not_used(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert weight_sync_notify([target(server, "/ok")], Path("/x"), Version(0, 1)) == []
    assert weightsync.notify.PAUSES_S[0] < 1


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host/x", "not an http:// or https:// address"),
        ("file:///etc/passwd", "not an http:// or https:// address"),
        ("localhost:8000", "not an http:// or https:// address"),
        ("http:///x", "not an http:// or https:// address"),
        ("http://user:word@host/x", "user name"),
        ("http://host:99999/x", "[Pp]ort"),
        ("http://host/a b", "not a usable address"),
        ("http://host/a\nHost: b", "not a usable address"),
    ],
)
def test_addresses_that_cannot_be_called_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        NotifyTarget(url=url)


def test_misspelt_places_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"\{path\} is not a placeholder; known: directory"):
        NotifyTarget(url="http://host/x", body={"a": ["{path}"]})


def test_names_sort_by_step() -> None:
    assert directory_name(Version(0, 12)) == "step_000012"
    assert directory_name(Version(2, 3)) == "step_000003-lineage2"
