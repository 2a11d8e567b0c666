"""Our part of vLLM's worker processes: gets weights, from the rollout's shared memory or as a receiver of its own. Only
these processes import it.

vLLM imports it as its worker extension (`worker_extension_cls`) before it builds the model; that registers the weight
transfer engine `asyncflow`. vLLM calls it like any other: start_weight_update, update_weights with a `Letter`, or with
nothing for the version that is held, finish_weight_update. Layers are loaded one by one and put into the kernels'
layout, as when the model was first loaded.
"""

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

from asyncflow.process import die_with_parent, keep_freed_memory
from weightsync.receiver import Following, RankReceiver
from weightsync.version import Version
from workers.engines.vllm.mailbox import BACKEND, Letter, MailboxReader

_CPU = torch.device("cpu")


class AsyncFlowWorker:
    """The worker extension: what the rollout calls in every rank. See `RanksEngine`."""

    weight_transfer_engine: "MailboxTransfer"

    def follow_weights(self, following: dict[str, Any]) -> None:
        """Receive weights from now on."""
        self.weight_transfer_engine.follow(msgspec.convert(following, Following))

    def hold_weights(self, version: tuple[int, int]) -> bool:
        """Keep a version as it is; False: it is not the newest here."""
        return self.weight_transfer_engine.receiver.hold(Version(*version))

    def let_weights_go(self) -> None:
        """The version that was held is loaded."""
        self.weight_transfer_engine.receiver.let_go()


@dataclass
class MailboxInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings that are sent once.

    Attributes:
        logits_scale: the model multiplies its logits by it.
    """

    logits_scale: float = 1.0


@dataclass
class MailboxUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `Letter`; with none of them the ranks load what they hold."""

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
        """Args:
        args: as the installed vLLM passes them: (config, vllm_config, device, model). Those that vllm-ascend builds on
            pass (config, parallel_config, model) or, older, (config, parallel_config), and then a function that loads.
        """
        super().__init__(*args)
        self._module: Any = args[-1] if isinstance(args[-1], nn.Module) else None
        self._model_config = getattr(args[1], "model_config", None)
        self._device = _CPU if self._module is None else next(self._module.parameters()).device
        self._reader = MailboxReader(self._device)
        self._receiver: RankReceiver | None = None
        if self._module is not None and self._device.type == "cpu":
            keep_freed_memory()  # an update allocates all packed weights again

    def init_transfer_engine(self, init_info: MailboxInitInfo) -> None:
        """Have the model scale its logits, as those of some families do by their configuration.

        Raises:
            RuntimeError: the model has no vLLM `LogitsProcessor` of that name.
        """
        if init_info.logits_scale == 1.0:
            return
        processor = getattr(self._module, "logits_processor", None)
        if processor is None:
            raise RuntimeError(
                f"{type(self._module).__name__} cannot scale its logits: leave rollout.top_p and rollout.top_k out, or "
                f"set rollout.temperature to 1"
            )
        processor.scale *= init_info.logits_scale

    @property
    def receiver(self) -> RankReceiver:
        """This rank's own, once it follows."""
        assert self._receiver is not None, "follow() comes first"
        return self._receiver

    def follow(self, following: Following) -> None:
        """Have a receiver of its own from now on.

        Raises:
            RuntimeError: this vLLM does not say where the model is.
        """
        if self._module is None:
            raise RuntimeError("this vLLM is too old to receive broadcasts: set weightsync.path to staged")
        group = get_tp_group()
        self._receiver = RankReceiver(following, group.rank_in_group, group.world_size, self._device)

    def start_weight_update(self) -> None:
        """Have the layers expect new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._module)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a letter's weights. The base class would synchronise an accelerator, which the CPU build lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(
        self,
        update_info: MailboxUpdateInfo,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object] | None = None,
    ) -> None:
        """Load a letter's weights.

        Args:
            update_info: the letter.
            load_weights: takes names and tensors; None: the model's own. Older releases pass it.
        """
        load = load_weights or self._module.load_weights
        if update_info.names:
            read = self._reader.read(Letter(**vars(update_info)))
            load((name, each.to(self._device)) for name, each in read)
        else:
            group = get_tp_group()
            load(self.receiver.held(group.broadcast))
        self._wait_for_device()

    def finish_weight_update(self) -> None:
        """Put the last layers into the kernels' layout."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._module, self._model_config)
        _pack_tied_weights(self._module)
        self._wait_for_device()  # what was held may still be read until now

    def shutdown(self) -> None:
        """Unmap the shared memory, and receive no more."""
        self._reader.close()
        if self._receiver is not None:
            self._receiver.close()

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def _pack_tied_weights(model: Any) -> None:
    """Have layers that use another layer's weight put it into their own kernel's layout again.

    vLLM (0.32) does so only for the layer by which a weight is loaded. Where kernels keep a copy of the weight (the CPU
    build), an output layer tied to the embedding would keep the weights that the model was built with.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is not None and id(weight) in seen and method is not None:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))


def _tie() -> None:
    """End this process with vLLM's engine, which ends with the rollout; vLLM itself does so once it has a model.

    Ranks that share a model are children of the engine's process, so `tied_children` does not reach them.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)


_tie()
WeightTransferEngineFactory.register_engine(BACKEND, MailboxTransfer)
