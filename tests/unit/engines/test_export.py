"""The export in Hugging Face's layout: the same bytes however many ranks write it and however the state was divided."""

import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from asyncflow.errors import CheckpointError
from weightsync.plan import Box
from workers.checkpoint.saved_shards import WHOLE, BoxedTensor, BoxPart, ExportShare
from workers.data.model_files import INDEX_FILE
from workers.engines.hf.export import SavedTensors, export_saved
from workers.engines.hf.weights import write_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = {"embed": torch.bfloat16, "norm": torch.float32, "down": torch.bfloat16, "up": torch.float16}
NAMES: Mapping[str, tuple[str, ...]] = {"embed": ("other",), "norm": (), "up": (), "down": ()}
SHAPES = {"embed": (5, 4), "norm": (4,), "up": (6, 4), "down": (4, 6)}


@pytest.fixture(name="weights")
def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(SHAPES[name], generator=generator) for name in NAMES}


@pytest.fixture(name="model_dir")
def _model_dir(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file({name: weights[name].to(DTYPES[name]) for name in weights}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("[]")
    return path


def rows(shape: tuple[int, ...], number: int) -> list[Box]:
    """As FSDP2 divides: an equal number of rows each, the last ones less or none."""
    each = -(-shape[0] // number)
    ends = [min(shape[0], each * k) for k in range(number + 1)]
    return [Box.rows(shape, start, stop) for start, stop in itertools.pairwise(ends) if stop > start]


def megatron(shape: tuple[int, ...], _: int) -> list[Box]:
    """As tensor parallelism and a distributed optimizer divide: halves of the columns, and runs that end in a row."""
    if len(shape) == 1:
        return [Box((0,), (3,)), Box((3,), (1,))]
    if shape == SHAPES["down"]:
        return [Box((0, 0), (4, 3)), Box((0, 3), (1, 2)), Box((0, 5), (1, 1)), Box((1, 3), (3, 3))]
    return [Box((0, 0), (1, 3)), Box((0, 3), (1, 1)), Box((1, 0), (shape[0] - 1, shape[1]))]


def save_state(target: Path, weights: dict[str, Tensor], divide: Callable[[tuple[int, ...], int], list[Box]]) -> None:
    """Save the weights in boxes; box k as rank k would, which is a file's name."""
    model = {}
    for name, whole in weights.items():
        boxes = divide(tuple(whole.shape), 3)
        model[name] = BoxedTensor(tuple(whole.shape), [BoxPart(box, whole[box.slices].clone()) for box in boxes])
    writer = dcp.FileSystemWriter(target, single_file_per_rank=False)
    dcp.save({"model": model, "optimizer": {"embed": torch.zeros(3)}}, storage_writer=writer)
    # A single process names all files `__0_N`; as several ranks would, N becomes the rank.
    metadata = dcp.FileSystemReader(target).read_metadata()
    for number, stored in enumerate(metadata.storage_data.values()):
        new = f"__{number % 3}_{number}.distcp"
        (target / stored.relative_path).rename(target / new)
        stored.relative_path = new
    with (target / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(name="expected")
def _expected(tmp_path: Path, weights: dict[str, Tensor]) -> Callable[[int], dict[str, bytes]]:
    """What a single process writes through safetensors, from whole tensors."""

    def files(file_bytes: int) -> dict[str, bytes]:
        target = tmp_path / f"expected-{file_bytes}"
        target.mkdir()
        write_weights(target, SHAPES, lambda name: weights[name].to(DTYPES[name]), file_bytes=file_bytes)
        return {"config.json": b"{}", "tokenizer.json": b"[]", **contents(target)}

    return files


@pytest.mark.parametrize("divide", [rows, megatron])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("file_bytes", [2**30, 100])
def test_ranks_together_write_the_bytes_of_a_single_writer(
    tmp_path: Path, weights: dict[str, Tensor], model_dir: Path, expected: Callable[[int], dict[str, bytes]],
    divide: Callable[[tuple[int, ...], int], list[Box]], num_ranks: int, file_bytes: int,
) -> None:  # fmt: skip
    save_state(tmp_path / "dcp", weights, divide)
    target = tmp_path / "hf"
    for rank in reversed(range(num_ranks)):  # in any order
        share = ExportShare(rank, num_ranks)
        assert export_saved(tmp_path / "dcp", target, model_dir, NAMES, share, file_bytes=file_bytes)
    files = expected(file_bytes)
    assert contents(target) == files
    assert (INDEX_FILE in files) == (file_bytes == 100)


def test_each_rank_reads_what_it_saved_and_one_gathers_what_was_cut_in_columns(
    tmp_path: Path, weights: dict[str, Tensor], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "dcp", weights, megatron)
    read: list[tuple[str, Box]] = []
    read_box = SavedTensors.read_box
    monkeypatch.setattr(SavedTensors, "read_box", lambda *args: read.append(args[1:]) or read_box(*args))
    saved = SavedTensors(tmp_path / "dcp")
    seen: dict[int, list[tuple[str, Box]]] = {}
    for rank in range(3):
        export_saved(tmp_path / "dcp", tmp_path / "hf", model_dir, NAMES, ExportShare(rank, 3))
        seen[rank] = list(read)
        own = {
            (f"model.{name}", box)
            for name in NAMES
            for writer, box in saved.shards_of(f"model.{name}")
            if writer == rank
        }
        assert {one for one in read if one[0] != "model.down"} == {one for one in own if one[0] != "model.down"}
        read.clear()
    gathered = [(rank, box) for rank, boxes in seen.items() for name, box in boxes if name == "model.down"]
    assert gathered == [(0, Box.from_shape(SHAPES["down"]))]


def test_stopped_share_writes_no_further_piece(tmp_path: Path, weights: dict[str, Tensor], model_dir: Path) -> None:
    save_state(tmp_path / "dcp", weights, rows)
    answers: Iterator[bool] = iter([False, False, True])
    assert not export_saved(
        tmp_path / "dcp", tmp_path / "hf", model_dir, NAMES, ExportShare(stop=lambda: next(answers))
    )
    with pytest.raises(StopIteration):
        next(answers)


def test_state_that_lacks_a_weight_of_the_model_is_refused(
    tmp_path: Path, weights: dict[str, Tensor], model_dir: Path
) -> None:
    save_state(tmp_path / "dcp", {name: weights[name] for name in ("embed", "norm")}, rows)
    with pytest.raises(CheckpointError, match=r"dcp lacks the weight up, which the model in .*model has"):
        export_saved(tmp_path / "dcp", tmp_path / "hf", model_dir, NAMES, WHOLE)
    assert not (tmp_path / "hf").exists()


def test_index_says_where_each_weight_is(tmp_path: Path, weights: dict[str, Tensor], model_dir: Path) -> None:
    save_state(tmp_path / "dcp", weights, rows)
    export_saved(tmp_path / "dcp", tmp_path / "hf", model_dir, NAMES, WHOLE, file_bytes=100)
    index = json.loads((tmp_path / "hf" / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == NAMES.keys()
    assert index["metadata"]["total_size"] == sum(
        torch.Size(SHAPES[name]).numel() * DTYPES[name].itemsize for name in NAMES
    )
