"""Conformance suites, for engines and storage backends of your own too; they need pytest. AsyncFlow's own pass them.

    # test_my_engine.py
    from asyncflow.testing.generating import *
    from asyncflow.testing.generating import Adapter

    class Mine(Adapter):
        engine = "my_module:MyEngine"

    ADAPTERS = [Mine()]

What an engine cannot do is said by its adapter's flags, where the protocol allows it; everything else must hold.
"""

import pytest

pytest.register_assert_rewrite(*(f"asyncflow.testing.{name}" for name in ("generating", "lab", "training", "backends")))
