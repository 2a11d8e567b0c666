"""Every training engine passes the suite; a further one has its adapter here."""

from asyncflow.testing.training import *  # noqa: F403

from .fsdp_adapter import FsdpAdapter
from .megatron_adapter import MegatronAdapter
from .outside_adapter import OutsideAdapter

ADAPTERS = [FsdpAdapter(), MegatronAdapter(), OutsideAdapter()]
