"""Engines that generate and train, behind the two protocols of `base`; `load` picks one by configuration."""
