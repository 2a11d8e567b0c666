"""Our part of vLLM's worker processes, which alone import it: loads weights from shared memory or its own receiver."""

import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

from asyncflow.device import wait_for_device
from asyncflow.log_format import TEXT
from asyncflow.process import die_with_parent, keep_freed_memory
from weightsync.checksums import box_checksum
from weightsync.plan import Box, TensorSpec, TransferPlan
from weightsync.receiver import Following, RankReceiver
from weightsync.slot_memory import Region, RegionLayout, SlotMappings, SlotOffer
from weightsync.version import Version
from workers.data.model_files import few_of
from workers.engines.hf.weights import HfWeights
from workers.engines.lora import CONFIG_FILE, WEIGHTS_FILE
from workers.engines.vllm.vllm_process import ADAPTER, ADAPTER_ID, BACKEND, LOAD_FORMAT

# vLLM imports this module as its worker extension (`worker_extension_cls`) before it builds the model; that registers
# the weight transfer engine `asyncflow`, which vLLM calls like any other: start_weight_update, update_weights with the
# rollout's slot (or with nothing, for the version that is held), finish_weight_update. Layers are loaded one by one and
# converted to the kernels' layout, as when the model was first loaded.
#
# An adapter does not come that way: `load_adapter` puts it in place of the last one, by vLLM's own `add_lora`. The base
# is then read by the model loader `asyncflow`, which is registered here, too.
#
# vLLM 0.23, and vllm-ascend's worker, begin and end that by themselves, and only call `receive_weights`; later ones
# leave all three to the engine. The rollout then calls `weights_loaded`, with either.

_CPU = torch.device("cpu")


