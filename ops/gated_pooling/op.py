"""gated_pooling: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.recurrence import check_tokens
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.gated_pooling"

IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu:gated_pooling",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"block_size": 64},
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher=f"{_PACKAGE}._triton:gated_pooling",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:gated_pooling",
    ),
}


def gated_pooling(
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    impl: str,
) -> Tensor:
    """The key of every block of tokens that is now complete: a mean of its tokens', channel by
    channel, with the softmax of their gates for weights.

    A sequence's tokens are cut into blocks of B. With i from 0 to B - 1 over the tokens of a
    block, ``out = sum_i softmax_i(gate_i + bias_i) * key_i`` in float32. N sequences, their T new
    tokens packed; S slots, of which 0 is nobody's.

    Args:
        keys: [T, D] float dtype; rows may lie any distance apart, one row is contiguous.
        gates: [T, D], as keys.
        bias: [B, D] in the keys' dtype, contiguous.
        state: [S, B - 1, 2, D] in the keys' dtype, contiguous: key and gate of the tokens of a
            block that is not complete, by their places in it. **Mutated**: slot
            ``state_indices[n]`` receives those of sequence n; where it has no such tokens, and in
            rows of others, it stays as it is.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens from
            ``cu_seqlens[N]`` on are padding. An empty sequence leaves its slot as it is.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        initial_indices: [N] int32 slot that has what each sequence left of its last block; 0:
            zeros.
        state_indices: [N] int32 slot that receives what each sequence leaves, distinct except for
            0: that is not stored.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, D] in the keys' dtype: the key of the block that a token is the last of, and 0 for other
        tokens.

    Raises:
        ValueError: a shape, dtype or layout is not as above, or ``impl`` is unknown; or, where
            reading it is free (on a CPU), an index is outside its pool.

    The pooled keys of GLM-5.3's indexer.
    """
    _validate(keys, gates, bias, state, cu_seqlens, seq_lens, initial_indices, state_indices)
    sizes = {"block_size": bias.shape[0]}
    check_impl(impl, IMPLEMENTATIONS, keys.device, sizes, dtype=keys.dtype)
    out: Tensor = _GATED_POOLING(
        keys,
        gates,
        bias,
        state,
        cu_seqlens,
        seq_lens,
        initial_indices,
        state_indices,
        impl=impl,
    )
    return out


def _validate(
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    for name, tensor in (("keys", keys), ("bias", bias)):
        if tensor.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got {list(tensor.shape)}")
    if keys.dtype not in FLOATS_AND_FLOAT64:
        raise ValueError(f"keys must be a floating point tensor, got {keys.dtype}")
    check_tokens(
        {
            "keys": (keys, keys.shape, keys.dtype),
            "gates": (gates, keys.shape, keys.dtype),
        }
    )
    size, dim = bias.shape
    num_seqs = state_indices.shape[0]
    index = {
        "cu_seqlens": cu_seqlens,
        "seq_lens": seq_lens,
        "initial_indices": initial_indices,
        "state_indices": state_indices,
    }
    check_shapes(
        {
            "bias": (bias, (size, keys.shape[1])),
            "state": (state, (state.shape[0], size - 1, 2, dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "initial_indices": (initial_indices, (num_seqs,)),
        }
    )
    check_dtypes(
        {
            "bias": (bias, keys.dtype),
            "state": (state, keys.dtype),
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )
    check_contiguous(bias=bias, state=state, **index)


_GATED_POOLING = define_op(
    "gated_pooling(Tensor keys, Tensor gates, Tensor bias, Tensor(a!) state, Tensor cu_seqlens, "
    "Tensor seq_lens, Tensor initial_indices, Tensor state_indices, *, str impl) -> Tensor",
    like=["keys"],
    implementations=IMPLEMENTATIONS,
)
