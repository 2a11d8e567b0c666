"""Entry of every worker process, under the launcher's elastic agent or a literal `torchrun` line:

torchrun --nproc-per-node 1 -m workers.roles.main RUN_DIR GANG
"""

import importlib
import logging
import os
import sys
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.log_format import TEXT, log_formatter
from asyncflow.process import die_with_parent, ignore_stop_signals
from workers.rank.context import WorkerContext

# Role -> its loop, `module:function(context)`.
ROLE_LOOPS = {
    "rollout": "workers.rollout.loop:run_rollout",
    "actor": "workers.trainer.actor:run_actor",
    "critic": "workers.trainer.actor:run_critic",
    "evaluate": "workers.rollout.evaluate:run_evaluate",
    "storage": "workers.roles.services:run_storage",
    "controller": "workers.roles.services:run_controller",
    "weights": "workers.roles.services:run_weights",
}
# The loop of all other roles, which compute columns of rows.
COLUMN_LOOP = "workers.tasks.task_worker:run_task"


def run_worker(run_dir: str, gang: str) -> None:
    """Run this process's role to its end; raises the AsyncFlowError that it could not handle."""
    # The launcher receives stop signals and tells the workers through the store.
    ignore_stop_signals()
    logging.basicConfig(level=logging.INFO, format=TEXT, force=True)
    with WorkerContext(Path(run_dir), gang) as context:
        for handler in logging.getLogger().handlers:
            form, own = context.config.launcher.log_format, context.gang
            handler.setFormatter(log_formatter(form, role=own.role, gang=own.name, rank=context.rank))
        module, _, function = ROLE_LOOPS.get(context.gang.role, COLUMN_LOOP).partition(":")
        getattr(importlib.import_module(module), function)(context)


def _main() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    die_with_parent()
    if len(sys.argv) != 3:
        raise ConfigError(f"workers.roles.main: expected RUN_DIR GANG, got {sys.argv[1:]}")
    record(run_worker)(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would abort, because threads still wait in C++


if __name__ == "__main__":
    _main()
