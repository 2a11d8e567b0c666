"""Conformance of generating engines: `asyncflow.testing.generating` with an adapter of each.

`pytest -m "" tests/engines/generating -k NAME` runs one alone, in any environment that has the engine; where its
package is missing, its adapter skips it.
"""
