"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.rg_lru.op import RgLru

rg_lru = cpp_launcher(
    RgLru,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots H=num_heads G//2=head_dim",
    integers="num_tokens num_seqs num_slots num_heads head_dim x_stride gates_stride "
    "gates_head_stride is_bf16 num_threads",
    out="x",
)
