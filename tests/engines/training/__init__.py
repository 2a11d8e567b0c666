"""Conformance of training engines: one suite (`test_training.py`) that every adapter passes unchanged.

An engine may need several processes, or what no other engine can live with, so the suite is in two halves: `rank.py` is
a process of its own that opens the engine, does everything and writes down what came out; the tests compare that with
plain PyTorch. To join, write `YOURS_adapter.py` with a subclass of `Adapter` (adapter.py says what it answers) and name
it in `ADAPTERS` (adapters.py). `pytest -m "" tests/engines/training -k YOURS` runs it alone.
"""
