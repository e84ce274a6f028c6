"""What every registered op is held to, whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.ops.contract import pool_clones
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
@pytest.mark.parametrize("op", [op for op in CALLS if call_of(op).mutated()])
def test_two_calls_clone_no_pool(op: str) -> None:
    """Inductor writes in place what a schema says is written."""
    call = call_of(op)
    impl = next(name for name, reason in impls_on_a_host(op).items() if not reason)

    def step(given: dict[str, Any]) -> object:
        return call.op(**given, impl=impl), call.op(**given, impl=impl)

    given = {name: value for name, value in call.given.items() if name != "impl"}
    assert pool_clones(step, (given,), call.mutated()) == []
