"""The decode step as a C++ kernel: see _cpu.cpp, and delta_step.h in ops/native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from torch_hybrid.ops.native.delta_step import delta_step_kernel, run_delta_step

_STEP = delta_step_kernel("gated_delta_step", Path(__file__).with_name("_cpu.cpp"))


def gated_delta_step(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Each thread takes the heads of one key head of one sequence at a time."""
    return run_delta_step(_STEP, *tensors, **options)  # type: ignore[arg-type]
