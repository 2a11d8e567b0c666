"""Pages that a process gets from the kernel, counted by it."""

import subprocess
import sys

_SCRIPT = """
import resource
from asyncflow.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
def touch():
    block = bytearray(1 << 27)
    for first in range(0, len(block), 4096):
        block[first] = 1
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_large_blocks_are_used_again() -> None:
    assert faults(keep=True) * 10 < faults(keep=False)
