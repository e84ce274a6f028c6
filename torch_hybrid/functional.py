"""Recurrences, convolutions and experts to train with: differentiable, and they mutate nothing.

Tokens of several sequences lie in a row, and a :class:`~torch_hybrid.Packing` says where each
begins; states go in and come out. A forward is one op in a graph, and so is its backward: both
compile with ``fullgraph=True``, and no packing of as many tokens recompiles. Rows of a packing have
the bits, gradients too, that each sequence has alone. Two runs have the same bits.

For the backward, a function saves its tensor arguments and nothing else: states within sequences
are recomputed. (:func:`fused_experts` saves a product, too.) A derivative of a derivative,
forward-mode derivatives and transforms of ``torch.func`` raise NotImplementedError.
``torch.autocast`` does not reach into a function.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.causal_conv1d.training.op import causal_conv1d_forward
from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.core.recurrence import check_rows
from torch_hybrid.ops.core.registration import (
    check_dtypes,
    check_groups,
    check_shapes,
    first_impl,
)
from torch_hybrid.ops.delta_rule.training.op import (
    gated_delta_rule_forward,
    kimi_delta_attention_forward,
)
from torch_hybrid.ops.fused_experts.training.op import fused_experts_forward
from torch_hybrid.ops.rg_lru.training.op import rg_lru_forward
from torch_hybrid.ops.selective_scan.training.op import selective_scan_forward
from torch_hybrid.ops.ssd.training.op import ssd_forward
from torch_hybrid.ops.wkv.training.op import wkv_forward
from torch_hybrid.packing import Packing

__all__ = [
    "causal_conv1d",
    "fused_experts",
    "gated_delta_rule",
    "kimi_delta_attention",
    "lightning_attention",
    "mlstm",
    "rg_lru",
    "selective_scan",
    "ssd",
    "wkv",
]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    *,
    qk_l2norm: bool = False,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule, differentiable in all its floating point tensors.

    Per value head: ``S = e^g S; u = beta (v - S k); S = S + u k^T; o = scale S q``, by chunks.
    Value head ``j`` reads key head ``j // (HV // H)``. Sums are float32, of float64 float64.

    Args:
        q: [T, H, K] queries: float32, bfloat16, or float64 (by "torch"). Rows of a token are
            contiguous, tokens may lie any distance apart; so for k and v.
        k: [T, H, K] keys, in q's dtype.
        v: [T, HV, V] values, in q's dtype; HV is a multiple of H.
        g: [T, HV] natural-log decay, at most 0; float32, or float64 beside float64.
        beta: [T, HV] step size, in g's dtype.
        packing: of T tokens in N sequences at most; None for one sequence.
        initial_state: [N, HV, V, K] in g's dtype, N the packing's capacity; None for zeros.
        scale: factor on q; None for ``K ** -0.5``.
        qk_l2norm: scale each q and k to unit length first, by ``rsqrt(sum x^2 + 1e-6)``.
        output_final_state: whether to return final states: a packing of default capacity has room
            for T of them.
        impl: "cpp", "triton_rounded" (bfloat16; states are kept in float16), "triton" or "torch";
            None for the first that serves. A backward takes the implementation of that name, or
            the first that serves.

    Returns:
        [T, HV, V] outputs in v's dtype, and the final states [N, HV, V, K] in g's dtype, or None.
        That of an empty sequence is its initial one.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.

    From "Gated Delta Networks" (arXiv 2412.06464), as used by Qwen3-Next.
    """
    check_no_tangents("gated_delta_rule", q, k, v, g, beta, initial_state)
    o, final_state = gated_delta_rule_forward(
        *(q, k, v, g, beta, _offsets(packing, q), initial_state),
        scale=_scale(scale, k),
        qk_l2norm=qk_l2norm,
        output_final_state=output_final_state,
        impl=_first("gated_delta_rule_forward", k, v) if impl is None else impl,
    )
    return o, final_state if output_final_state else None


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    *,
    qk_l2norm: bool = False,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi delta attention, differentiable in all its floating point tensors.

    Per head: ``S = S diag(e^g); u = beta (v - S k); S = S + u k^T; o = scale S q``, by chunks.
    Arguments, results and errors are those of :func:`gated_delta_rule`, but:

    Args:
        v: [T, H, V] values: as many heads as of keys.
        g: [T, H, K] natural-log decay of each channel, at most 0; rows as for q.
        beta: [T, H] step size.

    From "Kimi Linear" (arXiv 2510.26692); also the linear layers of Ling-3.
    """
    check_no_tangents("kimi_delta_attention", q, k, v, g, beta, initial_state)
    op = "kimi_delta_attention_forward"
    o, final_state = kimi_delta_attention_forward(
        *(q, k, v, g, beta, _offsets(packing, q), initial_state),
        scale=_scale(scale, k),
        qk_l2norm=qk_l2norm,
        output_final_state=output_final_state,
        impl=_first(op, k, v) if impl is None else impl,
    )
    return o, final_state if output_final_state else None


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    *,
    dt_limit: tuple[float, float] = (0.0, inf),
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the state space duality of Mamba2, differentiable in all its floating point tensors.

    Per head: ``d = softplus(dt + dt_bias); S = e^(d A) S + d x B^T; y = S C + D x``, by chunks.
    Head ``h`` reads group ``h // (H // G)`` of B and C. Sums, and steps d, are float32, of float64
    float64.

    Args:
        x: [T, H, P] inputs: float32, bfloat16, or float64 (by "torch"). Rows of a token are
            contiguous, tokens may lie any distance apart; so for B and C.
        dt: [T, H] step sizes before bias and softplus, in any float dtype.
        A: [H] rates of decay, at most 0, in any float dtype.
        B: [T, G, N] what inputs write, in x's dtype; H is a multiple of G.
        C: [T, G, N] what outputs read, in x's dtype.
        D: [H] weight of each input in its own output, in any float dtype; None for 0.
        dt_bias: [H] bias of the step sizes, in any float dtype; None for 0.
        packing: of T tokens in several sequences; None for one sequence.
        initial_state: [capacity, H, P, N] float32, or float64 beside float64; None for zeros.
        dt_limit: least and largest step.
        output_final_state: as in :func:`gated_delta_rule`.
        impl: "cpp", "triton" or "torch", as in :func:`gated_delta_rule`.

    Returns:
        [T, H, P] outputs in x's dtype, and the final states like initial ones, or None.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.

    From "Transformers are SSMs" (arXiv 2405.21060).
    """
    check_no_tangents("ssd", x, dt, A, B, C, D, dt_bias, initial_state)
    if x.ndim != 3 or B.ndim != 3:
        raise ValueError(
            f"x must be [T, H, P] and B [T, G, N], got {list(x.shape)} and {list(B.shape)}"
        )
    num_tokens, num_heads, _ = x.shape
    heads = {"A": (A, [num_heads]), "D": (D, [num_heads]), "dt_bias": (dt_bias, [num_heads])}
    rows = {"B": (B, [num_tokens, *B.shape[1:]]), "C": (C, [num_tokens, *B.shape[1:]])}
    check_shapes({"dt": (dt, [num_tokens, num_heads]), **heads, **rows})
    check_dtypes({"B": (B, x.dtype), "C": (C, x.dtype)})
    check_groups("x must have", num_heads, B.shape[1], "groups of B")
    check_rows(x=x, B=B, C=C)
    work = torch.promote_types(x.dtype, torch.float32)
    step = dt.to(work) if dt_bias is None else dt.to(work) + dt_bias.to(work)
    step = _softplus(step).clamp(*dt_limit).contiguous()
    y, final_state = ssd_forward(
        *(C, B, x, step * A.to(work), step, None if D is None else D.to(work)),
        *(_offsets(packing, x), initial_state),
        scale=1.0,
        output_final_state=output_final_state,
        impl=_first("ssd_forward", B, x) if impl is None else impl,
    )
    return y, final_state if output_final_state else None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run Mamba's selective scan, differentiable in all its floating point tensors.

    Per channel: ``d = softplus(dt + dt_bias); S = e^(d A) S + d x B; y = (S C + D x) silu(z)``.
    Channel ``c`` reads group ``c // (E // G)`` of B and C. Sums, and steps d, are float32, of
    float64 float64.

    Args:
        x: [T, E] inputs: float32, bfloat16, or float64 (by "torch"). Rows of a token are
            contiguous, tokens may lie any distance apart; so for dt, B, C and z.
        dt: [T, E] step sizes before bias and softplus, in x's dtype.
        A: [E, N] rates of decay, at most 0, in any float dtype.
        B: [T, G, N] what inputs write, in x's dtype; E is a multiple of G.
        C: [T, G, N] what outputs read, in x's dtype.
        D: [E] weight of each input in its own output, in any float dtype; None for 0.
        z: [T, E] gate of the outputs, in x's dtype; None: they are not gated.
        dt_bias: [E] bias of the step sizes, in any float dtype; None for 0.
        packing: of T tokens in several sequences; None for one sequence.
        initial_state: [capacity, E, N] float32, or float64 beside float64; None for zeros.
        output_final_state: as in :func:`gated_delta_rule`.
        impl: "cpp", "triton" or "torch", as in :func:`gated_delta_rule`.

    Returns:
        [T, E] outputs in x's dtype, and the final states like initial ones, or None.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752).
    """
    check_no_tangents("selective_scan", x, dt, A, B, C, D, z, dt_bias, initial_state)
    work = torch.promote_types(x.dtype, torch.float32)
    D, dt_bias = (None if each is None else each.to(work) for each in (D, dt_bias))
    if impl is None:
        op = "selective_scan_forward"
        impl = first_impl(op, x.device, x.dtype, state_dim=A.shape[-1])
    y, final_state = selective_scan_forward(
        *(x, dt, A.to(work), B, C, D, z, dt_bias, _offsets(packing, x), initial_state),
        output_final_state=output_final_state,
        impl=impl,
    )
    return y, final_state if output_final_state else None


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run lightning attention, differentiable in all its floating point tensors.

    Per value head: ``S = e^-s S + v k^T; o = scale S q``, by chunks. Arguments, results and errors
    are those of :func:`gated_delta_rule`, but:

    Args:
        slopes: [HV] rates s of decay, at least 0, in any float dtype.
        impl: "cpp", "triton" or "torch".

    From "Lightning Attention-2" (arXiv 2401.04658), as used by MiniMax-01 and Ring-2.5.
    """
    check_no_tangents("lightning_attention", q, k, v, slopes, initial_state)
    check_shapes({"slopes": (slopes, v.shape[1:2])})
    g = -slopes.to(torch.promote_types(v.dtype, torch.float32)).expand(v.shape[:2])
    o, final_state = ssd_forward(
        *(q, k, v, g, None, None, _offsets(packing, q), initial_state),
        scale=_scale(scale, k),
        output_final_state=output_final_state,
        impl=_first("ssd_forward", k, v) if impl is None else impl,
    )
    return o, final_state if output_final_state else None


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the matrix memory of xLSTM, differentiable in all its floating point tensors.

    Per value head: ``C = sigmoid(f) C + e^i v k^T; n = sigmoid(f) n + e^i k``, and of the scaled q
    ``h = C q / max(|n q|, 1)``, by chunks. The backward is given C q and n q, too. Arguments,
    results and errors are those of :func:`gated_delta_rule`, but:

    Args:
        i: [T, HV] input gates, before their exponential, in any float dtype. Published code divides
            memories by ``e^m``, m the largest exponent so far; here they are whole, and sums of
            ``e^i`` must be finite in float32. Soft caps see to that.
        f: [T, HV] forget gates, before their sigmoid, in any float dtype.
        initial_state: [N, HV, M, K], M the first multiple of 16 above V: a memory C of values, then
            the normalizer n in each further row.
        impl: "cpp", "triton" or "torch".

    Returns:
        [T, HV, V] outputs in v's dtype, and the final states like initial ones, or None.

    From "xLSTM" (arXiv 2405.04517).
    """
    check_no_tangents("mlstm", q, k, v, i, f, initial_state)
    check_shapes({"i": (i, v.shape[:2]), "f": (f, v.shape[:2])})
    work, v_dim = torch.promote_types(v.dtype, torch.float32), v.shape[-1]
    ones = (v_dim // 16 + 1) * 16 - v_dim  # of which one is read; the others align rows
    read, final_state = ssd_forward(
        *(q, k, pad(v, (0, ones), value=1.0)),
        *(-_softplus(-f.to(work).contiguous()), i.to(work).contiguous().exp(), None),
        *(_offsets(packing, q), initial_state),
        scale=_scale(scale, k),
        output_final_state=output_final_state,
        impl=_first("ssd_forward", k, v) if impl is None else impl,
    )
    values, normalizer, _ = read.to(work).split([v_dim, 1, ones - 1], -1)
    h = (values / normalizer.abs().clamp(min=1.0)).to(v.dtype)
    return h, final_state if output_final_state else None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel of each sequence with its own short filter over the past.

    ``y[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w])``, where the inputs before the first
    token of a sequence come from its state. Differentiable in all its floating point tensors.

    Args:
        x: [T, C] inputs: float32, bfloat16, or float64 (by "torch"); tokens may lie any distance
            apart, the channels of one are contiguous.
        weight: [C, W] filter of each channel, oldest tap first, in x's dtype; W from 2 to 16.
        bias: [C] in x's dtype, or None.
        packing: of T tokens in N sequences at most; None for one sequence.
        initial_state: [N, W - 1, C] the inputs before each sequence, oldest first, in x's dtype;
            None for zeros.
        activation: "silu" or None.
        output_final_state: whether to return the last inputs of each sequence.
        impl: as in :func:`gated_delta_rule`.

    Returns:
        [T, C] outputs in x's dtype, and the last inputs [N, W - 1, C] of each sequence, or None.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.
    """
    check_no_tangents("causal_conv1d", x, weight, bias, initial_state)
    y, final_state = causal_conv1d_forward(
        *(x, weight, bias, _offsets(packing, x), initial_state),
        activation="none" if activation is None else activation,
        output_final_state=output_final_state,
        impl=first_impl("causal_conv1d_forward", x.device, x.dtype) if impl is None else impl,
    )
    return y, final_state if output_final_state else None


