"""Which node a launcher is."""

import math

import pytest

from asyncflow.errors import ConfigError
from launcher.nodes.options import LEAVE_S, NodePlace, find_place, save_time_left_s

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n[4-6]",
    "SLURM_JOB_NODELIST": "n[3-6]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
"""What srun sets (Slurm 22.05), as far as it matters."""


def test_without_options_a_run_has_one_node() -> None:
    assert find_place(None, None, None, {}) == NodePlace()


def test_one_node_needs_nothing_more() -> None:
    assert find_place(1, None, None, {}) == find_place(1, 0, None, {}) == NodePlace()


def test_options_say_it_all() -> None:
    assert find_place(4, 2, "node1:29400", {}) == NodePlace(4, 2, "node1", 29400)
    assert find_place(4, 0, "10.0.0.1", {}) == NodePlace(4, 0, "10.0.0.1", 0)
    assert find_place(4, 3, None, STEP) == NodePlace(4, 3)
    assert find_place(4, 0, "[fd00::1]:29400", {}) == NodePlace(4, 0, "fd00::1", 29400)
    assert find_place(4, 0, "fd00::1", {}) == find_place(4, 0, "[fd00::1]", {}) == NodePlace(4, 0, "fd00::1", 0)


def test_srun_says_it_all() -> None:
    place = find_place(None, None, None, STEP)
    assert place == NodePlace(3, 1, hints=("n4", "10.0.0.9"), job_id="17")
    assert not place.is_head
    assert find_place(3, None, None, STEP) == place
    assert find_place(None, 2, "n5:1234", STEP) == NodePlace(3, 2, "n5", 1234, place.hints, "17")


def test_older_slurm_says_less() -> None:
    names = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_PROCID", "SLURM_JOB_NODELIST")
    env = {name: STEP[name] for name in names} | {"SLURM_STEPID": "0", "SLURM_NTASKS": "3"}
    assert find_place(None, None, None, env) == NodePlace(3, 1, hints=("n3",), job_id="17")


def test_one_node_under_slurm_is_one_node() -> None:
    env = STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert find_place(None, None, None, env) == NodePlace()
    assert find_place(1, None, None, STEP) == NodePlace()


def test_shell_of_an_allocation_is_one_node() -> None:
    assert find_place(None, None, None, {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[4-6]"}) == NodePlace()


def test_batch_script_without_srun_is_refused() -> None:
    env = {"SLURM_NNODES": "3", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    with pytest.raises(ConfigError, match="srun did not start the command; put `srun --ntasks-per-node=1` before"):
        find_place(None, None, None, env)
    assert find_place(1, None, None, env) == NodePlace()


@pytest.mark.parametrize(("nodes", "tasks"), [("3", "6"), ("1", "4")])
def test_several_launchers_on_a_node_are_refused(nodes: str, tasks: str) -> None:
    env = STEP | {"SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": tasks}
    with pytest.raises(ConfigError, match=f"srun: {tasks} tasks on {nodes} node.*--ntasks-per-node=1"):
        find_place(None, None, None, env)


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "head", "env", "complaint"),
    [
        (0, 0, None, {}, "--nnodes: 0 is not a number of nodes"),
        (2, None, None, {}, "--node-rank: is missing; give each of the 2 nodes its own, 0 to 1"),
        (None, 1, None, {}, "--node-rank: 1 needs --nnodes"),
        (2, 2, None, {}, r"--node-rank: 2 must be 0 to 1 \(--nnodes 2\)"),
        (2, -1, None, {}, "--node-rank: -1 must be 0 to 1"),
        (1, 1, None, {}, "--node-rank: 1 must be 0, there is one node"),
        (None, None, "a:1", {}, "--head: a:1 needs --nnodes 2 or more; a run on one node listens on loopback only"),
        (1, None, "a:1", {}, "--head: a:1 needs --nnodes 2 or more; a run on one node listens on loopback only"),
        (2, 0, "", {}, "--head: '' is not HOST or HOST:PORT"),
        (2, 0, "a b", {}, "--head: 'a b' is not HOST"),
        (2, 0, "fd00:::1", {}, "--head: 'fd00:::1' is not HOST"),
        (
            2,
            0,
            "fe80::1%eth0",
            {},
            "--head: 'fe80::1%eth0', an address of a link, means another host on each node; give",
        ),
        (2, 0, "[fe80::1%eth0]:29400", {}, "an address of a link, means another host on each node; give a global one"),
        (2, 0, "fd00:::1%eth0", {}, "--head: 'fd00:::1%eth0' is not HOST"),
        (2, 0, "[node1]:29400", {}, r"--head: '\[node1\]:29400' is not HOST"),
        (2, 0, "a:0", {}, "--head: 'a:0' has no port from 1 to 65535"),
        (2, 0, "a:99999", {}, "has no port from 1 to 65535"),
        (2, None, None, STEP, "--nnodes: 2, but srun started the command on 3; leave --nnodes out"),
        (None, 3, None, STEP, "--node-rank: 3 must be 0 to 2"),
        (None, None, None, STEP | {"SLURM_NODEID": "x"}, "SLURM_NODEID: 'x' is not a number"),
        (None, None, None, STEP | {"SLURM_STEP_NODELIST": "n["}, "node list: 'n\\[' is not a list"),
        (None, None, None, {k: v for k, v in STEP.items() if "ID" not in k} | {"SLURM_STEP_ID": "0"}, "SLURM_NODEID"),
    ],
)
def test_what_cannot_be_is_one_line(
    nnodes: int | None, node_rank: int | None, head: str | None, env: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_place(nnodes, node_rank, head, env)


def test_a_save_may_take_until_shortly_before_slurm_ends_the_job() -> None:
    assert save_time_left_s({}, 1000.0) == math.inf
    assert save_time_left_s({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "1100"}, 1000.0) == 100 - LEAVE_S
    assert save_time_left_s({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "1010"}, 1000.0) < 0
    assert save_time_left_s({"SLURM_JOB_ID": "17"}, 1000.0) == 0, "an old Slurm does not say when"
