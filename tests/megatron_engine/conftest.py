"""Megatron runs in processes of its own: its CPU shim must not meet transformers. Without megatron-core they skip."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what starts Megatron."""
    if importlib.util.find_spec("megatron") is not None:
        return
    for item in items:
        if item.path.parent.name == "megatron_engine":
            item.add_marker(pytest.mark.skip(reason="needs megatron-core: pip install -e '.[megatron]'"))
