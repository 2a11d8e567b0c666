"""Parts of `benchmarks/transferqueue.py`. `workload` and `peer` need torch only, so that they run beside the peer."""
