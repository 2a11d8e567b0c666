"""The literal command line that starts one gang by hand. Pure."""

import shlex
import sys
from pathlib import Path

from asyncflow.job import GangSpec


def torchrun_line(run_dir: Path, gang: GangSpec) -> str:
    """Return a shell line that starts all ranks of `gang` under torchrun's own elastic agent.

    The agent meets in a temporary file and shares no store, because torchrun's TCP stores listen on every interface
    whatever address they are given; the ranks find the job through the run directory. PYTHONSAFEPATH is `python -P`
    for torchrun and for the workers that it starts: the working directory cannot shadow our packages.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(gang.num_ranks)),
        *("--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
    ]
    worker = ["-m", "workers.main", str(run_dir), gang.name]
    environment = "PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return f'{environment} {shlex.join(command)} --rdzv-endpoint "$(mktemp)" {shlex.join(worker)}'
