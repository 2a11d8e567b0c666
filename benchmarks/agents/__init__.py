"""Parts of `benchmarks/agents`."""
