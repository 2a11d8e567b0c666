"""`asyncflow queue` on one host, a client on another."""

import json
import signal
import sys
from pathlib import Path

from .hosts import Host, ends, eventually

COMMAND = Path(sys.executable).parent / "asyncflow"
CLIENT = """
import sys, tq
with tq.connect(sys.argv[1], "scorer") as client:
    client.put_rows({"x": ["1 + 1 =", "2 + 2 ="]})
    client.close_writing()
    for lease in client.stream("score", ["x"]):
        lease.put({"score": [float(len(text)) for text in lease["x"].texts()]})
        print(lease["x"].texts())
"""


def test_a_client_of_another_host_needs_the_address_file_alone(two_hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text("tasks: {score: [x]}\ntq: {num_storage_units: 2}\n")
    address = tmp_path / "queue.json"
    address.write_text("of an earlier one, which others may read")
    host = two_hosts[0].address
    served = two_hosts[0].start(COMMAND, "queue", tmp_path / "tasks.yaml", "--host", host, "--address", address)
    assert served.stdout is not None
    said_first = iter(served.stdout.readline, "")  # PyTorch complains that these hosts have no names
    line = next(line for line in said_first if line.startswith("serving"))
    assert f"serving at {host}; " in line
    assert address.stat().st_mode & 0o777 == 0o600
    secret = json.loads(address.read_text())["secret"]
    ((code, said),) = ends([two_hosts[1].python("-c", CLIENT, address)])
    assert (code, "2 + 2 =" in said) == (0, True), said
    assert two_hosts[0].listening() <= {host}
    for pid in two_hosts[0].pids():
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    served.send_signal(signal.SIGINT)
    ((code, rest),) = ends([served])
    assert code == 0, rest
    assert secret not in line + rest + said
    assert eventually(lambda: not address.exists(), "the address file is gone")
