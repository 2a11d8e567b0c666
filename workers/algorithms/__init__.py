"""Objectives: advantages, losses, and the dataflow graph of each algorithm. Tensors in, tensors out; no processes."""
