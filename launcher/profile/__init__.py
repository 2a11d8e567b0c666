"""`asyncflow profile`: measures the blocks of `launcher.plan.profile` with the run's own engines.

command.py (torch-free)                   child.py (a process of its own)
  <------ description of the device ------  imports torch
  configuration, missing blocks ---------->  one engine at a time: with few layers, then with many
  <------ a line per block ---------------
  writes the file after each
"""
