"""Libraries of the system that others need loaded."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache


@cache
def load_globally(name: str) -> None:
    """Let every library see the functions of this one, where it is there."""
    with suppress(OSError):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
