"""`asyncflow profile`: measures the blocks of `launcher.plan.profile` with the run's own engines.

command.py (torch-free)                   child.py (a process of its own)
  <------ what the device is -------------- imports torch
  the configuration, blocks that lack ----> an engine at a time: of few layers, then of many
  <------ a line per block ----------------
  writes the file after each
"""
