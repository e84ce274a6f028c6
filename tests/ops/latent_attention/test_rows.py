"""The contract of store_latents and gather_latents, held by every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.ops.contract import assert_traces_once, impl_fixture, pool_clones
from tests.ops.latent_attention.cases import CASES, Case, Inputs, make_inputs
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


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def store_args(inputs: Inputs) -> tuple[Tensor, ...]:
    pool = inputs.pool.clone()
    return inputs.latent, inputs.k_rope, pool, inputs.slot_mapping, inputs.cu_seqlens


def stored(inputs: Inputs, impl: str) -> Tensor:
    """The pool afterwards."""
    args = store_args(inputs)
    store_latents(*args, impl=impl)
    return args[2]


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


def test_store_writes_what_attention_writes(impl: str) -> None:
    inputs = make_inputs(SMALL, padding=(2, 1))
    args = inputs.args()
    latent_attention(*args, scale=0.1, impl="torch")
    assert torch.equal(bits(stored(inputs, impl)), bits(args[4]))


def test_store_of_no_token(impl: str) -> None:
    inputs = make_inputs(replace(SMALL, lengths=((0, 4), (0, 0))), padding=(2, 0))
    assert torch.equal(bits(stored(inputs, impl)), bits(inputs.pool))


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


def test_schemas() -> None:
    ops = torch.ops.torch_hybrid
    schemas = f"{ops.store_latents.default._schema}\n{ops.gather_latents.default._schema}"
    assert_expected_inline(
        schemas.replace(", ", ",\n"),
        """\
torch_hybrid::store_latents(Tensor latent,
Tensor k_rope,
Tensor(a!) pool,
Tensor slot_mapping,
Tensor cu_seqlens,
*,
str impl,
Tensor? pool_scale=None) -> ()
torch_hybrid::gather_latents(Tensor pool,
Tensor rows,
*,
ScalarType? dtype=None,
str impl,
Tensor? pool_scale=None) -> Tensor""",
    )


def test_opcheck(impl: str) -> None:
    inputs = make_inputs(SMALL, unused=0.0)
    op = torch.ops.torch_hybrid.store_latents.default
    torch.library.opcheck(op, store_args(inputs), {"impl": impl})
    op = torch.ops.torch_hybrid.gather_latents.default
    torch.library.opcheck(op, (inputs.pool, inputs.slot_mapping), {"impl": impl})


def store_then_gather(impl: str) -> Callable[..., Tensor]:
    def step(*args: Tensor) -> Tensor:
        latent, k_rope, pool, slot_mapping, cu_seqlens = args
        store_latents(*args, impl=impl)
        before = gather_latents(pool, slot_mapping, impl=impl)
        store_latents(latent + 1, k_rope, pool, slot_mapping, cu_seqlens, impl=impl)
        return before + gather_latents(pool, slot_mapping, impl=impl)

    return step


def test_compiles_once(impl: str) -> None:
    # The first batch has no two equal sizes that are not tied to one another.
    first = ((1, 90), (9, 30), (1, 18), (1, 1), (2, 2), (4, 5))
    others = [((1, 23), (9, 30)), ((1, 9), (1, 7), (1, 8), (1, 2)), ((40, 40), (2, 3)) * 3]
    batches = [
        store_args(make_inputs(replace(SMALL, lengths=lengths))) for lengths in (first, *others)
    ]
    assert_traces_once(store_then_gather(impl), batches)


def test_order_survives_compilation(impl: str) -> None:
    inputs = make_inputs(SMALL)
    compiled = torch.compile(store_then_gather(impl), fullgraph=True, backend="aot_eager")
    expected = store_then_gather(impl)(*store_args(inputs))
    assert torch.equal(compiled(*store_args(inputs)), expected)


def test_no_pool_clone(impl: str) -> None:
    def layer(*args: Tensor) -> Tensor:
        store_latents(*args, impl=impl)
        return gather_latents(args[2], args[3], impl=impl) + 1

    args = store_args(make_inputs(SMALL))
    assert pool_clones(layer, args, [args[2]]) == []


def test_no_pool_clone_between_two_stores(impl: str) -> None:
    """Two halves of a batch on one pool: no clone as long as nodes keep their order.

    By default Inductor moves a gather behind a later store, which then costs a clone.
    """
    args = store_args(make_inputs(SMALL))
    with torch._inductor.config.patch(reorder_for_locality=False):
        assert pool_clones(store_then_gather(impl), args, [args[2]]) == []


def test_error_texts(impl: str) -> None:
    inputs = make_inputs(SMALL)
    pool, slots = inputs.pool, inputs.slot_mapping
    calls: list[Callable[[], object]] = [
        lambda: store_latents(inputs.latent[0], *store_args(inputs)[1:], impl=impl),
        lambda: stored(replace(inputs, k_rope=inputs.k_rope[1:]), impl),
        lambda: stored(replace(inputs, latent=inputs.latent.half()), impl),
        lambda: stored(replace(inputs, slot_mapping=slots + 10_000), impl),
        lambda: stored(replace(inputs, slot_mapping=slots * 0), impl),
        lambda: stored(replace(inputs, cu_seqlens=inputs.cu_seqlens + 1), impl),
        lambda: gather_latents(pool[0], slots, impl=impl),
        lambda: gather_latents(pool, slots.long(), impl=impl),
        lambda: gather_latents(pool, slots - 10_000, impl=impl),
        lambda: gather_latents(pool, slots * 0 + 3, impl=impl),
        lambda: gather_latents(pool, slots, impl="tpu"),
    ]
    errors = []
    for call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
            call()
        errors.append(str(error.value))
    assert_expected_inline(
        "\n".join(errors),
        """\
latent must have 2 dimensions, got 1
k_rope must have shape [11, 16], got [10, 16]
latent must have dtype torch.float32, got torch.float16
slot_mapping must be in [16, 144), got 10022
slot_mapping must be in [16, 144), got 0
cu_seqlens must end within [0, 11], got 12
pool must have 3 dimensions, got 2
rows must have dtype torch.int32, got torch.int64
rows must be in [16, 144), got -9978
rows must be in [16, 144), got 3
impl must be one of ['cpp', 'torch'], got 'tpu'""",
    )


def test_both_ops_have_the_same_implementations() -> None:
    assert list(STORE_IMPLEMENTATIONS) == list(GATHER_IMPLEMENTATIONS)
