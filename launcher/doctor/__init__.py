"""`asyncflow doctor`: whether this machine can run, and what to do where it cannot. Torch-free at import.

    runner.py (the command)                     child.py (a process of its own, with a deadline per check)
      order: CONFIG, names of checks ----------->  read CONFIG as asyncflow-launch does -> Needs (estimate.py)
      a line per finding <-----------------------  each check: look -> judge(facts, needs) -> findings
      hang, crash: a finding says so; the checks that are left go to a new child

`child.CHECKS` lists them; host.py, disk.py, network.py, devices.py and software.py hold them by kind. A check has its
facts (a dataclass), one function that looks and decides nothing, and a `judge_...`, which is pure. What psutil knows is
asked of it. Nothing is left behind: no file, no process.
"""
