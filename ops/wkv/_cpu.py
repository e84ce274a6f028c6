"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.wkv.op import Wkv

wkv = cpp_launcher(
    Wkv,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots C=num_channels",
    integers="num_tokens num_seqs num_slots num_channels k_stride v_stride is_bf16 num_threads",
    out="k",
)
