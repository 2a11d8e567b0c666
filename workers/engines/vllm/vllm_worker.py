"""Our part of vLLM's worker processes, which alone import it: loads weights from shared memory or its own receiver."""

import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncflow.device import wait_for_device
from asyncflow.process import die_with_parent, keep_freed_memory
from weightsync.receiver import Following, RankReceiver
from weightsync.version import Version
from workers.engines.vllm.mailbox import BACKEND, Letter, MailboxReader

# vLLM imports this module as its worker extension (`worker_extension_cls`) before it builds the model; that registers
# the weight transfer engine `asyncflow`, which vLLM calls like any other: start_weight_update, update_weights with a
# `Letter` (or with nothing, for the version that is held), finish_weight_update. Layers are loaded one by one and
# converted to the kernels' layout, as when the model was first loaded.

_CPU = torch.device("cpu")


class AsyncFlowWorker:
    """The worker extension: methods that the rollout calls in every rank. See `RanksEngine`."""

    weight_transfer_engine: "MailboxTransfer"

    def follow_weights(self, following: dict[str, Any]) -> None:
        """Receive weights from now on."""
        self.weight_transfer_engine.follow(msgspec.convert(following, Following))

    def hold_weights(self, version: tuple[int, int]) -> bool:
        """Keep a version unchanged; False: it is not the newest here."""
        return self.weight_transfer_engine.receiver.hold(Version(*version))

    def let_weights_go(self) -> None:
        """Release the held version, which has been loaded."""
        self.weight_transfer_engine.receiver.let_go()


@dataclass
class MailboxInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings that are sent once."""

    logits_scale: float = 1.0  # the model multiplies its logits by it


@dataclass
class MailboxUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `Letter`; without names the ranks load the version they hold."""

    pid: int = 0
    fd: int = 0
    num_bytes: int = 0
    token: str = ""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


class MailboxTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the weights in the rollout's `WeightMailbox`, or those that its own receiver holds."""

    init_info_cls = MailboxInitInfo
    update_info_cls = MailboxUpdateInfo

    def __init__(self, *args: Any) -> None:
        # The current vLLM passes (config, vllm_config, device, model). Versions that vllm-ascend builds on pass
        # (config, parallel_config, model) or, older still, (config, parallel_config), and later a load function.
        super().__init__(*args)
        self._module: Any = args[-1] if isinstance(args[-1], nn.Module) else None
        self._model_config = getattr(args[1], "model_config", None)
        self._device = _CPU if self._module is None else next(self._module.parameters()).device
        self._reader = MailboxReader(self._device)
        self._receiver: RankReceiver | None = None
        if self._module is not None and self._device.type == "cpu":
            keep_freed_memory()  # every update allocates all packed weights again

    def init_transfer_engine(self, init_info: MailboxInitInfo) -> None:
        """Have the model scale its logits, as some model families do by configuration.
        Raises RuntimeError if the model has no `logits_processor`."""
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
        """Open a receiver for this rank. Raises RuntimeError if this vLLM does not say where the model is."""
        if self._module is None:
            raise RuntimeError("this vLLM is too old to receive broadcasts: set weightsync.path to staged")
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
        update_info: MailboxUpdateInfo,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object] | None = None,
    ) -> None:
        """Load a letter's weights. Older releases pass `load_weights`; None: use the model's own."""
        load = load_weights or self._module.load_weights
        if update_info.names:
            read = self._reader.read(Letter(**vars(update_info)))
            load((name, each.to(self._device)) for name, each in read)
        else:
            group = get_tp_group()
            load(self.receiver.held(group.broadcast))
        wait_for_device(self._device)

    def finish_weight_update(self) -> None:
        """Convert the last layers to the kernels' layout."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._module, self._model_config)
        _pack_tied_weights(self._module)
        wait_for_device(self._device)  # until here the device may still be reading the held version

    def shutdown(self) -> None:
        self._reader.close()
        if self._receiver is not None:
            self._receiver.close()


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
WeightTransferEngineFactory.register_engine(BACKEND, MailboxTransfer)
