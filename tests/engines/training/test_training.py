"""Every training engine passes the suite; a further one has its adapter here."""

from asyncflow.testing.training import *  # noqa: F403

from .fsdp_adapter import FsdpAdapter, FsdpLoraAdapter
from .megatron_adapter import MegatronAdapter, MegatronLoraAdapter
from .outside_adapter import OutsideAdapter

ADAPTERS = [FsdpAdapter(), FsdpLoraAdapter(), MegatronAdapter(), MegatronLoraAdapter(), OutsideAdapter()]
