"""`asyncflow doctor`: can this machine run, and if not, what to do? Torch-free at import.

    runner.py (the command)                     child.py (a process of its own, with a deadline per check)
      order: CONFIG, names of checks ----------->  read CONFIG as asyncflow-launch does -> Needs (estimate.py)
      a line per finding <-----------------------  each check: look -> judge(facts, needs) -> findings
      hang, crash: a finding says so; the remaining checks go to a new child

`child.CHECKS` lists the checks; disk.py, network.py, devices.py and software.py hold them. A check has facts (a
dataclass), a function that gathers them and decides nothing, and a pure `judge_...`. Facts come from psutil where it
has them. No file and no process is left behind.
"""
