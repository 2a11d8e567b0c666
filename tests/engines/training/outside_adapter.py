"""`actor.engine: module:Class`: a class that is made as one of a user's."""

from asyncflow.testing.train_adapter import TrainAdapter
from workers.engines.base import EngineSetup
from workers.engines.fsdp.sharding import FsdpEngine


class OutsideEngine(FsdpEngine):
    """FSDP2 once more."""

    def __init__(self, setup: EngineSetup) -> None:
        temperature = setup.run.rollout.temperature
        super().__init__(setup.model_dir, actor=setup.actor, temperature=temperature, device=setup.device, seed=0)


class OutsideAdapter(TrainAdapter):
    """One rank."""

    engine = f"{__name__}:OutsideEngine"
    layouts = ("1",)
    families = ("llama",)
