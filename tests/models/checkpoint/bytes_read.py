"""How many bytes of files a loader reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Count:
    """Bytes so far."""

    total: int = 0


@contextmanager
def count_bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    """Counts while the body runs."""
    count, lock, preadv = Count(), threading.Lock(), os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        num_read = preadv(descriptor, buffers, offset)
        with lock:
            count.total += num_read
        return num_read

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield count
