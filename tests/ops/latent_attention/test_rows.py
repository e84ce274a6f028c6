"""The contract of store_latents and gather_latents, held by every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.contract import impl_fixture, pool_clones
from tests.ops.latent_attention.cases import CASES, Case, Inputs, make_inputs
from tests.ops.paged_contract import bits
from torch_hybrid.ops.latent_attention import (
    gather_latents,
    latent_attention,
    reference,
    store_latents,
)
from torch_hybrid.ops.latent_attention.op import (
    GATHER_IMPLEMENTATIONS,
    STORE_IMPLEMENTATIONS,
    GatherLatents,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Case(num_heads=4, rank=32, rope_dim=16, lengths=((1, 23), (9, 30), (1, 1)))


impl = impl_fixture(STORE_IMPLEMENTATIONS)


def store_args(inputs: Inputs) -> tuple[Tensor, ...]:
    pool = inputs.pool.clone()
    return inputs.latent, inputs.k_rope, pool, inputs.slot_mapping, inputs.cu_seqlens


def stored(inputs: Inputs, impl: str) -> Tensor:
    """The pool afterwards."""
    args = store_args(inputs)
    store_latents(*args, impl=impl)
    return args[2]


def test_store_writes_what_attention_writes(impl: str) -> None:
    inputs = make_inputs(SMALL, padding=(2, 1))
    args = inputs.args()
    latent_attention(*args, scale=0.1, impl="torch")
    assert torch.equal(bits(stored(inputs, impl)), bits(args[4]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 1.3])
def test_rows_of_8_bits(impl: str, scale: float, dtype: str) -> None:
    inputs = make_inputs(CASES["odd"], padding=(3, 1), dtype=DTYPES[dtype]).in_fp8(scale)
    pool_scale, slots = inputs.pool_scale, inputs.slot_mapping
    args, expected = store_args(inputs), inputs.fresh()
    store_latents(*args, pool_scale=pool_scale, impl=impl)
    reference.store_latents(expected.stored())
    assert torch.equal(bits(args[2]), bits(expected.pool))
    options = {"pool_scale": pool_scale, "dtype": DTYPES[dtype]}
    rows = gather_latents(args[2], slots, impl=impl, **options)
    assert rows.dtype == DTYPES[dtype]
    packed = GatherLatents(args[2], slots, **options, impl="")
    assert torch.equal(rows, reference.gather_latents(packed))
    attended = inputs.args()
    latent_attention(*attended, scale=0.1, pool_scale=pool_scale, impl="torch")
    assert torch.equal(bits(args[2]), bits(attended[4]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(impl: str, dtype: str) -> None:
    """What was stored comes back, in the order of the slots; slot 0 gives zeros, never a NaN."""
    inputs = make_inputs(SMALL, dtype=DTYPES[dtype])
    pool = stored(inputs, impl)
    assert pool[0].isnan().all()
    slots = torch.cat([inputs.slot_mapping, torch.zeros(3), inputs.slot_mapping.flip(0)]).int()
    rows = gather_latents(pool, slots, impl=impl)
    new = torch.cat([inputs.latent, inputs.k_rope], 1)
    zeros = torch.zeros_like(new[:3])
    assert torch.equal(rows, torch.cat([new, zeros, new.flip(0)]))
    assert torch.equal(rows, reference.gather_latents(GatherLatents(pool, slots, impl="")))
    assert gather_latents(pool, slots[:0], impl=impl).shape == (0, 48)


def store_then_gather(impl: str) -> Callable[..., Tensor]:
    def step(*args: Tensor) -> Tensor:
        latent, k_rope, pool, slot_mapping, cu_seqlens = args
        store_latents(*args, impl=impl)
        before = gather_latents(pool, slot_mapping, impl=impl)
        store_latents(latent + 1, k_rope, pool, slot_mapping, cu_seqlens, impl=impl)
        return before + gather_latents(pool, slot_mapping, impl=impl)

    return step


def test_order_survives_compilation(impl: str) -> None:
    inputs = make_inputs(SMALL)
    compiled = torch.compile(store_then_gather(impl), fullgraph=True, backend="aot_eager")
    expected = store_then_gather(impl)(*store_args(inputs))
    assert torch.equal(compiled(*store_args(inputs)), expected)


def test_no_pool_clone_between_two_stores(impl: str) -> None:
    """Two halves of a batch on one pool: no clone as long as nodes keep their order.

    By default Inductor moves a gather behind a later store, which then costs a clone.
    """
    args = store_args(make_inputs(SMALL))
    with torch._inductor.config.patch(reorder_for_locality=False):
        assert pool_clones(store_then_gather(impl), args, [args[2]]) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_store_writes_its_rows_and_nothing_else(impl: str, name: str, dtype: str) -> None:
    """Every other row keeps its bits: the null page, the last page, and those of nobody."""
    inputs = make_inputs(CASES[name], padding=(3, 1), dtype=DTYPES[dtype])
    poison = torch.full_like(inputs.latent, math.nan)
    is_token = torch.arange(len(inputs.latent))[:, None] < inputs.cu_seqlens[-1]
    inputs = replace(inputs, latent=inputs.latent.where(is_token, poison))
    expected = inputs.fresh()
    reference.store_latents(expected.stored())
    assert torch.equal(bits(stored(inputs, impl)), bits(expected.pool))


def test_both_ops_have_the_same_implementations() -> None:
    assert list(STORE_IMPLEMENTATIONS) == list(GATHER_IMPLEMENTATIONS)
