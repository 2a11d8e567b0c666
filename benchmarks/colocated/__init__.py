"""Parts of `benchmarks/colocated`."""
