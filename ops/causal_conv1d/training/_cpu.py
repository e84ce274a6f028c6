"""Implementation "cpp" of the backward: the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.causal_conv1d.training.op import CausalConv1dBackward
from torch_hybrid.ops.core.declare import cpp_launcher

_launch = cpp_launcher(
    CausalConv1dBackward,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens num_offsets-1=num_seqs C=channels W=width",
    integers="num_tokens num_seqs channels width x_stride dout_stride silu is_bf16 num_threads",
    out="dx=x dweight=weight dbias=bias dinitial_state=initial_state",
)


def causal_conv1d_backward(x: CausalConv1dBackward) -> tuple[Tensor, ...]:
    """Run the kernel; a gradient of what is None is empty."""
    dx, dweight, dbias, dstate = _launch(x)
    return (
        dx,
        dweight,
        x.weight.new_empty(0) if dbias is None else dbias,
        x.states(0) if dstate is None else dstate,
    )
