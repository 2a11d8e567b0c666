"""Parts of `benchmarks/doors`."""
