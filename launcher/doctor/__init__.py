"""`asyncflow doctor`: can this machine run, and if not, what to do? Torch-free at import.

    runner.py (the command)                     doctor_child.py (a child of workers.calls)
      CONFIG, options -------------------------->  read CONFIG as asyncflow-launch does -> Needs (estimate.py)
      name of a check, with a deadline --------->  look -> facts; its table judges them -> findings
      a line per finding <----------------------
      hang, crash: a finding says so; the remaining checks go to a new child

`doctor_child.CHECKS` lists the checks; disk.py, network.py, devices.py and software.py hold them, `findings.py` what a
check is: a function that gathers facts and decides nothing, and a table of rules. Facts come from psutil where it has
them. No file and no process is left behind.
"""
