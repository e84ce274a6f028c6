"""Cuts of the scans of delta rules: rows of V, segments of chunks, and the states between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.delta_rule.op import DeltaRule
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper
from torch_hybrid.ops.triton.products import ROUNDED, dot, rows_dot, state_pieces
from torch_hybrid.ops.triton.segments import Launch, side_by_side

# Tokens of a segment at least, and segments at most: each is two launches.
_SEGMENT = 1024
_MOST_SEGMENTS = 4
_UNKNOWN = -1
# Of which steps a launch is, which only the device knows.
EVERY: tl.constexpr = tl.constexpr(0)
UNEVEN: tl.constexpr = tl.constexpr(1)
EVEN: tl.constexpr = tl.constexpr(2)
# Tokens of all sequences and heads that take as long as one of the longest sequence alone.
_ALONE: tl.constexpr = tl.constexpr(92)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """Rows of V of a state that a program walks with, by so many warps, and when."""

    block_v: int
    num_warps: int
    steps: int = EVERY.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSegments:
    """Facts that the host knows of a step's walks.

    Attributes:
        num_segments: in which they are beside the first launch, each after the other.
        is_even: whether all sequences together take longer than the longest alone; None where
            only the device knows.
    """

    num_segments: int
    is_even: bool | None = None

    @classmethod
    def of(cls, v: Tensor, num_seqs: int, planned: Sequence[Tensor] | None = ()) -> ScanSegments:
        """Take what was ``planned``, or what shapes say of sequences of one length."""
        if planned:
            num_segments, is_even = planned[0].tolist()  # a tensor on the host
            return cls(num_segments=num_segments, is_even={0: False, 1: True}.get(is_even))
        num_tokens, num_heads, head_dim = v.shape
        num_states = num_heads * num_seqs
        return cls(num_segments=_num_segments(num_tokens, num_states, head_dim, v.dtype, v.device))

    def carry(self, x: DeltaRule) -> Tensor:
        """Allocate what a segment leaves to the next; where there is one alone, nothing."""
        num_seqs = x.state_indices.shape[0]
        return (
            x.state if self.num_segments == 1 else x.state.new_empty(num_seqs, *x.state.shape[1:])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Inputs of the scan; C tokens a chunk, X chunks, P pieces of numbers.

    Squares have a row for each token: room for more sequences makes none of them larger.

    Attributes:
        num_pieces: in which what reaches a state is kept; P is 1 where they are ROUNDED.
        queries: [T, H, K] rows of q; by channel, decayed from the chunk's start.
        keys: [T, P, H, K] rows of k, those of float16 brought near 1 by powers of 2; by channel,
            decayed from the chunk's start.
        writes: [T, P, H, K] rows of k, decayed until the chunk's end: by channel alone.
        solve: [T, HV, P, C] inverse of a chunk's system, times beta of each column.
        attend: [T, HV, ..., C] decayed products of q and k, by head with the scale.
        factors: [X, HV, 4, C] float32, of rows of q and of keys that read the state before the
            chunk; of rows of keys that write it; the last is what the state decays by. By channel
            that alone, [X, HV, K].
    """

    num_pieces: int
    queries: Tensor
    keys: Tensor
    writes: Tensor | None = None
    solve: Tensor
    attend: Tensor
    factors: Tensor


R = TypeVar("R", bound=DeltaRule)


def launch_chunks(
    x: R,
    prepare: Callable[[R, tuple[int, torch.dtype]], tuple[Prepared, Launch]],
    scan: Callable[[R, Prepared, ScanSegments], tuple[Tensor, Launch]],
    *,
    is_exact: bool,
) -> Tensor:
    """Prepare chunks side by side with the scan of those before them; chunks are the kernels' own.

    Args:
        x: arguments of the op.
        prepare: allocates what the scan takes, in so many pieces of a dtype; its launch fills it.
        scan: allocates the outputs; its launch walks a segment.
        is_exact: False rounds what reaches a state to float16.
    """
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    pieces = state_pieces(x.q.dtype, x.qk_l2norm, is_exact=is_exact)
    prepared, launch = prepare(x, pieces)
    walks = ScanSegments.of(x.v, num_seqs, x.planned)
    out, walk = scan(x, prepared, walks)
    side_by_side(launch, walk, prepared.factors.shape[0], walks.num_segments, x.q.device)
    return out


def plan(
    lengths: Lengths,
    *,
    num_v_heads: int,
    head_v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    **_: object,
) -> Planned:
    """Plan the walks of a step, which may have fewer sequences than its bucket has room for.

    Small buckets, and those of other GPUs, have one graph for all lengths.
    """
    if not _has_wide_programs(dtype, device) or lengths.num_tokens < 2 * _SEGMENT:
        return Planned(tensors=(), values=(1, _UNKNOWN))
    num_new = lengths.cu_seqlens.diff().tolist()
    total, longest = sum(num_new), max(num_new, default=0)
    # Of as many sequences as would take all tokens, were they as long as the longest.
    num_states = num_v_heads * total / max(longest, 1)
    segments = _num_segments(lengths.num_tokens, num_states, head_v_dim, dtype, device)
    return Planned(tensors=(), values=(segments, int(num_states >= _ALONE.value)))


def _has_wide_programs(dtype: torch.dtype, device: torch.device) -> bool:
    return is_hopper(device) and dtype != torch.float32


