"""Engines for generation and training, behind the protocols of `base`; `load` picks one by configuration."""
