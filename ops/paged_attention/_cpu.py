"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from pathlib import Path

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.paged_attention.op import PagedAttentionWithLse, empty

# Of both ops.
paged_attention_with_lse = cpp_launcher(
    PagedAttentionWithLse,
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping kv_scales q k v relative_bias kv out lse",
    sizes="T=num_tokens N=num_seqs P=num_pages page_size M=max_pages Hq=num_q_heads "
    "Hkv=num_kv_heads D=head_dim",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head k_token k_head v_token v_head "
    "num_q_heads num_kv_heads head_dim window reach is_bf16 is_invariant num_threads",
    values={"reach": "0 if x.relative_bias is None else x.relative_bias.shape[2]"},
    numbers="scale softcap",
    out=empty,
    results="out lse",
)
