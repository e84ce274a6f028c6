"""Implementation "flashinfer" of the chunk form: FlashInfer's kernels for Hopper.

FlashInfer takes dense rows and decays as factors (not their logarithms). A kernel before it
translates, and sets what it does not write: rows of padding. States are the pool's own, in place,
where all sequences of a step begin, or all carry on from the slots that they write; else they are
gathered before and scattered after. Its products are of bfloat16 operands, also those with the
state: outputs and states are good to bfloat16, where the others keep states to float32.

FlashInfer takes blocks of 64 tokens. In the last one of a sequence, what follows the sequence is
multiplied by 0. So rows of padding must be finite there, as a convolution leaves them. A NaN of one
sequence is one in the sequence before it too.

What is planned is where the states are, and whether FlashInfer cuts sequences over the device (its
context-parallel form, for few of them): it would count null sequences too. All else follows from
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.delta_rule.op import GatedDeltaRule
from torch_hybrid.ops.flashinfer.states import aligned, packed_states, store_states
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import inverse_root

_ROWS = 32  # tokens of one head that a program brings into order

# Where states are: in slots that are copied from and to, or in those that are written, in place.
_APART, _BEGUN, _CARRIED_ON = 0, 1, 2


def chunk_gated_delta_rule(x: GatedDeltaRule) -> Tensor:
    """Launch FlashInfer's prompts, in chunks of 64 tokens, and what translates for them."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule as prefill

    assert x.planned is not None
    out = x.v.new_empty(x.v.shape)
    if x.state_indices.shape[0] == 0 or x.q.shape[0] == 0:
        return out.zero_()
    rows = _Rows.empty(x.q, x.v)
    rows.fill(x, out)
    is_cut, place = x.planned[0].tolist()  # a tensor on the host
    run = partial(
        prefill,
        rows.q,
        rows.k,
        rows.v,
        g=rows.decay,
        beta=rows.beta,
        scale=x.scale,
        output_final_state=True,
        cu_seqlens=aligned(x.cu_seqlens, 8),
        use_qk_l2norm_in_kernel=False,
        output=out,
        use_cp=bool(is_cut),
        backend="flashinfer",
    )
    if place == _APART:
        packed = packed_states(x.state, x.cu_seqlens, x.initial_indices)
        final = torch.empty_like(packed)  # a cut sequence's first state is read until its end
        run(initial_state=packed, output_state=final)
        store_states(final, x.state, x.cu_seqlens, x.state_indices)
    else:
        initial = x.state if place == _CARRIED_ON else None
        run(initial_state=initial, output_state=x.state, state_indices=x.state_indices)
    return out


def plan(lengths: Lengths, *, num_v_heads: int, device: torch.device, **_: object) -> Planned:
    """Plan whether sequences are cut, and where their states are.

    They are cut where there are heads of them for less than half of the device.
    """
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    has_tokens = lengths.cu_seqlens.diff() > 0
    is_cut = 2 * int(has_tokens.sum()) * num_v_heads < num_processors
    place = _APART if is_cut else _place(lengths, has_tokens)
    return Planned(tensors=(), values=(int(is_cut), place))