class AsyncFlowWorker:
    """The worker extension: methods that the rollout calls in every rank. See `RanksEngine`."""

    weight_transfer_engine: "SlotTransfer"
    vllm_config: Any
    add_lora: Callable[[LoRARequest], bool]

    def follow_weights(self, following: dict[str, Any]) -> None:
        """Receive weights from now on."""
        logging.basicConfig(level=logging.INFO, format=TEXT)  # vLLM configures its own loggers alone
        self.weight_transfer_engine.follow(msgspec.convert(following, Following))

    def hold_weights(self, version: tuple[int, int]) -> bool:
        """Keep a version unchanged; False: it is not the newest here."""
        return self.weight_transfer_engine.receiver.hold(Version(*version))

    def receive_while_paused(self, version: tuple[int, int]) -> None:
        """Receive a broadcast."""
        self.weight_transfer_engine.receiver.receive_while_paused(Version(*version))

    def load_adapter(self, update: dict[str, Any]) -> None:
        """Replace the adapter by that in a slot (`UpdateInfo`), or by the version that is held, which is released."""
        with self.weight_transfer_engine.adapter_files(UpdateInfo(**update)) as directory:
            self.add_lora(LoRARequest(ADAPTER, ADAPTER_ID, directory, load_inplace=True))
        self.weight_transfer_engine.adapter_loaded()

    def weight_checksums(self) -> list[tuple[str, list[int], list[int], str, int]]:
        """Return this rank's boxes of tensors as it holds them: name, offset, size, element type, and its share of the
        checksum (`weightsync.checksums.box_checksum`)."""
        return self.weight_transfer_engine.held_checksums()

    def weights_loaded(self) -> None:
        """Finish a load, and release the held version if that was loaded."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.weights_loaded()


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings that are sent once."""

    logits_scale: float = 1.0  # the model multiplies its logits by it
    tensors: dict[str, Any] = field(default_factory=dict)  # name -> `TensorSpec`: of the rollout's slot, in its order
    adapter: dict[str, Any] = field(default_factory=dict)  # peft's adapter_config.json; empty: whole weights come


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to load."""

    offer: dict[str, Any] | None = None  # the rollout's slot (`SlotOffer`); None: the version that the ranks hold


class SlotTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the weights in a slot of the rollout's, or those that its own receiver holds."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        # The current vLLM passes (config, vllm_config, device, model), 0.23 (config, parallel_config, model).
        super().__init__(*args)
        self._module: Any = args[-1]
        self._model_config = getattr(args[1], "model_config", None)
        self._device = next(self._module.parameters()).device
        self._slots = SlotMappings(write=False, device=self._device)
        self._layout: RegionLayout | None = None
        self._receiver: RankReceiver | None = None
        self._loads_held = False
        self._adapter: dict[str, Any] = {}
        if self._device.type == "cpu":
            keep_freed_memory()  # every update allocates all packed weights again

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Have the model scale its logits, as some model families do by configuration.
        Raises RuntimeError if the model has no `logits_processor`."""
        tensors = msgspec.convert(init_info.tensors, dict[str, TensorSpec])
        self._layout = RegionLayout(TransferPlan(1, tensors, ()))
        self._adapter = init_info.adapter
        if init_info.logits_scale == 1.0:
            return
        processor = getattr(self._module, "logits_processor", None)
        if processor is None:
            raise RuntimeError(
                f"{type(self._module).__name__} cannot scale its logits: leave out rollout.top_p and rollout.top_k, or "
                f"set rollout.temperature to 1"
            )
        processor.scale *= init_info.logits_scale

    @property
    def receiver(self) -> RankReceiver:
        """This rank's own receiver; `follow` must come first."""
        assert self._receiver is not None, "follow() comes first"
        return self._receiver

    def follow(self, following: Following) -> None:
        """Open a receiver for this rank."""
        group = get_tp_group()
        self._receiver = RankReceiver(following, group.rank_in_group, group.world_size, self._device)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._module)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize an accelerator, which the CPU build lacks.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(
        self,
        update_info: UpdateInfo,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object] | None = None,
    ) -> None:
        """Load weights. vLLM 0.23 passes `load_weights`; None: use the model's own."""
        (load_weights or self._module.load_weights)(self._tensors(update_info))
        wait_for_device(self._device)

    def finish_weight_update(self) -> None:
        """Convert the last layers to the kernels' layout."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._module, self._model_config)

    def weights_loaded(self) -> None:
        """Finish a load after vLLM has."""
        _pack_tied_weights(self._module)
        wait_for_device(self._device)  # until here the device may still be reading the held version
        if self._loads_held:
            self.receiver.let_go()

    @contextmanager
    def adapter_files(self, update_info: UpdateInfo) -> Iterator[str]:
        """Yield a private directory with an adapter in peft's form, which vLLM's `add_lora` reads."""
        # vLLM takes an adapter's tensors from a file only. They stay in this process's memory: a kill leaves no more
        # than the directory, with a link that leads nowhere.
        tensors = {name: values.cpu().contiguous() for name, values in self._tensors(update_info)}
        file = os.memfd_create("adapter")
        try:
            with open(file, "wb", closefd=False) as memory:
                memory.write(save(tensors))
            with tempfile.TemporaryDirectory(prefix="asyncflow-") as directory:
                (Path(directory) / CONFIG_FILE).write_text(json.dumps(self._adapter))
                (Path(directory) / WEIGHTS_FILE).symlink_to(f"/proc/self/fd/{file}")
                yield directory
        finally:
            os.close(file)

    def adapter_loaded(self) -> None:
        """Finish the load of an adapter."""
        wait_for_device(self._device)
        if self._loads_held:
            self.receiver.let_go()

    def held_checksums(self) -> list[tuple[str, list[int], list[int], str, int]]:
        """See `AsyncFlowWorker.weight_checksums`."""
        assert self._layout is not None, "init_transfer_engine() comes first"
        shapes = {name: spec.shape for name, spec in self._layout.plan.tensors.items()}
        held = list(held_boxes(self._module, shapes))
        shares = [box_checksum(values, box, shapes[name]) for name, box, values in held]
        known = torch.stack(shares).tolist() if shares else []
        return [
            (name, list(box.offset), list(box.size), str(values.dtype).removeprefix("torch."), share)
            for (name, box, values), share in zip(held, known, strict=True)
        ]

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """Not called: vLLM 0.23 wants it of an engine."""
        raise NotImplementedError

    def shutdown(self) -> None:
        self._slots.clear()
        if self._receiver is not None:
            self._receiver.close()

    def _tensors(self, update_info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        """Return names and tensors of what is loaded; collective over the ranks."""
        self._loads_held = update_info.offer is None
        if update_info.offer is None:
            return self.receiver.held(get_tp_group().broadcast)
        return self._offered(msgspec.convert(update_info.offer, SlotOffer))

    def _offered(self, offer: SlotOffer) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of a slot, on the rank's device; on the CPU views, valid until the next update.
        Raises WeightSyncError if its memory is gone."""
        assert self._layout is not None, "init_transfer_engine() comes first"
        region = Region(self._slots.get(offer, ((0, offer.num_bytes),)), self._layout)
        for number, name in enumerate(self._layout.plan.names):
            yield name, region.view_tensor(number).to(self._device)


