"""Both execution forms as C++ kernels: see recurrent.h and chunk.h.

The recurrent one reads and writes each head's state once per token; of the chunk form, a few tokens
go that way too.
"""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.ssd.op import ChunkSsd, RecurrentSsd

_SOURCE = Path(__file__).with_name("_cpu_scan.cpp")
_SIZES = "T=num_tokens N=num_seqs S=num_slots G=num_k_heads H=num_v_heads K=k_dim V=v_dim"
_INTEGERS = (
    "num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
    "q_stride k_stride v_stride g_stride dt_stride chunk_size is_bf16 num_threads"
)

recurrent_ssd = cpp_launcher(
    RecurrentSsd,
    _SOURCE,
    sizes=_SIZES,
    integers=_INTEGERS,
    values={"chunk_size": "0"},
    numbers="scale",
    out="v",
)
chunk_ssd = cpp_launcher(
    ChunkSsd, _SOURCE, sizes=_SIZES, integers=_INTEGERS, numbers="scale", out="v"
)
