"""Both execution forms as C++ kernels: see recurrent.h and native/ssd_chunk.h.

The recurrent one reads and writes each head's state once per token; of the chunk form, a few tokens
go that way too.
"""

from pathlib import Path

from torch_hybrid.ops.core.cpp_launcher import cpp_launcher
from torch_hybrid.ops.ssd.op import Ssd

recurrent_ssd, chunk_ssd, trained_chunk_ssd = (
    cpp_launcher(
        Ssd,
        Path(__file__).with_name("_cpu_scan.cpp"),
        sizes="T=num_tokens N=num_seqs S=num_slots G=num_k_heads H=num_v_heads K=k_dim V=v_dim",
        integers="num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
        "q_stride k_stride v_stride g_stride dt_stride chunk_size sums_decays is_bf16 num_threads",
        values={"chunk_size": chunk_size, "sums_decays": sums_decays},
        numbers="scale",
        out="v",
    )
    for chunk_size, sums_decays in (("0", "0"), ("x.chunk_size", "0"), ("x.chunk_size", "1"))
)
