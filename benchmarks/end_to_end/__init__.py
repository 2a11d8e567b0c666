"""Parts of `end_to_end.py`: every module `part_NAME.py` has `run(lab) -> figures`, and its docstring says which."""
