"""Settings of a queue that runs alone, as its controllers get them."""

from tq.config import QueueConfig, TaskConfig
from tq.policies import Fifo, TokenBalanced

QUEUE = QueueConfig(max_deliveries=3, policy="token-balanced")


def test_task_follows_the_queue_unless_it_says_otherwise() -> None:
    plain = TaskConfig(name="ref", inputs=("x",)).spec(QUEUE)
    assert (plain.max_deliveries, plain.policy) == (3, Fifo())
    own = TaskConfig(name="ref", inputs=("x",), max_deliveries=0, policy="token-balanced").spec(QUEUE)
    assert (own.max_deliveries, own.policy) == (0, TokenBalanced())


def test_rows_of_a_training_gang_are_never_given_up() -> None:
    train = TaskConfig(name="train", inputs=("x",), keeps_leases=True).spec(QUEUE)
    assert (train.max_deliveries, train.policy) == (0, TokenBalanced())
