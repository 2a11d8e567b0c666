"""Every storage backend passes the suite, against real servers; and a whole unit with each of them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from backend_servers import backend_server
from fake_controller import FakeController, UnitClient, done, numbers, same

import tq
from asyncflow.errors import ConfigError, TransportError
from asyncflow.testing.backends import *  # noqa: F403
from asyncflow.testing.backends import OpenBackend, block
from asyncflow.transport.meeting import Credentials
from tq import Column, StorageUnit
from tq.backends.backend import FileBackend, load_backend
from tq.config import BACKENDS, BackendConfig, QueueConfig
from tq.messages import GetUnitStats, RegisterUnit

Server = tuple[BackendConfig, "subprocess.Popen[bytes] | None"]


@pytest.fixture(name="server", scope="module", params=[*BACKENDS.built_in, "own"])
def _server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "own":
        yield BackendConfig(kind="own_backend:Files", options={"directory": str(directory)}), None
        return
    with backend_server(request.param, directory) as server:
        yield server


@pytest.fixture
def open_backend(server: Server) -> OpenBackend:
    """Opens the backend of a unit at the server."""
    return lambda unit_name: load_backend(server[0], unit_name, "run-1")


pytest.mark.gate(test_block_that_was_read_can_be_deleted_at_once)  # noqa: F405


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_next_incarnation_deletes_what_a_dead_one_left(kind: str, tmp_path: Path) -> None:
    with backend_server(kind, tmp_path) as (config, _):
        dead = load_backend(config, "storage-0", "run-1")
        other = load_backend(config, "storage-1", "run-1")
        dead.store("asyncflow:run-1:storage-0:i:0", block(1000))
        other.store("asyncflow:run-1:storage-1:i:0", block(1000))
        load_backend(config, "storage-0", "run-1").close()
        with pytest.raises(TransportError, match="no block"):
            dead.load("asyncflow:run-1:storage-0:i:0", 1000)
        other.load("asyncflow:run-1:storage-1:i:0", 1000)
        dead.close()
        other.close()


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_server_that_died_is_named(kind: str, tmp_path: Path) -> None:
    with backend_server(kind, tmp_path) as (config, server):
        assert server is not None
        backend = load_backend(config, "storage-0", "run-1")
        backend.store("asyncflow:run-1:storage-0:i:0", block(1000))
        server.kill()
        server.wait()
        address = config.address.removeprefix("redis://")
        with pytest.raises(TransportError, match=f"{kind} at {address}"):
            backend.store("asyncflow:run-1:storage-0:i:1", block(1000))
        with pytest.raises(TransportError, match=f"{kind} at {address}"):
            backend.load("asyncflow:run-1:storage-0:i:0", 1000)
        backend.close()
        with pytest.raises(TransportError, match=f"{kind} at {address}"):
            load_backend(config, "storage-0", "run-1")


def test_mooncake_without_room_refuses_and_recovers(tmp_path: Path) -> None:
    with backend_server("mooncake", tmp_path) as (config, _):
        backend = load_backend(config.model_copy(update={"segment_bytes": 2**26}), "storage-0", "run-1")
        with pytest.raises(TransportError, match="is there room"):
            backend.store("asyncflow:run-1:storage-0:i:0", block(2**27))
        backend.store("asyncflow:run-1:storage-0:i:1", block(2**22))
        assert torch.equal(backend.load("asyncflow:run-1:storage-0:i:1", 2**22), block(2**22))
        backend.close()


def test_password_is_never_named(tmp_path: Path) -> None:
    with backend_server("redis", tmp_path) as (config, _):
        secret = config.address.replace("redis://", "redis://user:hunter2@")
        with pytest.raises(TransportError, match="redis at 127.0.0.1") as caught:
            load_backend(config.model_copy(update={"address": secret}), "storage-0", "run-1")
        assert "hunter2" not in str(caught.value)


def test_files_of_a_former_process_are_deleted(tmp_path: Path) -> None:
    FileBackend(tmp_path / "u").store("a:b/c:0", block(10))
    backend = FileBackend(tmp_path / "u")
    with pytest.raises(TransportError, match="no block"):
        backend.load("a:b/c:0", 10)
    backend.store("a:b/c:1", block(10))
    with pytest.raises(TransportError, match="no block"):
        backend.load("a:b/c:1", 9)
    backend.close()
    backend.close()
    assert not (tmp_path / "u").exists()


@pytest.mark.gate
def test_unit_puts_gets_and_frees_with_any_backend(server: Server, credentials: Credentials) -> None:
    controller = FakeController(credentials)
    config = QueueConfig(request_timeout_s=20, backend=server[0])
    unit = StorageUnit(credentials, "storage-0", config, controllers=["controller-0"])
    controller.hears(RegisterUnit)
    client = UnitClient(credentials)
    columns = {
        "prompts": Column.of_rows([torch.arange(k) * 2**33 for k in (3, 0, 5)]),
        "images": Column.of_rows([torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 1)]),
        "texts": Column.of_texts(["a", "", "äß"]),
        "json": Column.of_values([{"a": 1}, None, [2]]),
        "half": Column.of_dense(torch.randn(3, 70_000).to(torch.bfloat16)),
    }
    done(client.create([0, 1, 2], columns))
    done(client.create([3], {name: column.select([0]) for name, column in columns.items()}))
    done(client.put("ref", 1, [1, 2], {"ref": numbers(1, float("nan"))}))
    done(client.put("ref", 1, [1, 2], {"ref": numbers(1, float("nan"))}))
    read = client.get([2, 3, 1], *columns)
    for name, column in columns.items():
        expected = column.select([2, 0, 1])
        assert same(read[name].values, expected.values), name
        assert [row.shape for row in read[name].rows()] == [row.shape for row in expected.rows()]
    assert client.ask(GetUnitStats()).backend.startswith(server[0].kind)
    done(client.put("train", 1, [1, 2]))
    assert same(client.get([0], "half")["half"].values, columns["half"].select([0]).values)
    for task in ("ref", "train"):
        done(client.put(task, 2, [0, 3]))
    assert client.ask(GetUnitStats()).num_bytes == 0
    client.close()
    unit.close()
    controller.close()


def test_unit_refuses_a_put_that_its_backend_cannot_keep(tmp_path: Path, credentials: Credentials) -> None:
    with backend_server("redis", tmp_path) as (backend, server):
        assert server is not None
        controller = FakeController(credentials)
        config = QueueConfig(request_timeout_s=20, backend=backend)
        unit = StorageUnit(credentials, "storage-0", config, controllers=["controller-0"])
        controller.hears(RegisterUnit)
        client = UnitClient(credentials)
        done(client.create([0], {"x": numbers(0)}))
        server.kill()
        server.wait()
        with pytest.raises(TransportError, match="redis at 127.0.0.1"):
            done(client.create([1], {"x": numbers(0)}))
        with pytest.raises(TransportError, match="redis at 127.0.0.1"):
            done(client.put("ref", 1, [0], {"ref": numbers(0)}))
        with pytest.raises(TransportError, match="redis at 127.0.0.1"):
            client.get([0], "x")
        assert client.ask(GetUnitStats()).num_rows == 1
        done(client.put("ref", 2, [0]))
        client.close()
        unit.close()
        controller.close()


@pytest.mark.gate
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_such_module:Files", "cannot be imported: ModuleNotFoundError"),
        ("own_backend:FileBackend", "must be made with two arguments"),
        ("own_backend:Path", "lacks store load delete close"),
        ("own_backend:Nameless", "has no name"),
    ],
)
def test_class_that_is_no_backend_is_refused(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"tq.backend.kind: {kind} {words}"):
        load_backend(BackendConfig(kind=kind), "storage-0", "run-1")


@pytest.mark.gate
def test_queue_alone_is_not_started_with_a_class_that_is_no_backend() -> None:
    config = QueueConfig(backend=BackendConfig(kind="own_backend:Path"))
    with pytest.raises(ConfigError, match="tq.backend.kind: own_backend:Path lacks store"):
        tq.start({"score": ["prompt"]}, config=config)