@register_model_loader(LOAD_FORMAT)
class ModelFiles(BaseModelLoader):  # type: ignore[misc]
    """Reads the base from the files that every other engine reads. vLLM's own loader reads others, too: backups beside
    a single file."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the files are there."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Raises ConfigError, see `HfWeights`; RuntimeError if a weight of the model was not in the files."""
        files = HfWeights(Path(model_config.model))
        loaded = model.load_weights((name, files.read_whole(name)) for name in files.names)
        lacking = {name for name, _ in model.named_parameters()} - set(loaded or ())
        if loaded is not None and lacking:
            raise RuntimeError(f"{model_config.model} has no values for {few_of(lacking)}")


# Methods whose layers keep their weights as they were loaded. Others (of quantization, of vendors) may rearrange them.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def held_boxes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the name, box and values of each part of a tensor that this rank holds as it was loaded: the inverse of
    vLLM's fused and sharded layouts.

    Left out is what was packed for a kernel (linear layers on the CPU, of which no other copy is kept), and what no
    rule here knows. `shapes` are those of whole tensors, by the trainer's names.
    """
    for prefix, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False):
            for stem, box, values in _boxes_of(model, prefix, layer, parameter.data):
                name = f"{stem}.{leaf}"
                shape = shapes.get(name)
                if shape is not None and box.fits_shape(shape) and tuple(values.shape) == box.size:
                    yield name, box, values


def _boxes_of(model: Any, prefix: str, layer: Any, values: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the parts of a layer's parameter, with the names of the modules that they are of in the trainer's model."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rank = getattr(layer, "tp_rank", 0)
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return
    stem, _, own = prefix.rpartition(".")
    fused = [f"{stem}.{part}" for part in getattr(model, "packed_modules_mapping", {}).get(own, ())]
    if isinstance(layer, QKVParallelLinear):
        first = (rank, rank // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas)
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        widths = (layer.head_size, layer.head_size, layer.v_head_size)
        sizes = [number * width for number, width in zip(heads, widths, strict=True)]
        yield from _rows_of(fused, sizes, first, values)
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        yield from _rows_of(fused, sizes, [rank] * len(sizes), values)
    elif isinstance(layer, ColumnParallelLinear):
        yield from _rows_of([prefix], [len(values)], [rank], values)
    elif isinstance(layer, RowParallelLinear) and values.dim() == 2:
        offset = 0, rank * layer.input_size_per_partition
        yield prefix, Box(offset, tuple(values.shape)), values
    elif isinstance(layer, VocabParallelEmbedding):
        start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        yield prefix, Box((start, 0), (end - start, *values.shape[1:])), values[: end - start]
    elif values.dim() == 1:  # norms, and biases that are added after a sum over ranks
        yield prefix, Box.from_shape(tuple(values.shape)), values


def _rows_of(
    stems: Sequence[str], sizes: Sequence[int], numbers: Sequence[int], values: Tensor
) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the parts of a fused parameter: `sizes` rows of each stem, its `numbers`-th block of that size."""
    if len(stems) != len(sizes) or sum(sizes) != len(values):
        return
    for stem, size, number, part in zip(stems, sizes, numbers, torch.split(values, list(sizes)), strict=True):
        offset = number * size, *(0,) * (values.dim() - 1)
        yield stem, Box(offset, tuple(part.shape)), part


def _pack_tied_weights(model: Any) -> None:
    """Have layers that use another layer's weight convert it to their own kernel's layout again."""
    # vLLM (0.32) only does so for the layer through which a weight was loaded. Where kernels keep a copy of the weight
    # (the CPU build), an output layer tied to the embedding would otherwise keep its initial weights.
    seen: set[int] = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is not None and id(weight) in seen and method is not None:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))


def _tie() -> None:
    """End this process with vLLM's engine, which ends with the rollout."""
    # vLLM itself only does so once it has a model. Ranks that share a model are children of the engine's process, so
    # `tied_children` does not reach them.
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)


_tie()
WeightTransferEngineFactory.register_engine(BACKEND, SlotTransfer)
