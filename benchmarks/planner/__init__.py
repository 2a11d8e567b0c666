"""The parts of benchmarks/planner."""
