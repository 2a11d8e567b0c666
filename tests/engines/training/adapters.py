"""The adapters of the suite."""

from .adapter import Adapter
from .fsdp_adapter import FsdpAdapter
from .megatron_adapter import MegatronAdapter

ADAPTERS: dict[str, Adapter] = {each.name: each for each in (FsdpAdapter(), MegatronAdapter())}
