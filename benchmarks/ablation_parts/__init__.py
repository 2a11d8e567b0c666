"""Parts of `benchmarks/ablation.py`.

workloads   lengths and speeds of the roles          ideal   how fast a schedule could be
launched    one run of the real command              report  figures from what the run wrote
"""
