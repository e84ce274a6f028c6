"""Implementation "cpp" of the backward: the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.wkv.training.op import WkvBackward

_launch = cpp_launcher(
    WkvBackward,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens num_offsets-1=num_seqs C=num_channels",
    integers="num_tokens num_seqs num_channels k_stride v_stride dout_stride is_bf16 num_threads",
    out="dk=k dv=v dlog_decay=log_decay dbonus=bonus dinitial_state=initial_state",
)


def wkv_backward(x: WkvBackward) -> tuple[Tensor, ...]:
    """Run the kernel; a gradient of what is None is empty."""
    *grads, dinitial = _launch(x)
    return *grads, x.states(0) if dinitial is None else dinitial
