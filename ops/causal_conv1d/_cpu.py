"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d
from torch_hybrid.ops.core.declare import cpp_launcher

causal_conv1d = cpp_launcher(
    CausalConv1d,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots C=channels W=width",
    integers="num_tokens num_seqs num_slots channels width x_stride input_gate_stride "
    "output_gate_stride num_heads silu is_bf16 num_threads",
    out="x",
)
