"""Conformance suites for engines and storage backends, including your own; they need pytest. AsyncFlow's own pass them.

    # test_my_engine.py
    from asyncflow.testing.generating import *
    from asyncflow.testing.generating import Adapter

    class Mine(Adapter):
        engine = "my_module:MyEngine"

    ADAPTERS = [Mine()]

Where the protocol allows it, the adapter's flags say what an engine cannot do; everything else must hold.
"""

import pytest

pytest.register_assert_rewrite(*(f"asyncflow.testing.{name}" for name in ("generating", "lab", "training", "backends")))
