"""Objectives: advantages, losses, and each algorithm's dataflow graph. Tensors in, tensors out; no processes."""
