"""Marks of tests that need a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_SKIP = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def needs_cuda(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test as one of CUDA; it is skipped where there is none."""
    marked: Callable[..., Any] = pytest.mark.cuda(_SKIP(test))
    return marked
