"""The parts of benchmarks/planner.py."""
