"""How this process gets memory from the kernel."""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt(3)."""
_NEVER = -1
_TOP_PAD_BYTES = 1 << 26


def keep_freed_memory() -> None:
    """Keep what the main thread frees for its next allocation, however large it is; for the rest of the process.

    glibc gives blocks above 32 MiB back as soon as they are freed, and the kernel clears every page of the next one at
    its first touch: a pass over a model on the CPU frees and gets its activations and gradients again and again. The
    process stays as large as it ever was; blocks of many sizes leave gaps between them, so that is more than it would
    need. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES)):
            mallopt(parameter, value)
