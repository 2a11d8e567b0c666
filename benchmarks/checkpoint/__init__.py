"""Parts of `benchmarks/checkpoint`."""
