"""Parts of `benchmarks/doors.py`."""
