"""paged_attention: declarations of the ops, and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    FLOATS_AND_FLOAT64,
    NO_FEATURES,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.declare import (
    NO_DEFAULT,
    Cpp,
    Dense,
    Index,
    Pool,
    Rows,
    Strided,
    define,
    like,
    pair_made,
)
from torch_hybrid.ops.core.page_bounds import PagedOp
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_groups,
    check_scale,
    check_shapes,
)
from torch_hybrid.ops.cudnn_attention import cudnn_missing
from torch_hybrid.ops.flashinfer.library import flashinfer_missing
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.implementations import CUDA, HALVES, in_cpp, in_torch, in_triton, invariant

# What a caller may need beyond plain decode: queries of more than one token ("extend"), a
# window, a softcap, the log-sum-exp as a second output; and of our own implementations alone,
# biases of each query by distance.
FEATURES = frozenset({"extend", "sliding_window", "softcap", "lse"})
RELATIVE_BIAS = "relative_bias"
_OWN_FEATURES = FEATURES | {fp8_kv.FEATURE, RELATIVE_BIAS}

_PACKAGE = "torch_hybrid.ops.paged_attention"
_CPP = in_cpp(
    f"{_PACKAGE}._cpu.cpp:paged_attention_with_lse",
    multiples={"head_dim": 16},
    features=_OWN_FEATURES,
)
_TRITON = in_triton(
    f"{_PACKAGE}._triton:paged_attention_with_lse",
    limits={"head_dim": 256},
    features=_OWN_FEATURES,
)
_CUDNN = Implementation(
    capability=Capability(
        devices=CUDA,
        dtypes=HALVES,
        multiples={"head_dim": 8},
        limits={"head_dim": 128},  # where it was measured to be faster than Triton's
        features=frozenset({"extend"}),
        only_with=frozenset({"extend"}),
        cuda_graph=True,
        available=cudnn_missing,
    ),
    launcher=f"{_PACKAGE}._cudnn:paged_attention",
    planner="torch_hybrid.ops.cudnn_attention:plan",
)
_FLASHINFER = Implementation(
    capability=Capability(
        devices=CUDA,
        dtypes=HALVES,
        one_of={"head_dim": (64, 128, 256)},
        features=FEATURES - {"lse"},
        cuda_graph=True,
        available=flashinfer_missing(),
    ),
    launcher=f"{_PACKAGE}._flashinfer:paged_attention",
    planner=f"{_PACKAGE}._flashinfer_plan:plan",
)
IMPLEMENTATIONS = {
    "cudnn": _CUDNN,
    "cpp": _CPP,
    # A token has the bits that it has alone: keys are met in blocks of 64 from the sequence's first
    # on, one after the other, and no sequence is split.
    "cpp_invariant": invariant(_CPP),
    "triton": _TRITON,
    "flashinfer": _FLASHINFER,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(
        f"{_PACKAGE}._torch:paged_attention_with_lse",
        dtypes=FLOATS_AND_FLOAT64,
        features=_OWN_FEATURES,
    ),
}
WITH_LSE_IMPLEMENTATIONS = {
    name: each for name, each in IMPLEMENTATIONS.items() if "lse" in each.capability.features
}


@dataclass(slots=True, repr=False, eq=False)
class Pages(PagedOp):
    """Base of both ops, whose arguments these are but for the last."""

    q: Annotated[Tensor, Rows("Hq", "D", last_dim=True)]
    k: Annotated[Tensor, Rows("Hkv", "D", counts=False, last_dim=True)]
    v: Annotated[Tensor, Rows("Hkv", "D", counts=False, last_dim=True)]
    kv: Annotated[Tensor, Pool("P", "page_size", "Hkv", "D", size="2", dtype="any")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    page_table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
    slot_mapping: Annotated[Tensor, Index("T")]
    scale: float = field(kw_only=True)
    window: Annotated[int, NO_DEFAULT] = field(default=0, kw_only=True)
    softcap: Annotated[float, NO_DEFAULT] = field(default=0.0, kw_only=True)
    kv_scales: Annotated[Tensor | None, Dense("2", "Hkv", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )
    if TYPE_CHECKING:
        relative_bias: Tensor | None = field(default=None, kw_only=True)

    def features(self) -> frozenset[str] | None:
        """List what not all implementations have: FP8 keys, and biases.

        None without these: arguments do not tell which step they are of.
        """
        bias = NO_FEATURES if self.relative_bias is None else {RELATIVE_BIAS}
        return (fp8_kv.features_of(self.kv.dtype) | bias) or None

    def check(self) -> None:
        """Raise ValueError unless the pool fits the heads, and options are in range."""
        num_q_heads, num_kv_heads = self.q.shape[1], self.kv.shape[3]
        check_groups("q heads must be", num_q_heads, num_kv_heads, "key heads")
        fp8_kv.check_pool_dtype("kv", self.kv, self.q.dtype)
        fp8_kv.check_pairs(self.kv, head_dim=self.q.shape[2])
        fp8_kv.check_scales("kv_scales", self.kv, self.kv_scales, 2, num_kv_heads)
        check_scale(self.scale)
        if self.window < 0:
            raise ValueError(f"window must be 0 or a number of keys, got {self.window}")
        if self.softcap < 0:
            raise ValueError(f"softcap must be 0 or positive, got {self.softcap}")
        if self.relative_bias is not None:
            self._check_bias(self.relative_bias)

    def _check_bias(self, bias: Tensor) -> None:
        if bias.dim() != 3 or not bias.shape[2]:
            raise ValueError(
                f"relative_bias must have shape [T, Hq, R] with R > 0, got {list(bias.shape)}"
            )
        check_shapes({RELATIVE_BIAS: (bias, (*self.q.shape[:2], bias.shape[2]))})
        check_contiguous(relative_bias=bias)

    def check_indices(self) -> None:
        """Raise ValueError unless every index that a call uses is inside its pool."""
        self.check_pages(num_pages=self.kv.shape[1], page_size=self.kv.shape[2], window=self.window)


@dataclass(slots=True, repr=False, eq=False)
class PagedAttention(Pages):
    """Causal attention to pages, after the new keys and values are written into them.

    One call serves any mix of lengths: N sequences, their T new tokens packed, Hq query heads,
    Hkv key heads (query head i reads key head ``i // (Hq // Hkv)``), P pages. Query i of a
    sequence with n new tokens sees the keys up to position ``seq_len - n + i``. Page 0 is null:
    it is neither read nor written. Tokens from ``cu_seqlens[N]`` on are padding.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [T, Hkv, D], as q.
        v: [T, Hkv, D], as q.
        kv: [2, P, page_size, Hkv, D], dtype of q or float8_e4m3fn, contiguous; keys in ``kv[0]``,
            values in ``kv[1]``. Mutated: the rows that ``slot_mapping`` names, rounded to FP8
            as ``ops.fp8_kv`` says; the new tokens attend to what was rounded.
        scale: factor of the logits, usually ``D ** -0.5``.
        window: number of keys that a query sees, itself included; 0 for all.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0.0 for none (Gemma 2).
        relative_bias: [T, Hq, R] in q's dtype, contiguous: element d is added, after a softcap, to
            a query's logit of the key d tokens before it. Keys R tokens before it or more get
            nothing (Inkling). Those of padding tokens are not read.
        kv_scales: [2, Hkv] float32, positive: what a number of float8_e4m3fn is worth in the keys
            and in the values of each head. For an FP8 pool alone.

    Returns:
        [T, Hq, D] in the dtype of q; rows of padding tokens are 0.
    """

    planned: Sequence[Tensor] | None = field(default=(), kw_only=True)
    relative_bias: Annotated[Tensor | None, Strided("...")] = field(default=None, kw_only=True)


@dataclass(slots=True, repr=False, eq=False)
class PagedAttentionWithLse(Pages):
    """:func:`paged_attention` that also returns the log-sum-exp of each row's logits.

    ``impl`` is a name in WITH_LSE_IMPLEMENTATIONS.

    Two results over disjoint sets of keys merge by it; ``(0, -inf)``, which padding rows have,
    is the identity of that merge.

    Returns:
        The output, [T, Hq, D] in the dtype of q, and the natural-log LSE, [T, Hq] float32.
    """

    relative_bias: Annotated[Tensor | None, Strided("...")] = field(default=None, kw_only=True)


def empty(x: PagedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Allocate the output and its LSE."""
    return x.q.new_empty(x.q.shape), x.q.new_empty(x.q.shape[:2], dtype=torch.float32)


_FLOPS = "4 * T * Hq * D * min(M * page_size, x.window or M * page_size)"
paged_attention = define(
    PagedAttention,
    IMPLEMENTATIONS,
    returns=like("q"),
    limited={"head_dim": "D"},
    names_ndim=True,
    flops=_FLOPS,
)
paged_attention_with_lse = define(
    PagedAttentionWithLse,
    WITH_LSE_IMPLEMENTATIONS,
    returns=pair_made(empty),
    limited={"head_dim": "D"},
    names_ndim=True,
    flops=_FLOPS,
    cpp=Cpp(
        "page_size Hq=num_q_heads Hkv=num_kv_heads D=head_dim",
        {"reach": "0 if x.relative_bias is None else x.relative_bias.shape[2]"},
    ),
)
