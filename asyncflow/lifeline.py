"""Ties a process to its parent's life, so that `kill -9` of a launcher leaves nothing behind.

Called by the fork server and by every worker (under the fork server or a literal `torchrun`); it knows nothing of
either. The kernel does the work (`prctl(2)`, PR_SET_PDEATHSIG), so it holds even while a process is stuck in C++.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What users and schedulers send to end a run. The launcher obeys them; workers ignore them and leave by message."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process as soon as its parent dies.

    The setting is lost on fork, so each process calls this itself. "Parent" is the *thread* that created the process:
    start children from a thread that lives as long as they should.

    Args:
        parent_pid: the expected parent; when it died before this call, the process ends here. None: the parent of now.
    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
