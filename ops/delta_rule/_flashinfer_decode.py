# mypy: disable-error-code="untyped-decorator"
"""Implementation "flashinfer" of the recurrent form: FlashInfer's kernel for one token a sequence.

FlashInfer computes the gates itself, ``g = -e^A_log softplus(a + dt_bias)`` and ``beta =
sigmoid(b)``: it is given the ``a`` and ``b`` of which these are ours, with a rate of 1 and no bias.
No ``b`` makes a beta above 1, which comes out as NaN. Its exponentials and logarithms are the GPU's
own, and outputs are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.flashinfer.one_token import IN_PLACE
from torch_hybrid.ops.flashinfer.states import aligned, packed_states, store_states

_BLOCK = 1024  # gates of a program


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    planned: Sequence[Tensor],
) -> Tensor:
    """Launcher of ``torch_hybrid::recurrent_gated_delta_rule``."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    slots, place = planned
    out = v.new_empty(v.shape)
    if state_indices.shape[0] == 0:
        return out
    a, b, zeros = _raw_gates(g, beta)
    is_in_place = place.item() == IN_PLACE  # a tensor on the host
    pool = state if is_in_place else packed_states(state, cu_seqlens, initial_indices)
    slots = aligned(slots, 16)
    gated_delta_rule_decode_pretranspose(
        *(aligned(rows, 16).unsqueeze(1) for rows in (q, k, v)),
        None,  # the state of each sequence, where there is no pool
        zeros,  # A_log
        a.unsqueeze(1),
        zeros,  # dt_bias
        b.unsqueeze(1),
        scale=scale,
        output=out.unsqueeze(1),
        use_qk_l2norm=qk_l2norm,
        initial_state=pool,
        initial_state_indices=slots,
        output_state_indices=aligned(state_indices, 16) if is_in_place else slots,
        backend="flashinfer",
    )
    if not is_in_place:
        store_states(pool, state, cu_seqlens, state_indices)
    return out


def _raw_gates(g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, HV] what a softplus makes -g of, and a sigmoid beta; and [HV] zeros."""
    num_seqs, num_heads = g.shape
    raw = g.new_empty(2 * num_seqs + 1, num_heads)
    _gates_kernel[(triton.cdiv((num_seqs + 1) * num_heads, _BLOCK),)](
        g,
        beta,
        raw,
        num_seqs,
        g.stride(0),
        beta.stride(0),
        HV=num_heads,
        BLOCK=_BLOCK,
    )
    return raw[:num_seqs], raw[num_seqs:-1], raw[-1]


@triton.jit(do_not_specialize=["num_seqs"])
def _gates_kernel(
    g: tl.tensor,
    beta: tl.tensor,
    raw: tl.tensor,
    num_seqs: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    HV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: gates of some heads and sequences; those of one more sequence are zeros."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq = (index // HV).to(tl.int64)
    head = index % HV
    has_gates = seq < num_seqs
    decay = -tl.load(g + seq * stride_g + head, mask=has_gates, other=0.0)
    b_beta = tl.load(beta + seq * stride_beta + head, mask=has_gates, other=0.5)
    # log(e^x - 1), without the difference of nearly equal numbers, or a power out of range
    rest = tl.where(decay < 0.01, decay - 0.5 * decay * decay, 1.0 - tl.exp(-decay))
    a = tl.where(decay < 80.0, decay, 80.0) + tl.log(rest)
    a = tl.where(decay < 80.0, a, decay)
    tl.store(raw + index, a, mask=has_gates)
    b = tl.log(b_beta) - tl.log(1.0 - b_beta)
    last = tl.where(has_gates, b, 0.0)
    tl.store(raw + num_seqs * HV + index, last, mask=seq <= num_seqs)