def _place(lengths: Lengths, has_tokens: Tensor) -> int:
    """Find where the states of the sequences that have tokens are."""
    initial = lengths.initial_indices[has_tokens]
    final = lengths.state_indices[has_tokens]
    if not final.all():  # slot 0 is nobody's, and FlashInfer would write it
        return _APART
    if not initial.any():
        return _BEGUN
    return _CARRIED_ON if torch.equal(initial, final) else _APART


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The operands as FlashInfer takes them, one dense row of heads for each token."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # e^g
    beta: Tensor

    @classmethod
    def empty(cls, q: Tensor, v: Tensor) -> _Rows:
        per_head = q.new_empty(2, *v.shape[:2], dtype=torch.float32)
        q_rows, k_rows = q.new_empty(2, *q.shape)
        # v is taken as it is; a copy is made only of rows that lie apart.
        v_rows = v if v.is_contiguous() and v.data_ptr() % 16 == 0 else v.new_empty(v.shape)
        return cls(q=q_rows, k=k_rows, v=v_rows, decay=per_head[0], beta=per_head[1])

    def fill(self, x: GatedDeltaRule, out: Tensor) -> None:
        """Fill the rows of tokens; those of padding are 0, in ``out`` too."""
        num_tokens, num_k_heads, head_dim = x.q.shape
        num_v_heads = x.v.shape[1]
        num_copied = num_v_heads if self.v is not x.v else 0
        bind(_rows_kernel, x)[(triton.cdiv(num_tokens, _ROWS), 2 * num_k_heads + num_copied + 1)](
            q_rows=self.q,
            k_rows=self.k,
            v_rows=self.v,
            decay_rows=self.decay,
            beta_rows=self.beta,
            out=out,
            HV_COPIED=num_copied,
            D=head_dim,
            BLOCK_HV=triton.next_power_of_2(num_v_heads),
            ROWS=_ROWS,
        )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _rows_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    q_rows: tl.tensor,
    k_rows: tl.tensor,
    v_rows: tl.tensor,
    decay_rows: tl.tensor,
    beta_rows: tl.tensor,
    out: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    HV_COPIED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    ROWS: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> None:
    """Copy ROWS tokens of one head of q, k or v, or their gates and padding: one program.

    The grid is blocks of tokens by heads; a tile of rows is in registers.
    """
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    last = tl.load(cu_seqlens + num_seqs)
    mask, is_row = token < last, token < num_tokens
    if head < H:
        _unit_rows(q, q_rows, token, mask, is_row, stride_q, head, H, D, QK_L2NORM)
    elif head < 2 * H:
        _unit_rows(k, k_rows, token, mask, is_row, stride_k, head - H, H, D, QK_L2NORM)
    elif head < 2 * H + HV_COPIED:
        _unit_rows(v, v_rows, token, mask, is_row, stride_v, head - 2 * H, HV, D, False)
    else:
        head_v = tl.arange(0, BLOCK_HV)[None, :]
        is_head = head_v < HV
        has_gate, place = mask[:, None] & is_head, token[:, None] * HV + head_v
        b_g = tl.load(g + token[:, None] * stride_g + head_v, mask=has_gate, other=0.0)
        tl.store(decay_rows + place, tl.exp(b_g), mask=is_row[:, None] & is_head)
        b_beta = tl.load(beta + token[:, None] * stride_beta + head_v, mask=has_gate, other=0.0)
        tl.store(beta_rows + place, b_beta, mask=is_row[:, None] & is_head)
        if tl.program_id(0).to(tl.int64) * ROWS + ROWS > last:
            padding = is_row & (token >= last)
            index = tl.arange(0, D)[None, :]
            zeros = tl.zeros([ROWS, D], dtype=tl.float32).to(out.dtype.element_ty)
            for each in range(HV):
                p_out = out + (token * HV + each)[:, None] * D + index
                tl.store(p_out, zeros, mask=padding[:, None])


@triton.jit
def _unit_rows(
    source: tl.tensor,
    rows: tl.tensor,
    token: tl.tensor,
    mask: tl.tensor,
    is_row: tl.tensor,
    stride: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:
    """Copy rows of one head to dense ones, of unit length if so wanted."""
    index = tl.arange(0, D)[None, :]
    tile = source + token[:, None] * stride + head * D + index
    row = tl.load(tile, mask=mask[:, None], other=0.0).to(tl.float32)
    if NORMALIZE:
        row *= inverse_root(tl.sum(row * row, 1) + 1e-6)[:, None]
    p_rows = rows + (token * H + head)[:, None] * D + index
    tl.store(p_rows, row.to(rows.dtype.element_ty), mask=is_row[:, None])
