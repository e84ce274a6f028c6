"""Implementation "cpp" of the backward: the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.rg_lru.training.op import MAX_SQRT_GRADIENT, RgLruBackward

_launch = cpp_launcher(
    RgLruBackward,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens num_offsets-1=num_seqs H=num_heads G//2=head_dim",
    values={"max_sqrt_gradient": str(MAX_SQRT_GRADIENT)},
    integers="num_tokens num_seqs num_heads head_dim "
    "x_stride gates_stride gates_head_stride dout_stride is_bf16 num_threads",
    numbers="max_sqrt_gradient",
    out="dx=x dgates=gates dlog_a=log_a dinitial_state=initial_state",
)


def rg_lru_backward(x: RgLruBackward) -> tuple[Tensor, ...]:
    """Run the kernel; a gradient of what is None is empty."""
    *grads, dinitial = _launch(x)
    return *grads, x.states(0) if dinitial is None else dinitial
