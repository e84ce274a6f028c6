"""What every registered op is held to, whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.ops.contract import clones_in, compile_afresh
from tests.ops.every_op import CALLS, call_of, impls_on_a_host, op_of, torch_form

# They return integers, or nothing.
WITHOUT_GRADIENTS = {
    "draw_tokens",
    "pooled_selection_step",
    "select_blocks",
    "state_copy",
    "store_latents",
}


@pytest.mark.parametrize("op", [op for op in CALLS if not op.endswith("_forward")])
def test_a_backward_names_the_op(op: str) -> None:
    call = call_of(op).changed()
    floats = [x for x in tree_leaves(call.given) if isinstance(x, Tensor) and x.is_floating_point()]
    pools = {id(pool) for pool in call.mutated()}
    for x in floats:
        x.requires_grad_(id(x) not in pools)
    results = tree_leaves(call.run(torch_form(op_of(op))))
    outs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    assert bool(outs) == (op not in WITHOUT_GRADIENTS)
    for out in outs:
        with pytest.raises(
            NotImplementedError,
            match=f"torch_hybrid::{op_of(op)} (is inference only|has no derivative)",
        ):
            out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("op", CALLS)
def test_inductor_gives_the_eager_result_and_clones_no_pool(op: str) -> None:
    """The second of two calls goes on from what the first has written in place."""
    call = call_of(op)
    impl = next(name for name, reason in impls_on_a_host(op).items() if not reason)
    given, own = call.changed(), call.changed()

    def step(given: dict[str, Any]) -> list[Tensor]:
        calls = [call.op(**{**given, "impl": impl}) for _ in range(2)]
        return [x for x in tree_leaves(calls) if x is not None]

    out, codes = compile_afresh(step, (dict(given.given),))
    expected = step(dict(own.given))
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(given.mutated(), own.mutated(), equal_nan=True)
    assert clones_in(codes, call.mutated()) == []