def rg_lru(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run real-gated linear recurrent units, differentiable in all floating point tensors.

    Per channel: ``i, r = sigmoid(gates); a = e^(r log_a); h = a h + sqrt(1 - a^2) i x``. Sums are
    float32, of float64 float64. Without ``initial_state`` the first token of each sequence is not
    scaled: ``h = i x``. The derivative of the root is at most 1000, as the published models train.

    Args:
        x: [T, C] inputs: float32, bfloat16, or float64 (by "torch"); tokens may lie any distance
            apart, the channels of one are contiguous.
        gates: [T, H, 2 C / H] what gates are before their sigmoid, in x's dtype: of each head those
            of its channels' inputs, then those of their recurrence. Tokens and heads may lie any
            distance apart.
        log_a: [C] natural logarithm of the decay where its gate is 1, at most 0; float32, or
            float64 beside float64.
        packing: of T tokens in N sequences at most; None for one sequence.
        initial_state: [N, C] in log_a's dtype; None: all sequences start from nothing.
        output_final_state: as in :func:`gated_delta_rule`.
        impl: "cpp", "triton" or "torch", as in :func:`gated_delta_rule`.

    Returns:
        [T, C] states h in x's dtype, and the last of each sequence [N, C] in log_a's, or None. That
        of an empty sequence is its initial one.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.

    From "Griffin" (arXiv 2402.19427), as used by RecurrentGemma.
    """
    check_no_tangents("rg_lru", x, gates, log_a, initial_state)
    h, final_state = rg_lru_forward(
        *(x, gates, log_a, _offsets(packing, x), initial_state),
        output_final_state=output_final_state,
        impl=first_impl("rg_lru_forward", x.device, x.dtype) if impl is None else impl,
    )
    return h, final_state if output_final_state else None


def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Average past values by keys and age, differentiable in all floating point tensors.

    Per channel: ``o = (n + e^(bonus + k) v) / (d + e^(bonus + k))``, then
    ``n = e^log_decay n + e^k v; d = e^log_decay d + e^k``. A state is n and d divided by e^m, and
    m, the largest exponent in them. Sums are float32, of float64 float64.

    Args:
        k: [T, C] logarithms of weights: float32, bfloat16, or float64 (by "torch"); tokens may lie
            any distance apart, the channels of one are contiguous.
        v: [T, C] values, in k's dtype, rows as for k.
        log_decay: [C] what a token takes from all logarithms before it, at most 0; float32, or
            float64 beside float64.
        bonus: [C] what a token's own logarithm has more in its own output, in log_decay's dtype.
        packing: of T tokens in N sequences at most; None for one sequence.
        initial_state: [N, 3, C] n, d and m in log_decay's dtype; None: all sequences start from
            nothing.
        output_final_state: as in :func:`gated_delta_rule`.
        impl: "cpp", "triton" or "torch", as in :func:`gated_delta_rule`.

    Returns:
        [T, C] means in k's dtype, and the last state of each sequence [N, 3, C] in log_decay's, or
        None. That of an empty sequence is its initial one.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.

    From "RWKV" (arXiv 2305.13048), as used by RWKV-4.
    """
    check_no_tangents("wkv", k, v, log_decay, bonus, initial_state)
    o, final_state = wkv_forward(
        *(k, v, log_decay, bonus, _offsets(packing, k), initial_state),
        output_final_state=output_final_state,
        impl=first_impl("wkv_forward", k.device, k.dtype) if impl is None else impl,
    )
    return o, final_state if output_final_state else None


def fused_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Literal["silu", "relu2"] = "silu",
    limit: float | None = None,
    softcaps: tuple[float, float] | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Mix the outputs of each token's experts, differentiable in all but stored weights.

    ``out[t] = sum_j expert_weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t]))`` with
    ``e = expert_ids[t, j]``, or ``down[e] @ act(up[e] @ x[t])`` without a gate. The backward is
    given the products with gate and up. On a CPU, and on CUDA but for bfloat16, both read how many
    tokens each expert has.

    Args:
        x: [T, D] tokens: float32, bfloat16, or float64 (on a CPU); they may lie any distance apart.
        expert_ids: [T, k] int32 or int64, from 0 to E; E means no expert.
        expert_weights: [T, k] in x's dtype, or float32.
        gate_up: [E, 2 I, D] in x's dtype: the I rows of gate, then those of up; [E, I, D], those of
            up alone, where there is no gate. With scales it is stored as ``fused_experts`` of
            ``torch_hybrid.ops`` has it, dequantized an expert at a time on a CPU, and has no
            gradient.
        down: [E, D, I] likewise.
        activation: "silu", of a gate; or "relu2", the square of the positive part, without one.
        limit: before the activation, clamps gates to at most this, and up to both sides; or None.
        softcaps: a and b, or None: ``a tanh(gate / a) sigmoid(gate) * b tanh(up / b)``.
        gate_up_scales: of a stored weight, float32; None for one of x's dtype.
        down_scales: likewise.
        impl: "cpp", "triton" or "torch", as in :func:`gated_delta_rule`.

    Returns:
        [T, D] in x's dtype.

    Raises:
        ValueError: a shape, dtype, layout or bound is not as above, or ``impl`` is unknown.
        NotImplementedError: an argument carries a forward-mode tangent.
    """
    check_no_tangents("fused_experts", x, expert_weights, gate_up, down)
    out, *_ = fused_experts_forward(
        *(x, expert_ids, expert_weights, gate_up, down, gate_up_scales, down_scales),
        activation=activation,
        limit=limit,
        softcaps=softcaps,
        impl=first_impl("fused_experts_forward", x.device, x.dtype) if impl is None else impl,
    )
    return out


def _offsets(packing: Packing | None, rows: Tensor) -> Tensor:
    """Return the offsets of the sequences among rows, those of one sequence by default."""
    if packing is None:
        return torch.arange(2, dtype=torch.int32, device=rows.device) * rows.shape[0]
    if not isinstance(packing, Packing):
        raise ValueError(f"packing must be a th.Packing, got {type(packing).__name__}")
    if packing.num_tokens != rows.shape[0]:
        raise ValueError(
            f"packing must be of the {rows.shape[0]} tokens given, got {packing.num_tokens}"
        )
    if packing.cu_seqlens.device != rows.device:
        raise ValueError(
            f"packing must be on {rows.device}, got {packing.cu_seqlens.device}; `to` moves it"
        )
    return packing.cu_seqlens


def _scale(scale: float | None, k: Tensor) -> float:
    """Return the factor on q, by default one over the root of a head's size."""
    if isinstance(scale, Tensor):
        raise ValueError("scale must be a number, got a tensor: multiply q by one that trains")
    return k.shape[-1] ** -0.5 if scale is None else scale


def _softplus(x: Tensor) -> Tensor:
    """Map x to log(1 + e^x); bits, those of the derivative too, depend on x alone.

    Torch's own computes the last numbers of a tensor otherwise than the others.
    """
    e = x.clamp(max=20.0).exp()
    return torch.where(x > 20.0, x, e.log1p())


def _first(op: str, k: Tensor, v: Tensor) -> str:
    """Find the first implementation that serves heads of these sizes."""
    return first_impl(op, k.device, k.dtype, head_k_dim=k.shape[-1], head_v_dim=v.shape[-1])
