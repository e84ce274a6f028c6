"""Both steps as C++ kernels: see _cpu.cpp, and delta_step.h and delta_verify.h in ops/native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from torch_hybrid.ops.native.delta_step import delta_step_kernel, run_delta_step

_SOURCE = Path(__file__).with_name("_cpu.cpp")
_STEP = delta_step_kernel("kimi_delta_step", _SOURCE)
_VERIFY = delta_step_kernel("kimi_delta_verify", _SOURCE)


def kimi_delta_step(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Each thread takes a head of one sequence at a time."""
    return run_delta_step(_STEP, *tensors, **options)  # type: ignore[arg-type]


def kimi_delta_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """As the decode step; all tokens of a sequence go through a few rows of a state together."""
    return run_delta_step(_VERIFY, *tensors, **options)  # type: ignore[arg-type]
