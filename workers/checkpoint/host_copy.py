"""A copy of an engine's state in host memory, made beside the computation; its memory is used again for the next one.

    begin(state) ---- copies run: the state may be read, not changed ---- wait() ---- the copy is written to disk ...
                      forward and backward of the next step go on        before the update

There is one such copy per rank, so the host's memory that saving needs is bounded.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncflow.device import CopiesDone, CopyStream
from workers.engines.boxed_tensor import BoxedTensor


class HostCopy:
    """Used by one thread; another may read the copy while no new one is begun."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: that holds the state; on an accelerator the copy's memory is page-locked.
        """
        self._pinned = device.type != "cpu"
        self._stream = CopyStream(device)
        self._buffers: dict[str, Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._done: CopiesDone | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy's tensors."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def begin(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state whose tensors are filled until `wait` returns.

        Args:
            state: of nested dicts and lists; tensors, DTensors, plain values. The first call is collective over the
                meshes of DTensors on an accelerator.
        """
        self.wait()
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        copied: dict[str, Any] = self._mirrored(state, "", pairs)
        self._buffers = {path: target for path, (target, _) in pairs.items()}  # what the state lost goes
        targets, sources = [target for target, _ in pairs.values()], [source for _, source in pairs.values()]

        def run() -> None:
            if targets:
                with torch.no_grad():
                    torch._foreach_copy_(targets, sources, non_blocking=True)

        (self._done,) = self._stream.run([run])
        return copied

    def wait(self) -> None:
        """Return when the copy is there and the state may change."""
        if self._done is not None:
            self._done.wait()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stream.close()

    def _mirrored(self, value: Any, path: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, dict):
            return {name: self._mirrored(one, f"{path}/{name}", pairs) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._mirrored(one, f"{path}/{k}", pairs) for k, one in enumerate(value))
        if isinstance(value, DTensor):
            local = self._mirrored(value.to_local(), path, pairs)
            mesh = self._host_mesh(value.device_mesh)
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=shape, stride=stride)
        if isinstance(value, BoxedTensor):
            return value.mapped(lambda k, part: self._mirrored(part, f"{path}/{k}", pairs))
        if isinstance(value, Tensor):
            source = value.detach()
            pairs[path] = (self._buffer(path, source), source)
            return pairs[path][0]
        return copy.deepcopy(value)

    def _buffer(self, path: str, source: Tensor) -> Tensor:
        known = self._buffers.get(path)
        if known is not None and known.shape == source.shape and known.dtype == source.dtype:
            return known
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the same ranks as a mesh of hosts: a DTensor's local part lies where its mesh says."""
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return self._meshes[mesh]
