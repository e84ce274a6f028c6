"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse, empty

ragged_attention_with_lse = cpp_launcher(
    RaggedAttentionWithLse,
    Path(__file__).with_name("_cpu.cpp"),
    tensors="q k v out lse cu_seqlens_q cu_seqlens_k",
    sizes="T=num_queries num_keys num_offsets-1=num_seqs H=num_heads Hk=num_k_heads D=head_dim "
    "Dv=v_head_dim",
    integers="q_token q_head k_token k_head v_token v_head "
    "num_queries num_keys num_seqs num_heads num_k_heads head_dim v_head_dim "
    "causal is_bf16 num_threads",
    numbers="scale",
    out=empty,
    results="out lse",
)
