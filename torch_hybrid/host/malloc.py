"""Settings of glibc's malloc for a server."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1  # glibc's <malloc.h>
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30


def tune_allocator() -> bool:
    """Let malloc keep large temporaries instead of giving them back to the kernel.

    By default glibc maps each allocation above a threshold afresh, and unmaps it when it is freed.
    (The threshold is some 100 kB at first, 32 MB at most.) The kernel then pages in and zeroes each
    activation of a step again. With both thresholds at 1 GiB, malloc reuses freed memory, and the
    process stays as large as its largest step was. The setting holds for the whole process: call it
    before the model is loaded.

    Returns:
        Whether it took effect: on Linux with glibc only.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        mallopt(setting, _KEPT_BYTES) == 1 for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)
    )


def trim() -> None:
    """Give free memory back to the kernel, after loading or compiling.

    Malloc would keep it, all the more after ``tune_allocator``. Without glibc nothing happens.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
