"""Implementation "triton" of the recurrent form: a launch of ``ops/triton/recurrent.py``."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.delta_rule.op import DeltaRule
from torch_hybrid.ops.triton.recurrent import launch_recurrent


def recurrent_delta_rule(x: DeltaRule) -> Tensor:
    """Launch the kernel of rules that correct the state."""
    return launch_recurrent(
        x, x.beta, is_delta=True, by_channel=x.by_channel, qk_l2norm=x.qk_l2norm
    )
