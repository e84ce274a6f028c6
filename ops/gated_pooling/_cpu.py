"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.gated_pooling.op import GatedPooling

gated_pooling = cpp_launcher(
    GatedPooling,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens N=num_seqs S=num_slots D=dim B=block_size",
    integers="num_tokens num_seqs num_slots dim block_size keys_stride gates_stride is_bf16 "
    "num_threads",
    out="keys",
)
