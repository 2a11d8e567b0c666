"""Conformance of training engines: `asyncflow.testing.training` with an adapter of each.

`pytest -m "" tests/engines/training -k NAME` runs one alone.
"""
