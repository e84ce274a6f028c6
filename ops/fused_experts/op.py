"""The experts of a mixture: each token through its own few MLPs, in one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    NO_FEATURES,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import check_impl, check_shapes, define_op
from torch_hybrid.ops.formats import block_scales, stored_weights
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import (
    fp8_products_missing,
    triton_devices,
    triton_missing,
)

# Whether a gate stands beside the up projection, by activation.
HAS_GATE = {"silu": True, "relu2": False}
ID_DTYPES = (torch.int32, torch.int64)
FEATURES = frozenset({block_scales.FEATURE})

IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=stored_weights.FEATURES,
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.fused_experts._cpu:fused_experts",
        figures="torch_hybrid.ops.native.cpu_tuning:figures",
    ),
    "cpp_invariant": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=stored_weights.FEATURES | {BATCH_INVARIANT},
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.fused_experts._cpu_invariant:fused_experts",
    ),
    "triton_fp8": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=FEATURES,
            only_with=FEATURES,
            cuda_graph=True,
            available=fp8_products_missing,
        ),
        launcher="torch_hybrid.ops.fused_experts._triton:rounded_experts",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=stored_weights.FEATURES,
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.fused_experts._triton:fused_experts",
    ),
    "triton_invariant": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.fused_experts._triton:invariant_experts",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), features=stored_weights.FEATURES),
        launcher="torch_hybrid.ops.fused_experts._torch:fused_experts",
    ),
}


def fused_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    activation: str,
    limit: float | None = None,
    softcaps: Sequence[float] | None = None,
    impl: str,
) -> Tensor:
    """Sum of each token's chosen experts, weighted.

    ``out[t] = sum_j expert_weights[t, j] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t]))``
    with ``e = expert_ids[t, j]``, or ``down[e] @ act(up[e] @ x[t])`` where the activation has no
    gate. Sums are float32.

    With scales, a weight is worth its numbers times these, of 8-bit floats, or integers of 8 or 4
    bits, as ``linear`` takes them. Nothing else is rounded, but by the implementation "triton_fp8",
    of 8-bit floats: tokens and hidden activations, each row's numbers with a scale for 128 columns,
    where there is more than one token.

    Args:
        x: [T, D] float; rows may lie any distance apart, one row is contiguous.
        expert_ids: [T, k] int32 or int64, contiguous, from 0 to E; E means no expert.
        expert_weights: [T, k] float32 or x's dtype, contiguous.
        gate_up: [E, 2 I, D] contiguous, in x's dtype: the I rows of gate, then those of up;
            [E, I, D], the rows of up alone, where there is no gate. With scales float8_e4m3fn,
            int8, or uint8 with half as many columns.
        down: [E, D, I] contiguous, in gate_up's dtype.
        gate_up_scales: [E, 2 ceil(I / 128), ceil(D / 128)] float32, contiguous, or half of it
            without a gate: gate and up have blocks each for itself; of int8 [E, 2 I], of uint8
            [E, 2 I, D / group], or twice as many with zero points; or None.
        down_scales: [E, ceil(D / 128), ceil(I / 128)], [E, D], [E, D, I / group] or
            [E, D, I / group, 2] float32, contiguous, where gate_up has scales; else None.
        activation: "silu", of a gate; or "relu2", the square of the positive part, without one.
        limit: positive, what gates are at most, and the rows of up within ``-limit`` and ``limit``,
            before the activation; None: they have no bounds. Of a gate alone.
        softcaps: two positive numbers, in the place of a limit: ``act`` is then
            ``c * tanh(gate / c) * sigmoid(gate)`` with the first, and the rows of up become
            ``c * tanh(up / c)`` with the second; or None. Of a gate alone.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, D] in x's dtype. A row depends on its own token alone.

    Raises:
        ValueError: a shape, dtype, layout or bound is not as above, ``activation`` or ``impl`` is
            unknown, or, where reading them is free (on a CPU), an id is out of range.

    The experts of Qwen3-Next, Qwen3.5-MoE and Granite-4-H ("silu"), of GLM-5.3 (with a limit), of
    Inkling-2 (with softcaps) and of Nemotron-H ("relu2"), in transformers' packed layout.
    """
    scales = {
        name: scale
        for name, scale in (("gate_up_scales", gate_up_scales), ("down_scales", down_scales))
        if scale is not None
    }
    features = NO_FEATURES
    if scales:
        stored_weights.check_has_scales("gate_up", gate_up)
        features = stored_weights.features_of(gate_up.dtype)
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype, features=features)
    if activation not in HAS_GATE:
        raise ValueError(f"activation must be one of {list(HAS_GATE)}, got {activation!r}")
    has_gate = HAS_GATE[activation]
    if limit is not None and not (limit > 0 and has_gate):
        raise ValueError(f"limit must be positive and of a gate, got {limit} and {activation!r}")
    if softcaps is not None:
        _check_softcaps(softcaps, has_gate=has_gate, limit=limit)
    weight_dtype = gate_up.dtype if scales else x.dtype
    _check_inputs(x, expert_ids, expert_weights, gate_up, down, weight_dtype, has_gate)
    if scales:
        _check_scales(gate_up, down, gate_up_scales, down_scales, has_gate)
    out: Tensor = _FUSED_EXPERTS(
        x,
        expert_ids,
        expert_weights,
        gate_up,
        down,
        **scales,
        activation=activation,
        limit=limit,
        **({} if softcaps is None else {"softcaps": list(softcaps)}),
        impl=impl,
    )
    return out


def _check_softcaps(softcaps: Sequence[float], *, has_gate: bool, limit: float | None) -> None:
    if len(softcaps) != 2 or min(softcaps) <= 0:
        raise ValueError(f"softcaps must be two positive numbers, got {list(softcaps)}")
    if not has_gate or limit is not None:
        raise ValueError(f"softcaps must be of a gate without a limit, got limit {limit}")


def _check_inputs(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight_dtype: torch.dtype,
    has_gate: bool,
) -> None:
    for name, tensor, ndim in (("x", x, 2), ("expert_ids", expert_ids, 2), ("down", down, 3)):
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got {list(tensor.shape)}")
    num_tokens, dim = x.shape
    num_experts, width = down.shape[0], stored_weights.depth_of(down)
    top_k = expert_ids.shape[1]
    gate_up_shape = (num_experts, (1 + has_gate) * width, dim)
    check_shapes(
        {
            "expert_ids": (expert_ids, (num_tokens, top_k)),
            "expert_weights": (expert_weights, (num_tokens, top_k)),
            "gate_up": (gate_up, stored_weights.stored_shape(gate_up_shape, weight_dtype)),
            "down": (down, (num_experts, dim, down.shape[2])),
        }
    )
    for name, tensor, dtypes in (
        ("expert_ids", expert_ids, ID_DTYPES),
        ("expert_weights", expert_weights, (torch.float32, x.dtype)),
        ("gate_up", gate_up, (weight_dtype,)),
        ("down", down, (weight_dtype,)),
    ):
        if tensor.dtype not in dtypes:
            allowed = " or ".join(map(str, dict.fromkeys(dtypes)))
            raise ValueError(f"{name} must have dtype {allowed}, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
    if x.stride(1) != 1 and dim > 1:
        raise ValueError(f"x must have contiguous rows, got strides {list(x.stride())}")


def _check_scales(
    gate_up: Tensor,
    down: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    has_gate: bool,
) -> None:
    if gate_up_scales is None or down_scales is None:
        missing = "gate_up_scales" if gate_up_scales is None else "down_scales"
        raise ValueError(f"{missing} must be given where the other scales are, got None")
    num_parts = 1 + has_gate
    stored_weights.check_scales(gate_up, gate_up_scales, "gate_up_scales", num_parts=num_parts)
    stored_weights.check_scales(down, down_scales, "down_scales")


_FUSED_EXPERTS = define_op(
    "fused_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, "
    "Tensor down, *, Tensor? gate_up_scales=None, Tensor? down_scales=None, str activation, "
    "float? limit=None, float[]? softcaps=None, str impl) -> Tensor",
    like=["x"],
    implementations=IMPLEMENTATIONS,
)
