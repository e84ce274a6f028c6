"""What every registered op is held to, whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.contract import pool_clones
from tests.ops.every_op import CALLS, call_of, impls_on_a_host


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
