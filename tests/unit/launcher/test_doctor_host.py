"""What the doctor thinks of a host: limits, memory, disk, clock, ports. Facts are made up; a few are read here."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.doctor import disk
from launcher.doctor import disk as host
from launcher.doctor.disk import (
    Allowance,
    ClockFacts,
    DiskFacts,
    FileSystem,
    LimitFacts,
    MemoryFacts,
    Mount,
    file_system_of,
    memory_allowance,
    process_allowance,
)
from launcher.doctor.findings import Finding, Level, Needs
from launcher.doctor.network import PortFacts, judge_ports, parse_ranges, read_ports

ANY = Needs("/runs/one")
RUN = replace(
    ANY,
    processes=8,
    connections=200,
    descriptors=500,
    threads=300,
    memory_bytes=10 * 10**9,
    memory_parts="queue 6 GB, weight slots 4 GB",
    checkpoint_bytes=10**9,
    num_checkpoints=3,
)
NODES = replace(ANY, num_nodes=2)
GB = 10**9

ROOMY = LimitFacts(
    files=65536,
    files_hard=65536,
    files_left=10**6,
    threads=-1,
    threads_used=100,
    allowance=None,
    threads_left=10**5,
)


def level(findings: list[Finding]) -> Level:
    """Level of the only finding."""
    (finding,) = findings
    return finding.level


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "remedy"),
    [
        (ROOMY, RUN, Level.OK, ""),
        (ROOMY, ANY, Level.OK, ""),
        (replace(ROOMY, files=-1, files_hard=-1), RUN, Level.OK, ""),
        (replace(ROOMY, files=500), RUN, Level.OK, ""),
        (replace(ROOMY, files=499), RUN, Level.ERROR, "ulimit -n 65536"),
        (replace(ROOMY, files=400, files_hard=600), RUN, Level.ERROR, "ulimit -n 600"),
        (replace(ROOMY, files=400, files_hard=-1), RUN, Level.ERROR, "ulimit -n 65536"),
        (replace(ROOMY, files=400, files_hard=400), RUN, Level.ERROR, "limits.conf"),
        (replace(ROOMY, files=256), ANY, Level.ERROR, "ulimit -n"),
        (replace(ROOMY, files_left=3999), RUN, Level.ERROR, "fs.file-max"),
    ],
)
def test_open_files(facts: LimitFacts, needs: Needs, expected: Level, remedy: str) -> None:
    (finding,) = host.judge_open_files(facts, needs)
    assert finding.level is expected
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "remedy"),
    [
        (ROOMY, RUN, Level.OK, ""),
        (replace(ROOMY, threads=400), RUN, Level.OK, ""),
        (replace(ROOMY, threads=399), RUN, Level.WARNING, "ulimit -u"),
        (replace(ROOMY, threads=249), RUN, Level.ERROR, "ulimit -u"),
        (replace(ROOMY, threads=90), RUN, Level.ERROR, "ulimit -u"),
        (replace(ROOMY, allowance=Allowance(512, 212)), RUN, Level.OK, ""),
        (replace(ROOMY, allowance=Allowance(512, 213)), RUN, Level.WARNING, "pids-limit"),
        (replace(ROOMY, threads_left=9), RUN, Level.ERROR, "threads-max"),
        (replace(ROOMY, threads=101, allowance=Allowance(5, 5)), ANY, Level.OK, ""),
    ],
)
def test_processes(facts: LimitFacts, needs: Needs, expected: Level, remedy: str) -> None:
    (finding,) = host.judge_processes(facts, needs)
    assert finding.level is expected
    assert remedy in finding.remedy


def test_limits_of_this_host_can_be_read() -> None:
    facts = host.read_limits(ANY)
    assert facts.files > 0
    assert facts.threads_used > 0
    assert facts.threads_left > 0


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (MemoryFacts(64 * GB, 60 * GB, None), RUN, Level.OK, "60 GB of 64 GB free"),
        (MemoryFacts(64 * GB, 12 * GB, None), RUN, Level.WARNING, "queue 6 GB, weight slots 4 GB"),
        (MemoryFacts(8 * GB, 8 * GB, None), RUN, Level.ERROR, "the run takes 10 GB or more"),
        (MemoryFacts(64 * GB, 60 * GB, Allowance(8 * GB, 0)), RUN, Level.ERROR, "8 GB of 8 GB free"),
        (MemoryFacts(64 * GB, 60 * GB, Allowance(32 * GB, 25 * GB)), RUN, Level.WARNING, "7 GB of 32 GB free"),
        (MemoryFacts(64 * GB, 60 * GB, Allowance(32 * GB, GB)), RUN, Level.OK, "in this control group"),
        (MemoryFacts(64 * GB, 60 * GB, None), ANY, Level.OK, "60 GB of 64 GB free"),
        (MemoryFacts(GB, GB, None), ANY, Level.ERROR, "takes 2 GB or more"),
    ],
)
def test_memory(facts: MemoryFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = host.judge_memory(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_memory_in_a_job_is_asked_of_slurm() -> None:
    (finding,) = host.judge_memory(MemoryFacts(64 * GB, 60 * GB, Allowance(GB, 0)), RUN)
    assert "sbatch --mem=0" in finding.remedy


def write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "cgroup"
    write(
        {
            own: "0::/job/step\n",
            root / "job/memory.max": "1000\n",
            root / "job/memory.current": "900\n",
            root / "job/memory.stat": "anon 1\ninactive_file 300\n",
            root / "job/step/memory.max": "max\n",
            root / "job/step/pids.max": "64\n",
            root / "job/step/pids.current": "4\n",
        }
    )
    assert memory_allowance(cgroup=own, root=root) == Allowance(1000, 600)
    assert process_allowance(cgroup=own, root=root) == Allowance(64, 4)


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "cgroup"
    write(
        {
            own: "4:memory:/docker/x\n3:cpu,cpuacct:/\n8:pids:/\n0::/\n",
            root / "memory/memory.limit_in_bytes": "9223372036854771712\n",
            root / "memory/docker/x/memory.limit_in_bytes": "500\n",
            root / "memory/docker/x/memory.usage_in_bytes": "100\n",
            root / "memory/docker/x/memory.stat": "total_inactive_file 40\n",
        }
    )
    assert memory_allowance(cgroup=own, root=root) == Allowance(500, 60)
    assert process_allowance(cgroup=own, root=root) is None


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory_allowance(cgroup=tmp_path / "none", root=tmp_path) is None


EXT4 = FileSystem("ext4", "/")
DISK = DiskFacts("/runs", EXT4, 100 * GB, 10**6)


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (DISK, RUN, Level.OK, "checkpoints take up to 3 GB"),
        (DISK, ANY, Level.OK, "/runs (ext4): 100 GB free"),
        (replace(DISK, free_bytes=2 * GB), RUN, Level.ERROR, "3 checkpoints of 1 GB"),
        (replace(DISK, free_bytes=int(3.5 * GB)), RUN, Level.WARNING, "hardly more than the 3 GB"),
        (replace(DISK, free_inodes=12), RUN, Level.ERROR, "12 more files"),
        (replace(DISK, free_inodes=-1), RUN, Level.OK, ""),
        (replace(DISK, errors={"write": "PermissionError: no"}), RUN, Level.ERROR, "cannot be written"),
        (replace(DISK, errors={"fsync": "OSError: no"}), RUN, Level.ERROR, "cannot fsync"),
        (replace(DISK, errors={"rename": "OSError: no"}), RUN, Level.ERROR, "cannot rename"),
        (replace(DISK, errors={"lock": "OSError: no"}), RUN, Level.WARNING, "second launcher"),
        (replace(DISK, fsync_s=3.0), RUN, Level.WARNING, "64 kB took 3.0 s"),
        (replace(DISK, file_system=FileSystem("overlay", "/")), RUN, Level.WARNING, "the container's own layer"),
        (replace(DISK, file_system=FileSystem("nfs4", "/runs")), NODES, Level.OK, ""),
        (DISK, NODES, Level.ERROR, "this node's own"),
        (replace(DISK, file_system=FileSystem("fancyfs", "/runs")), NODES, Level.WARNING, "the same on all 2 nodes"),
    ],
)
def test_disk(facts: DiskFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = disk.judge_disk(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_a_read_only_mount_is_mounted_again() -> None:
    facts = replace(DISK, file_system=FileSystem("ext4", "/runs", read_only=True), errors={"write": "OSError: no"})
    (finding,) = disk.judge_disk(facts, RUN)
    assert "remount,rw /runs" in finding.remedy


def test_a_place_that_may_not_be_looked_into_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert disk.nearest(tmp_path / "runs") == Path("/")


def test_trying_a_place_leaves_nothing(tmp_path: Path) -> None:
    facts = disk.try_disk(Needs(str(tmp_path / "runs" / "one")))
    assert facts.place == str(tmp_path)
    assert facts.errors == {}
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


MOUNTS = (
    Mount("/", "ext4", "rw,relatime"),
    Mount("/scratch", "lustre", "rw,flock"),
    Mount("/scratch/my runs", "nfs4", "ro"),
    Mount("/home", "fuse.juicefs", "rw"),
    Mount("/home", "tmpfs", "ro"),
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/runs", FileSystem("ext4", "/")),
        ("/scratch/me", FileSystem("lustre", "/scratch")),
        ("/scratch2", FileSystem("ext4", "/")),
        ("/scratch/my runs/a", FileSystem("nfs4", "/scratch/my runs", read_only=True)),
        ("/home/me", FileSystem("tmpfs", "/home", read_only=True)),
    ],
)
def test_the_mount_of_a_path(path: str, expected: FileSystem) -> None:
    assert file_system_of(Path(path), MOUNTS) == expected


def test_which_file_systems_nodes_share() -> None:
    shared = {kind: FileSystem(kind, "/").shared for kind in ("nfs4", "lustre", "xfs", "tmpfs", "fancyfs")}
    assert shared == {"nfs4": True, "lustre": True, "xfs": False, "tmpfs": False, "fancyfs": None}


GOOD_CLOCK = ClockFacts(1.8e9, 0.0001, True, 0.02)


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (GOOD_CLOCK, NODES, Level.OK, "kept by NTP, error up to 0.020 s"),
        (replace(GOOD_CLOCK, synchronised=False), ANY, Level.OK, "several nodes would need it"),
        (replace(GOOD_CLOCK, synchronised=False), NODES, Level.WARNING, "not synchronised"),
        (replace(GOOD_CLOCK, synchronised=None), NODES, Level.OK, "NTP unknown"),
        (replace(GOOD_CLOCK, drift_s=-3.0), ANY, Level.WARNING, "jumped by -3.00 s"),
        (replace(GOOD_CLOCK, now=3600.0), ANY, Level.ERROR, "1970-01-01"),
    ],
)
def test_clock(facts: ClockFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = host.judge_clock(facts, needs)
    assert finding.level is expected
    assert text in finding.text


def test_the_clock_of_this_host_can_be_read() -> None:
    facts = host.watch_clock(ANY)
    assert facts.now > 1.7e9
    assert facts.synchronised in (True, False, None)


USUAL = PortFacts(32768, 60999, (), used=100)
REDIS = replace(ANY, backend="redis", backend_address="redis://:secret@127.0.0.1:40000/0")


@pytest.mark.parametrize(
    ("facts", "needs", "expected", "text"),
    [
        (USUAL, RUN, Level.OK, "28132 are left of 32768 to 60999"),
        (PortFacts(60000, 60199), RUN, Level.WARNING, "only 200 ports"),
        (PortFacts(60000, 60198), RUN, Level.ERROR, "199 ports are left"),
        (PortFacts(60000, 62999, ((59000, 61999),)), replace(RUN, connections=1001), Level.ERROR, "1000 ports"),
        (PortFacts(1000, 60999), ANY, Level.WARNING, "system services"),
        (PortFacts(10000, 60999), NODES, Level.WARNING, "torchrun between nodes needs port 29500"),
        (PortFacts(10000, 60999, ((29500, 29500),)), NODES, Level.OK, ""),
        (USUAL, REDIS, Level.WARNING, "the storage backend redis needs port 40000"),
        (USUAL, replace(REDIS, backend="mooncake", backend_address="10.0.0.1:50051"), Level.WARNING, "port 50051"),
        (USUAL, replace(REDIS, backend_address="unix:///run/redis.sock"), Level.OK, ""),
    ],
)
def test_ports(facts: PortFacts, needs: Needs, expected: Level, text: str) -> None:
    (finding,) = judge_ports(facts, needs)
    assert finding.level is expected
    assert text in finding.text
    assert "secret" not in finding.text + finding.remedy


def test_reserved_ports_are_single_or_ranges() -> None:
    assert parse_ranges("") == ()
    assert parse_ranges("8080,9148-9150") == ((8080, 8080), (9148, 9150))


def test_ports_of_this_host_can_be_read() -> None:
    facts = read_ports(ANY)
    assert 0 < facts.low < facts.high
    assert facts.used >= 0
