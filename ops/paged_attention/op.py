"""paged_attention: public functions, validation, schemas and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS,
    FLOATS_AND_FLOAT64,
    NO_FEATURES,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_planned,
    check_scale,
    check_shapes,
    define_op,
    given,
)
from torch_hybrid.ops.cudnn_attention import cudnn_missing
from torch_hybrid.ops.flashinfer.library import (
    BLACKWELL,
    NEVER_RAN,
    flashinfer_missing,
    with_flashinfer,
)
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

# What a caller may need beyond plain decode: queries of more than one token ("extend"), a
# window, a softcap, the log-sum-exp as a second output; and of our own implementations alone,
# biases of each query by distance.
FEATURES = frozenset({"extend", "sliding_window", "softcap", "lse"})
RELATIVE_BIAS = "relative_bias"
_OWN_FEATURES = FEATURES | {fp8_kv.FEATURE, RELATIVE_BIAS}

_PACKAGE = "torch_hybrid.ops.paged_attention"
_HALVES = frozenset({torch.bfloat16, torch.float16})
_BACKENDS = {
    "cpp": (
        "_cpu",
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"head_dim": 16},
            features=_OWN_FEATURES,
            available=compiler_missing,
        ),
    ),
    "cpp_invariant": (
        "_cpu_invariant",
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"head_dim": 16},
            features=_OWN_FEATURES | {BATCH_INVARIANT},
            available=compiler_missing,
        ),
    ),
    "triton": (
        "_triton",
        Capability(
            devices=triton_devices(),
            limits={"head_dim": 256},
            features=_OWN_FEATURES,
            cuda_graph=True,
            available=triton_missing,
        ),
    ),
    "triton_invariant": (
        "_triton_invariant",
        Capability(
            devices=triton_devices(),
            limits={"head_dim": 256},
            features=_OWN_FEATURES | {BATCH_INVARIANT},
            cuda_graph=True,
            available=triton_missing,
        ),
    ),
    "torch": (
        "_torch",
        Capability(
            devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64, features=_OWN_FEATURES
        ),
    ),
}


WITH_LSE_IMPLEMENTATIONS = {
    name: Implementation(
        capability=capability, launcher=f"{_PACKAGE}.{module}:paged_attention_with_lse"
    )
    for name, (module, capability) in _BACKENDS.items()
}
_CUDNN = Implementation(
    capability=Capability(
        devices=frozenset({"cuda"}),
        dtypes=_HALVES,
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
IMPLEMENTATIONS = with_flashinfer(
    "paged_attention",
    {"cudnn": _CUDNN, **WITH_LSE_IMPLEMENTATIONS},
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=_HALVES,
            one_of={"head_dim": (64, 128, 256)},
            features=FEATURES - {"lse"},
            cuda_graph=True,
            available=flashinfer_missing(),
        ),
        launcher=f"{_PACKAGE}._flashinfer:paged_attention",
        planner=f"{_PACKAGE}._flashinfer_plan:plan",
    ),
    flashinfer_trtllm=Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            dtypes=_HALVES,
            one_of={"head_dim": (64, 128, 256), "page_size": (16, 32, 64, 128)},
            features=frozenset({"extend", "sliding_window"}),
            cuda_graph=True,
            available=flashinfer_missing(capabilities=BLACKWELL),
        ),
        launcher=f"{_PACKAGE}._flashinfer_trtllm:paged_attention",
        planner="torch_hybrid.ops.flashinfer.blackwell:plan_any",
        by_name=NEVER_RAN,
    ),
)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    kv_scales: Tensor | None = None,
    planned: Sequence[Tensor] = (),
    impl: str,
) -> Tensor:
    """Write the new keys and values into their pages, then attend causally to the pages.

    One call serves any mix of lengths: N sequences, their T new tokens packed, Hq query heads,
    Hkv key heads (query head i reads key head ``i // (Hq // Hkv)``), P pages. Query i of a
    sequence with n new tokens sees the keys up to position ``seq_len - n + i``. Page 0 is null:
    it is neither read nor written. Tokens from ``cu_seqlens[N]`` on are padding.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [T, Hkv, D], as q.
        v: [T, Hkv, D], as q.
        kv: [2, P, page_size, Hkv, D], dtype of q or float8_e4m3fn, contiguous; keys in ``kv[0]``,
            values in ``kv[1]``. Mutated: the rows that ``slot_mapping`` names, rounded to 8 bits
            as ``ops.fp8_kv`` says; the new tokens attend to what was rounded.
        cu_seqlens: [N + 1] int32, offsets of each sequence's new tokens, from 0.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``. Entries that no query sees are never read.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        scale: factor of the logits, usually ``D ** -0.5``.
        window: number of keys that a query sees, itself included; 0 for all.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0.0 for none (Gemma 2).
        relative_bias: [T, Hq, R] in q's dtype, contiguous: element d is added, after a softcap, to
            a query's logit of the key d tokens before it, and nothing to keys R tokens before it
            or more (Inkling). Those of padding tokens are not read.
        kv_scales: [2, Hkv] float32, positive: what a number of float8_e4m3fn is worth in the keys
            and in the values of each head. For a pool of 8 bits alone.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, Hq, D] in the dtype of q; rows of padding tokens are 0.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading it is free (on a CPU),
            an index is outside its pool.
    """
    _validate(q, k, v, kv, cu_seqlens, seq_lens, page_table, slot_mapping, kv_scales)
    _validate_options(scale, window, softcap)
    _validate_bias(relative_bias, q)
    sizes = {"head_dim": q.shape[-1], "page_size": kv.shape[2]}
    features = _features_of(kv, relative_bias)
    check_impl(impl, IMPLEMENTATIONS, q.device, sizes, features=features)
    check_planned(impl, IMPLEMENTATIONS, planned)
    out: Tensor = _PAGED_ATTENTION(
        q,
        k,
        v,
        kv,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        scale=scale,
        window=window,
        softcap=softcap,
        impl=impl,
        **fp8_kv.given_scales("kv_scales", kv_scales),
        **given(planned),
        **_given_bias(relative_bias),
    )
    return out


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    kv_scales: Tensor | None = None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """:func:`paged_attention` that also returns the log-sum-exp of each row's logits.

    ``impl`` is a name in WITH_LSE_IMPLEMENTATIONS.

    Two results over disjoint sets of keys merge by it; ``(0, -inf)``, which padding rows have,
    is the identity of that merge.

    Returns:
        The output, [T, Hq, D] in the dtype of q, and the natural-log LSE, [T, Hq] float32.
    """
    _validate(q, k, v, kv, cu_seqlens, seq_lens, page_table, slot_mapping, kv_scales)
    _validate_options(scale, window, softcap)
    _validate_bias(relative_bias, q)
    sizes, features = {"head_dim": q.shape[-1]}, _features_of(kv, relative_bias)
    check_impl(impl, WITH_LSE_IMPLEMENTATIONS, q.device, sizes, features=features)
    out, lse = _PAGED_ATTENTION_WITH_LSE(
        q,
        k,
        v,
        kv,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        scale=scale,
        window=window,
        softcap=softcap,
        impl=impl,
        **fp8_kv.given_scales("kv_scales", kv_scales),
        **_given_bias(relative_bias),
    )
    return out, lse


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:
    for name, tensor, dim in (("q", q, 3), ("kv", kv, 5), ("page_table", page_table, 2)):
        if tensor.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_pages, page_size, num_kv_heads, _ = kv.shape
    num_seqs = page_table.shape[0]
    check_shapes(
        {
            "kv": (kv, (2, num_pages, page_size, num_kv_heads, head_dim)),
            "k": (k, (num_tokens, num_kv_heads, head_dim)),
            "v": (v, (num_tokens, num_kv_heads, head_dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "slot_mapping": (slot_mapping, (num_tokens,)),
        }
    )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"q heads must be a multiple of the {num_kv_heads} key heads, got {num_q_heads}"
        )
    if q.dtype not in FLOATS and q.dtype != torch.float64:
        raise ValueError(f"q must be a floating point tensor, got {q.dtype}")
    check_dtypes({"k": (k, q.dtype), "v": (v, q.dtype)})
    fp8_kv.check_pool_dtype("kv", kv, q.dtype)
    fp8_kv.check_pairs(kv, head_dim=head_dim)
    fp8_kv.check_scales("kv_scales", kv, kv_scales, 2, num_kv_heads)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("page_table", page_table)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dim, got {tensor.stride()}")
    if not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous, got strides {kv.stride()}")
    index = {"cu_seqlens": cu_seqlens, "seq_lens": seq_lens, "slot_mapping": slot_mapping}
    check_contiguous(**index)
    check_dtypes(
        {
            "page_table": (page_table, torch.int32),
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )


def _validate_options(scale: float, window: int, softcap: float) -> None:
    check_scale(scale)
    if window < 0:
        raise ValueError(f"window must be 0 or a number of keys, got {window}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 or positive, got {softcap}")


def _validate_bias(relative_bias: Tensor | None, q: Tensor) -> None:
    if relative_bias is None:
        return
    if relative_bias.dim() != 3 or not relative_bias.shape[2]:
        raise ValueError(
            f"relative_bias must have shape [T, Hq, R] with R > 0, got {list(relative_bias.shape)}"
        )
    check_shapes({RELATIVE_BIAS: (relative_bias, (*q.shape[:2], relative_bias.shape[2]))})
    check_dtypes({RELATIVE_BIAS: (relative_bias, q.dtype)})
    check_contiguous(relative_bias=relative_bias)


def _features_of(kv: Tensor, relative_bias: Tensor | None) -> frozenset[str] | None:
    """What the arguments want that not all implementations have; None where it is nothing."""
    bias = NO_FEATURES if relative_bias is None else {RELATIVE_BIAS}
    return fp8_kv.features_of(kv.dtype) | bias or None


def _given_bias(relative_bias: Tensor | None) -> dict[str, Tensor]:
    """The argument of an op, left out where there is none."""
    return {} if relative_bias is None else {RELATIVE_BIAS: relative_bias}


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor cu_seqlens, Tensor seq_lens,"
    " Tensor page_table, Tensor slot_mapping"
)
_OPTIONS = "float scale, int window, float softcap, str impl, Tensor? kv_scales=None"
_BIAS = "Tensor? relative_bias=None"


def _fake_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    impl: str,
    kv_scales: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


_PAGED_ATTENTION = define_op(
    f"paged_attention({_TENSORS}, *, {_OPTIONS}, Tensor[]? planned=None, {_BIAS}) -> Tensor",
    like=["q"],
    implementations=IMPLEMENTATIONS,
)
_PAGED_ATTENTION_WITH_LSE = define_op(
    f"paged_attention_with_lse({_TENSORS}, *, {_OPTIONS}, {_BIAS}) -> (Tensor, Tensor)",
    fake=_fake_with_lse,
    implementations=WITH_LSE_IMPLEMENTATIONS,
)
