"""Implementation "triton" of the recurrent form: a launch of ``ops/triton/recurrent.py``."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.ssd.op import Ssd
from torch_hybrid.ops.triton.recurrent import launch_recurrent


def recurrent_ssd(x: Ssd) -> Tensor:
    """Launch the kernel of rules that add to the state."""
    return launch_recurrent(x, x.dt, D=x.D, is_delta=False)
