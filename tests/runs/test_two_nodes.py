"""Two launchers on one machine, as README tries several nodes: `--nnodes 2 --head localhost` in two terminals."""

import signal
from contextlib import ExitStack
from pathlib import Path

from tests.support.ports import free_port

from . import command

SMALL = (
    "--roles", "rollout:2,actor:2,ref:1", "--set", "schedule.rollout_batch_size=8", "--set", "checkpoint.interval=0",
    "--run-dir", "run", "--steps", "100000",
)  # fmt: skip


def test_stop_on_one_of_two_nodes_ends_the_run_on_both(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head = ("--nnodes", "2", "--head", f"localhost:{free_port()}")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(command.started(*SMALL, *head, "--node-rank", str(rank), cwd=tmp_path))
            for rank in (0, 1)
        ]
        command.wait_until(lambda: command.last_step(run_dir) >= 3, "step 3")
        nodes[1].send_signal(signal.SIGTERM)
        said = [node.communicate(timeout=command.DEADLINE_S) for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], said
    assert len({(out + err).splitlines()[-1] for out, err in said}) == 1, said
    last = command.last_step(run_dir)
    assert (run_dir / "checkpoints" / f"step_{last:06d}").is_dir()
    command.check_ledger(run_dir, groups_per_step=8, last=last)
