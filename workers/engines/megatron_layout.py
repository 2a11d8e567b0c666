"""Which rank of the actor has which part of the model, and which ranks share rows. Pure and torch-free.

Megatron's own order: tensor parallelism changes fastest, then context parallelism, data parallelism, pipeline stages.
Tensor 2, data 2, pipeline 2:

    rank            0 1   2 3   4 5   6 7
    stage           0     0     1     1
    replica         0     1     0     1        replica 0 is ranks 0 1 4 5: they train on the same rows

Source: megatron-core 0.16.1, `core/parallel_state.py`, `initialize_model_parallel(order="tp-cp-ep-dp-pp")`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronPlace:
    """Where a rank is.

    Attributes:
        tensor: part of every layer.
        replica: copy of the model: the data-parallel rank.
        stage: of the pipeline.
        context: part of a micro-batch's tokens.
    """

    tensor: int
    replica: int
    stage: int
    context: int = 0


@dataclass(frozen=True)
class MegatronLayout:
    """Attributes:
    tensor, replicas, stages, context: how many of each; their product is the number of ranks.
    """

    tensor: int
    replicas: int
    stages: int
    context: int = 1

    def place(self, rank: int) -> MegatronPlace:
        """Return where a rank is."""
        left, tensor = divmod(rank, self.tensor)
        left, context = divmod(left, self.context)
        stage, replica = divmod(left, self.replicas)
        return MegatronPlace(tensor, replica, stage, context)

    def rank(self, place: MegatronPlace) -> int:
        """Return who is there."""
        column = place.replica + self.replicas * place.stage
        return place.tensor + self.tensor * (place.context + self.context * column)

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one copy of the model, stage after stage; the first is its lead."""
        return tuple(
            self.rank(MegatronPlace(tensor, replica, stage, context))
            for stage in range(self.stages)
            for context in range(self.context)
            for tensor in range(self.tensor)
        )

    def context_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return, for every part of every copy of the model, the ranks that share tokens."""
        return tuple(
            tuple(self.rank(MegatronPlace(tensor, replica, stage, context)) for context in range(self.context))
            for stage in range(self.stages)
            for replica in range(self.replicas)
            for tensor in range(self.tensor)
        )
