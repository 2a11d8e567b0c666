"""Parts of `benchmarks/agents.py`."""
