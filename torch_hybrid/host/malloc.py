"""Settings of glibc's malloc that a server wants."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1  # glibc's <malloc.h>
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30


def tune_allocator() -> bool:
    """Let malloc keep large temporaries instead of giving them back to the kernel.

    By default glibc maps every allocation over some 100 kB to 32 MB afresh and unmaps it when it
    is freed, so that each activation of a step is paged in and zeroed again by the kernel. With
    both thresholds at 1 GiB, freed memory is reused. The process then stays as large as its
    largest step was. For the whole process, from now on; call it before the model is loaded.

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
    """Give memory that is free back to the kernel: what loading or compiling took and left.

    Malloc keeps it otherwise, all the more where ``tune_allocator`` was called. Nothing happens
    without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
