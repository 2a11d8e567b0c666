"""Parts of `benchmarks/devices`."""
