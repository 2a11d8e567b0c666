"""`asyncflow doctor`: whether this machine can run, and what to do where it cannot. Torch-free at import.

    command                                     child process, with a deadline per check
      Runner --order: CONFIG, checks--------->    resolve CONFIG as asyncflow-launch does -> Needs
        ^                                         each check: gather facts -> judge(facts, needs) -> findings
        '<-- Resolved | Refused | Found ----------'
      hang, crash: a finding says so; the checks that are left go to a new child
      View: a line per finding, or JSON

A check is a file: its facts (a dataclass), `gather`, which looks and decides nothing, and `judge`, which is pure. What
a run takes of memory, descriptors and so on is estimated in `estimate`. Nothing is left behind: no file, no process.
"""
