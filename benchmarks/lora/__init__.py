"""Parts of `benchmarks/lora`."""
