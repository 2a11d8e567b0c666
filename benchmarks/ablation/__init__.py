"""Parts of `benchmarks/ablation`.

workloads   lengths and speeds of the roles          ideal   how fast a schedule could be
launched    one run of the real command, and what it wrote
"""
