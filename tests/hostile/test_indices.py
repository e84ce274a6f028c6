"""Index tensors that a C++ kernel would trust: out of range, or not dense, they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from torch_hybrid.ops.gated_delta_step import gated_delta_step
from torch_hybrid.ops.kimi_delta_attention import chunk_kimi_delta_attention
from torch_hybrid.ops.kimi_delta_step import kimi_delta_step
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.rg_lru import rg_lru
from torch_hybrid.ops.selective_scan import chunk_selective_scan, recurrent_selective_scan
from torch_hybrid.ops.ssd import chunk_ssd, recurrent_ssd
from torch_hybrid.ops.ssd_step import ssd_step
from torch_hybrid.ops.wkv import wkv

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
NUM_TOKENS, NUM_SLOTS, DIM = 6, 3, 16
RULE: dict[str, Any] = {"scale": 1.0, "qk_l2norm": True, "impl": "cpp"}


def delta_rule(op: Callable[..., Tensor], index: tuple[Tensor, ...], g: Tensor) -> Tensor:
    q = torch.randn(NUM_TOKENS, 1, DIM)
    state = torch.zeros(NUM_SLOTS, 1, DIM, DIM)
    return op(q, q, q, g, torch.ones(NUM_TOKENS, 1), state, *index, **RULE)


def scalar_decay(op: Callable[..., Tensor], index: tuple[Tensor, ...]) -> Tensor:
    q, g = torch.randn(NUM_TOKENS, 1, DIM), torch.zeros(NUM_TOKENS, 1)
    state = torch.zeros(NUM_SLOTS, 1, DIM, DIM)
    return op(q, q, q, g, None, None, state, *index, scale=1.0, impl="cpp")


def scan(op: Callable[..., Tensor], index: tuple[Tensor, ...]) -> Tensor:
    x, B = torch.randn(NUM_TOKENS, DIM), torch.randn(NUM_TOKENS, 1, DIM)
    parameters = (torch.zeros(DIM, DIM), torch.zeros(DIM))
    state = torch.zeros(NUM_SLOTS, DIM, DIM)
    return op(x, x, B, B, None, *parameters, state, *index, impl="cpp")


def convolution(index: tuple[Tensor, ...]) -> Tensor:
    x, state = torch.randn(NUM_TOKENS, DIM), torch.zeros(NUM_SLOTS, 3, DIM)
    return causal_conv1d(x, torch.randn(DIM, 4), None, state, *index, activation="silu", impl="cpp")


def vector_state(index: tuple[Tensor, ...]) -> Tensor:
    x, gates = torch.randn(NUM_TOKENS, DIM), torch.randn(NUM_TOKENS, 1, 2 * DIM)
    return rg_lru(x, gates, -torch.ones(DIM), torch.zeros(NUM_SLOTS, DIM), *index, impl="cpp")


def weighted_average(index: tuple[Tensor, ...]) -> Tensor:
    k, of_channels = torch.randn(NUM_TOKENS, DIM), -torch.ones(DIM)
    return wkv(k, k, of_channels, of_channels, torch.zeros(NUM_SLOTS, 3, DIM), *index, impl="cpp")


def step(op: Callable[..., Tensor], index: tuple[Tensor, ...], a: Tensor, **rule: Any) -> Tensor:
    qkv, b = torch.randn(NUM_TOKENS, 3 * DIM), torch.randn(NUM_TOKENS, 1)
    of_channels = a.shape[1:] if a.shape[1] > 1 else ()
    weights = (torch.randn(3 * DIM, 4), None, torch.zeros(1), torch.zeros(1, *of_channels))
    pools = torch.zeros(NUM_SLOTS, 3, 3 * DIM), torch.zeros(NUM_SLOTS, 1, DIM, DIM)
    options = {"activation": "silu", "scale": 1.0, "norm_eps": 1e-6, "impl": "cpp", **rule}
    z = qkv[:, :DIM].contiguous()
    return op(qkv, z, b, a, *weights, torch.ones(DIM), *pools, *index, **options)


def mamba2_step(index: tuple[Tensor, ...]) -> Tensor:
    xBC, heads = torch.randn(NUM_TOKENS, 3 * DIM), torch.randn(NUM_TOKENS, 1)
    weights = (torch.randn(3 * DIM, 4), None, *torch.zeros(3, 1).unbind(), torch.ones(DIM))
    pools = torch.zeros(NUM_SLOTS, 3, 3 * DIM), torch.zeros(NUM_SLOTS, 1, DIM, DIM)
    limits = {"dt_min": 0.0, "dt_max": 1.0}
    norm = {"norm_before_gate": False, "norm_groups": 1, "norm_eps": 1e-6}
    options = {"activation": "silu", "impl": "cpp"} | limits | norm
    return ssd_step(xBC, xBC[:, :DIM], heads, *weights, *pools, *index, **options)


OPS: dict[str, Callable[[tuple[Tensor, ...]], Tensor]] = {
    "recurrent gated delta rule": lambda index: delta_rule(
        recurrent_gated_delta_rule, index, torch.zeros(NUM_TOKENS, 1)
    ),
    "chunk gated delta rule": lambda index: delta_rule(
        chunk_gated_delta_rule, index, torch.zeros(NUM_TOKENS, 1)
    ),
    "chunk kimi": lambda index: delta_rule(
        chunk_kimi_delta_attention, index, torch.zeros(NUM_TOKENS, 1, DIM)
    ),
    "recurrent ssd": lambda index: scalar_decay(recurrent_ssd, index),
    "chunk ssd": lambda index: scalar_decay(chunk_ssd, index),
    "recurrent selective scan": lambda index: scan(recurrent_selective_scan, index),
    "chunk selective scan": lambda index: scan(chunk_selective_scan, index),
    "convolution": convolution,
    "rg_lru": vector_state,
    "wkv": weighted_average,
    "gated delta step": lambda index: step(
        gated_delta_step, index, torch.zeros(NUM_TOKENS, 1), beta_scale=1.0
    ),
    "kimi delta step": lambda index: step(
        kimi_delta_step, index, torch.zeros(NUM_TOKENS, DIM), gate_lower_bound=None
    ),
    "ssd step": mamba2_step,
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "slot past the pool": ({"slots": [1, 3]}, r"state_indices must be in \[0, 3\), got 3"),
    "negative slot": ({"slots": [-1, 1]}, r"state_indices must be in \[0, 3\), got -1"),
    "too many tokens": ({"offsets": [0, 2, 9]}, "cu_seqlens must rise from 0 to at most 6"),
    "falling": ({"offsets": [0, 5, 2]}, "cu_seqlens must rise from 0"),
    "not from 0": ({"offsets": [-3, 2, 4]}, "cu_seqlens must rise from 0"),
    "start past the pool": ({"starts": [0, 3]}, r"initial_indices must be in \[0, 3\), got 3"),
    "start from what is written": (
        {"starts": [2, 2]},
        "sequence 0 must not start from slot 2, which sequence 1 writes",
    ),
    "strided slots": ({"stride": 2}, "state_indices must be contiguous"),
    "int64 slots": ({"dtype": torch.int64}, "state_indices must have dtype torch.int32"),
}


def indices(
    offsets: tuple[int, ...] = (0, 2, 6),
    slots: tuple[int, ...] = (1, 2),
    starts: tuple[int, ...] = (0, 0),
    stride: int = 1,
    dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor, Tensor]:
    spread = torch.tensor(slots, dtype=dtype).repeat_interleave(stride)[::stride]
    first, initial = (torch.tensor(x, dtype=torch.int32) for x in (offsets, starts))
    return first, initial, spread


@pytest.mark.parametrize("op", OPS)
def test_right_ones_pass(op: str) -> None:
    OPS[op](indices(offsets=[0, 1, 2]) if op.endswith(" step") else indices())


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("op", OPS)
def test_wrong_ones_are_refused(op: str, wrong: str) -> None:
    changes, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        OPS[op](indices(**changes))
