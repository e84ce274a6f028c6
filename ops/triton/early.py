"""Programmatic dependent launches (PDL): a kernel is launched while the one before it ends.

``bind`` launches kernels with a constant ``EARLY`` so, on GPUs that can. They wait by ``follow``
before they read what kernels write: then every launch before has ended, and its memory is seen.
Every program has to wait: where one does not, its launch may end before those that it follows, and
the launch after it reads too soon.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def follow(EARLY: tl.constexpr) -> None:
    """Wait for the launches before this one."""
    if EARLY:
        gdc_wait()
