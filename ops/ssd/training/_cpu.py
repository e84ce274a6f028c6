"""Implementation "cpp" of the backward: products of small matrices in chunks, as in the forward."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.ssd.training.op import SsdBackward, empty_gradients

_launch = cpp_launcher(
    SsdBackward,
    Path(__file__).with_name("_cpu.cpp"),
    sizes="T=num_tokens num_offsets-1=num_seqs G=num_k_heads H=num_v_heads K=k_dim V=v_dim",
    values={"chunk_size": str(DEFAULT_CHUNK_SIZE)},
    integers="num_tokens num_seqs num_k_heads num_v_heads k_dim v_dim "
    "q_stride k_stride v_stride g_stride dt_stride dout_stride chunk_size is_bf16 num_threads",
    numbers="scale",
    out="dq=q dk=k dv=v dg=g ddt=dt dD=D dinitial_state=initial_state",
)


def ssd_backward(x: SsdBackward) -> tuple[Tensor, ...]:
    """Launch the kernel; gradients of what is not given are empty."""
    made, empty = _launch(x), empty_gradients(x)
    return tuple(e if grad is None else grad for grad, e in zip(made, empty, strict=True))
