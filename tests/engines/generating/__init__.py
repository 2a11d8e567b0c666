"""Conformance of generating engines: one suite (`test_generating.py`) that every adapter passes unchanged.

To join, write `YOURS_adapter.py` with a subclass of `Adapter` (adapter.py says what it answers) and name it in
`ADAPTERS` (conftest.py). What an engine cannot do is said by the adapter's flags, where the protocol allows it;
everything else must hold. `pytest -m "" tests/engines/generating -k YOURS` runs it alone, in any environment that has
the engine; where its package is missing, the adapter's mark skips it.
"""
