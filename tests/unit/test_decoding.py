"""Typed decoders may be made in many threads at once."""

import subprocess
import sys

PROGRAM = """
import sys, threading, types
import msgspec
from asyncflow.decoding import json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
MESSAGES = '''
class Inner(msgspec.Struct):
    a: int
    b: "list[str]"

class Outer(msgspec.Struct):
    name: str
    inner: "Inner | None"
'''

def decode(message, start):
    start.wait()
    assert msgpack_decoder(message).decode(msgspec.msgpack.encode({"name": "x", "inner": None})).name == "x"
    assert json_decoder(message).decode(b'{"name": "x", "inner": {"a": 1, "b": []}}').inner.a == 1

for k in range(300):
    module = sys.modules[f"messages{k}"] = types.ModuleType(f"messages{k}")
    module.msgspec = msgspec
    exec(MESSAGES, vars(module))
    start = threading.Barrier(4)
    threads = [threading.Thread(target=decode, args=(module.Outer, start)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_first_decoders_of_a_type_in_several_threads_do_not_crash() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
