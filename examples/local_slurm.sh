#!/bin/bash
# A real Slurm on this machine alone, without systemd: to try `asyncflow sbatch` and to test it.
#
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client munge       # Debian, Ubuntu
#   examples/local_slurm.sh up /tmp/slurm --nodes 4        # as root; takes a second
#   export SLURM_CONF=/tmp/slurm/slurm.conf                # now sinfo, sbatch, squeue, scancel speak with it
#   examples/local_slurm.sh down /tmp/slurm                # cancels its jobs, ends every process of it
#
# Every "node" is a slurmd of its own on this host, so all of them share its cores, memory and /dev/shm. Two partitions:
# `main`, and `spot`, whose jobs lose their nodes to those of `main` and are put back into the queue (10 s of grace).
# Nothing outside DIR is written. The daemons' ports are free ones; munge's key, made here, says who may use them.
set -euo pipefail

usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
}

up() {
    mkdir -p "$dir"/{log,run,spool,state}
    head -c 128 /dev/urandom > "$dir/munge.key"
    chmod 400 "$dir/munge.key"
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --seed-file="$dir/munge.seed" \
        --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log"
    write_configuration
    slurmctld -c -f "$dir/slurm.conf"
    for node in "${names[@]}"; do
        slurmd -f "$dir/slurm.conf" -N "$node"
    done
    wait_for_nodes
    echo "export SLURM_CONF=$dir/slurm.conf"
}

write_configuration() {
    local ports node
    read -ra ports < <(free_ports $((${#names[@]} + 1)))
    {
        cat <<EOT
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log

# No cgroups, no accounting, no MPI: none of them runs without more than these packages.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

# Quick, because everything is near: a dead node is seen in 10 s, a job that ignores SIGTERM is killed after 5 s.
SlurmdTimeout=10
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=5
EOT
        for node in "${!names[@]}"; do
            echo "NodeName=${names[$node]} NodeHostname=$(hostname -s) NodeAddr=127.0.0.1" \
                "Port=${ports[$((node + 1))]} CPUs=$cpus"
        done
        echo "PartitionName=main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF"
        echo "PartitionName=spot Nodes=ALL PriorityTier=1 GraceTime=10"
    } > "$dir/slurm.conf"
}

free_ports() {
    python3 - "$1" <<'EOT'
import contextlib, random, socket, sys

# Below what the kernel gives to others: a daemon that starts again needs its port again.
with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
    lowest = int(limits.read().split()[0])
ports = []
for port in random.sample(range(lowest // 2, lowest), 1000):
    if len(ports) == int(sys.argv[1]):
        break
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind(("127.0.0.1", port))
        ports.append(port)
print(*ports)
EOT
}

wait_for_nodes() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        if [[ $(sinfo --noheader --partition=main --states=idle --format=%D 2> /dev/null) == "${#names[@]}" ]]; then
            return
        fi
        sleep 0.1
    done
    echo "the nodes did not come up within 60 s; see $dir/log" >&2
    down
    exit 1
}

down() {
    local pids pid tries
    mapfile -t pids < <(daemons '*')
    if [[ -n $(daemons slurmctld) ]]; then
        squeue --noheader --format=%A | xargs --no-run-if-empty scancel || true
        for ((tries = 0; tries < 100; tries++)); do
            if [[ -z $(squeue --noheader) ]]; then break; fi
            sleep 0.1
        done
    fi
    for pid in $(steps); do
        kill_tree "$pid"
    done
    for pid in "${pids[@]}"; do
        kill "$pid" || true
    done
    for pid in "${pids[@]}"; do
        for ((tries = 0; tries < 100; tries++)); do
            if ! kill -0 "$pid" 2> /dev/null; then break; fi
            sleep 0.1
        done
        kill -KILL "$pid" 2> /dev/null || true
    done
}

# The process ids of our daemons that live. A pid file stays behind when its daemon is killed.
daemons() {
    local file pid
    for file in "$dir"/run/$1.pid; do
        pid=$(cat "$file" 2> /dev/null || true)
        if [[ -n $pid && $(tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null) == *"$dir/"* ]]; then echo "$pid"; fi
    done
}

# The process ids of what manages our jobs' steps; it outlives a slurmd that was killed.
steps() {
    local pid
    for pid in $(pgrep slurmstepd || true); do
        if grep --quiet --null-data --line-regexp --fixed-strings "SLURM_CONF=$dir/slurm.conf" "/proc/$pid/environ" \
            2> /dev/null; then
            echo "$pid"
        fi
    done
}

kill_tree() {
    local child
    for child in $(pgrep --parent "$1" || true); do
        kill_tree "$child"
    done
    kill -KILL "$1" 2> /dev/null || true
}

[[ $# -ge 2 && ($1 == up || $1 == down) ]] || usage
command=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd -P)
shift 2
nodes=2
cpus=4
while [[ $# -ge 2 ]]; do
    case $1 in
        --nodes) nodes=$2 ;;
        --cpus) cpus=$2 ;;
        *) usage ;;
    esac
    shift 2
done
[[ $# == 0 ]] || usage
names=()
for ((number = 1; number <= nodes; number++)); do
    names+=("n$number")
done
export SLURM_CONF=$dir/slurm.conf
$command
