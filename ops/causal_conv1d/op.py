"""Depthwise causal convolution over ragged sequences, with its state updated in place by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

MIN_WIDTH, MAX_WIDTH = 2, 16

IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher="torch_hybrid.ops.causal_conv1d._cpu:causal_conv1d",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.causal_conv1d._triton:causal_conv1d",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher="torch_hybrid.ops.causal_conv1d._torch:causal_conv1d",
    ),
}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    token_taps: Tensor | None = None,
    impl: str,
) -> Tensor:
    """Convolve each channel of each sequence with its own short filter over the past.

    ``out[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w])``, where the inputs before the
    first token of a sequence come from its state. Arithmetic is float32, of float64 tensors
    float64. With gates, what is convolved and kept is ``input_gate * x``, rounded to x's dtype, and
    ``out`` is multiplied by ``output_gate``. With taps of each token, those are added to the
    filters of its output.

    Args:
        x: [T, C] inputs, the sequences packed one after the other. Float dtype; rows may lie any
            distance apart (a slice of a projection), one row is contiguous.
        weight: [C, W] filter of each channel, oldest tap first, in x's dtype; W from 2 to 16.
        bias: [C] in x's dtype, or None.
        conv_state: [S, W - 1, C] the last inputs of each sequence, oldest first, in x's dtype.
            **Mutated**: slot ``state_indices[n]`` receives the last W - 1 inputs of sequence n,
            older ones shifted in from the state when it is shorter; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.
        activation: "none" or "silu".
        input_gate, output_gate: [T, C] like x, or None. Those of padding tokens are not read.
        token_taps: [T, H, W] contiguous, in x's dtype: what is added to the filters of the C / H
            channels of each head, oldest tap first; or None. Without gates alone. Those of padding
            tokens are not read.
        impl: a name in IMPLEMENTATIONS.

    Returns:
        [T, C] outputs in x's dtype; rows of padding tokens are exactly 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``activation`` or ``impl`` is unknown,
            or, where reading them is free (on a CPU), an index is out of range.

    The short convolution of Mamba (arXiv 2312.00752), Qwen3-Next and most linear attention; with
    both gates, that of LFM2; with taps of each token, that of Inkling-2's keys and values.
    """
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype)
    check_activation(activation)
    _check_inputs(x, weight, bias, conv_state, cu_seqlens, initial_indices, state_indices)
    gates = {"input_gate": input_gate, "output_gate": output_gate}
    given = {name: gate for name, gate in gates.items() if gate is not None}
    for name, gate in given.items():
        check_shapes({name: (gate, x.shape)})
        check_dtypes({name: (gate, x.dtype)})
        _check_rows(name, gate)
    if token_taps is not None:
        _check_token_taps(token_taps, x, weight, has_gates=bool(given))
        given["token_taps"] = token_taps
    out: Tensor = _CAUSAL_CONV1D(
        x,
        weight,
        bias,
        conv_state,
        cu_seqlens,
        initial_indices,
        state_indices,
        activation=activation,
        impl=impl,
        **given,
    )
    return out


def _check_inputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    for name, tensor in {"x": x, "weight": weight}.items():
        if tensor.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got {list(tensor.shape)}")
    channels, width = x.shape[1], weight.shape[1]
    num_seqs = state_indices.shape[0]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")
    check_shapes(
        {
            "weight": (weight, (channels, width)),
            "bias": (bias, (channels,)),
            "conv_state": (conv_state, (conv_state.shape[0], width - 1, channels)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "initial_indices": (initial_indices, (num_seqs,)),
            "state_indices": (state_indices, (num_seqs,)),
        }
    )
    check_dtypes(
        {
            "weight": (weight, x.dtype),
            "bias": (bias, x.dtype),
            "conv_state": (conv_state, x.dtype),
            "cu_seqlens": (cu_seqlens, torch.int32),
            "initial_indices": (initial_indices, torch.int32),
            "state_indices": (state_indices, torch.int32),
        }
    )
    _check_rows("x", x)
    check_contiguous(
        weight=weight,
        bias=bias,
        conv_state=conv_state,
        cu_seqlens=cu_seqlens,
        initial_indices=initial_indices,
        state_indices=state_indices,
    )


def _check_token_taps(token_taps: Tensor, x: Tensor, weight: Tensor, *, has_gates: bool) -> None:
    if token_taps.ndim != 3:
        raise ValueError(f"token_taps must have 3 dimensions, got {list(token_taps.shape)}")
    num_heads, channels = token_taps.shape[1], x.shape[1]
    check_shapes({"token_taps": (token_taps, (x.shape[0], num_heads, weight.shape[1]))})
    check_dtypes({"token_taps": (token_taps, x.dtype)})
    check_contiguous(token_taps=token_taps)
    if not num_heads or channels % num_heads:
        raise ValueError(
            f"token_taps must have heads that divide {channels} channels, got {num_heads}"
        )
    if has_gates:
        raise ValueError("token_taps must be of a convolution without gates")


def _check_rows(name: str, x: Tensor) -> None:
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name} must have contiguous rows, got strides {list(x.stride())}")


_CAUSAL_CONV1D = define_op(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, "
    "Tensor cu_seqlens, Tensor initial_indices, Tensor state_indices, *, "
    "str activation, str impl, Tensor? input_gate=None, Tensor? output_gate=None, "
    "Tensor? token_taps=None) -> Tensor",
    like=["x"],
    implementations=IMPLEMENTATIONS,
)
