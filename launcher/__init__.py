import asyncflow.former_names  # noqa: F401
