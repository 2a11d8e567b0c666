import shlex
from pathlib import Path

from asyncflow.job import GangSpec
from launcher.request.dry_run import torchrun_line


def test_line_starts_all_ranks_of_a_gang_and_opens_no_port() -> None:
    words = shlex.split(torchrun_line(Path("/runs/my run"), GangSpec("actor", "actor", 0, 4, ("cpu",) * 4)))
    assert words[-4:] == ["-m", "workers.roles.main", "/runs/my run", "actor"]
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert "store_type=file" in words
    assert {"PYTHONSAFEPATH=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(words[:3])