def _num_segments(
    num_tokens: int, num_states: float, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Choose the number of segments: 1 where walks of so many states fill the GPU.

    One sequence of 8192 tokens takes 473 us instead of 530 (KDA: 745 and 855), one of 2048 138
    instead of 151 (206 and 223). One of 6144 beside one of 2048 takes 407 in two segments, 460 in
    four and 458 in one (631, 709 and 733); two of 4096 would take 467 instead of 385 (712 and 608).
    """
    programs = triton.cdiv(head_dim, 64) * num_states
    if not _has_wide_programs(dtype, device) or 3 * programs > 2 * PROCESSORS:
        return 1
    most = _MOST_SEGMENTS if 2 * programs <= PROCESSORS else 2
    return max(1, min(most, num_tokens // _SEGMENT))


def scan_configs(
    v: Tensor, num_states: int, *, hopper: bool, num_pieces: int, is_even: bool | None = None
) -> tuple[ScanConfig, ...]:
    """Choose forms, launched one after the other, of which one walks and others return at once.

    Args:
        v: [T, HV, V].
        num_states: value heads of all sequences of the step, of which most may be empty.
        hopper: registers and shared memory hold more rows.
        num_pieces: in which what reaches a state is kept.
        is_even: as of ``ScanSegments``.
    """
    head_dim_v = v.shape[-1]
    num_warps = 8 if v.dtype == torch.float32 else 4
    # 16 rows for each warp's products, or as many as registers hold.
    most = 64 if hopper and v.dtype != torch.float32 else 16
    block_v = max(16, min(most, triton.next_power_of_2(head_dim_v)))
    # More than run at once: two times four warps share what they read. Eight sequences of 1024
    # tokens take 176 us instead of 209 (KDA: 203 and 264), one of 8192 611 instead of 343
    # (743 and 490).
    narrow, wide = (
        ScanConfig(block_v=block_v, num_warps=num_warps),
        ScanConfig(block_v=128, num_warps=8),
    )
    if block_v < 64 or head_dim_v <= 64 or num_pieces != 2 or is_even is False:
        return (narrow,)
    if is_even:
        return (wide,)
    if triton.cdiv(head_dim_v, block_v) * num_states <= 4 * PROCESSORS:
        return (narrow,)
    return replace(narrow, steps=UNEVEN.value), replace(wide, steps=EVEN.value)


def stages_of_factors(num_pieces: int) -> int | None:
    """Return how far ahead a scan fetches what no product takes; None where it does not.

    Where numbers are ROUNDED, 1x8192 takes 207 us instead of 280 (KDA: 234 instead of 281). Where
    they are exact, products take longer than what is waited for.
    """
    return 3 if num_pieces == ROUNDED.value else None


@triton.jit
def is_uneven(cu_seqlens: tl.tensor, num_seqs: tl.tensor, HV: tl.constexpr) -> tl.tensor:
    """Tell whether the longest sequence alone takes longer than all that share the GPU."""
    longest = tl.zeros([256], dtype=tl.int32)
    for base in range(0, num_seqs, 256):
        seq = base + tl.arange(0, 256)
        begin = tl.load(cu_seqlens + seq, mask=seq < num_seqs, other=0)
        end = tl.load(cu_seqlens + seq + 1, mask=seq < num_seqs, other=0)
        longest = tl.maximum(longest, end - begin)
    num_tokens = tl.load(cu_seqlens + num_seqs)
    return tl.max(longest, 0).to(tl.int64) * _ALONE > num_tokens.to(tl.int64) * HV


@triton.jit
def read_state(
    state: tl.tensor,
    carry: tl.tensor,
    initial_indices: tl.tensor,
    seq: tl.tensor,
    is_first: tl.tensor,
    head: tl.tensor,
    tile: tl.tensor,
    mask: tl.tensor,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Read a tile of the state [HV, SIZE] from which a sequence's segment starts."""
    if is_first:
        slot = tl.load(initial_indices + seq).to(tl.int64)
        b_s = tl.load(state + (slot * HV + head) * SIZE + tile, mask=mask & (slot != 0), other=0.0)
    else:
        b_s = tl.load(carry + (seq.to(tl.int64) * HV + head) * SIZE + tile, mask=mask, other=0.0)
    return b_s


@triton.jit
def advance(
    b_s: tl.tensor, decay: tl.tensor, b_u: tl.tensor, b_k: tl.tuple, PS: tl.constexpr
) -> tl.tensor:
    """Advance the state [V, K] by a chunk: decay it, and add b_u [V, C] at the keys b_k [C, K].

    Of a sum of two products a compiler may fuse either. It did so by how many rows of V a program
    walks with, which other sequences decide. So the sum is rounded once, by an FMA. Where
    numbers are ROUNDED all programs walk with as many rows.
    """
    if PS == ROUNDED:
        after = dot(b_u.to(tl.float16), b_k[0], b_s * decay)
    else:
        zeros = tl.zeros(b_s.shape, dtype=tl.float32)
        after = tl.fma(b_s, decay, rows_dot(b_u, b_k, zeros, PS))
    return after


@triton.jit
def write_state(
    b_s: tl.tensor,
    state: tl.tensor,
    carry: tl.tensor,
    state_indices: tl.tensor,
    seq: tl.tensor,
    is_last: tl.tensor,
    head: tl.tensor,
    tile: tl.tensor,
    mask: tl.tensor,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Leave a tile of the state where a sequence's last segment does, or for its next segment."""
    if is_last:
        # Read here, so that no register holds the place of the state through the loop.
        slot = tl.load(state_indices + seq).to(tl.int64)
        if slot != 0:
            tl.store(state + (slot * HV + head) * SIZE + tile, b_s, mask=mask)
    else:
        tl.store(carry + (seq.to(tl.int64) * HV + head) * SIZE + tile, b_s, mask=mask)
