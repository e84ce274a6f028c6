"""What every op family is held to, shared by the contract suites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from torch_hybrid.graphs.compiling.clone_check import PoolClone, find_pool_clones
from torch_hybrid.ops.core.capability import Implementation


def to_exact(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Independent float64 copies of floating tensors; copies of the others."""
    return tuple(
        None if t is None else t.double() if t.is_floating_point() else t.clone() for t in tensors
    )


class Stored(Protocol):
    """Inputs of an op that advances states in slots of a pool."""

    @property
    def cu_seqlens(self) -> Tensor: ...

    @property
    def state_indices(self) -> Tensor: ...


def written_slots(inputs: Stored) -> Tensor:
    """The slots that a call writes."""
    return inputs.state_indices[(inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal in every bit that counts: NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def rows_apart(x: Tensor) -> Tensor:
    """A copy of x [T, N] whose rows are parts of wider ones, NaN beside them."""
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]


def assert_within_budget(
    actual: Tensor, exact: Tensor, reference: Tensor, *, factor: int = 2
) -> None:
    """The error against float64 is at most twice the reference's own, plus one rounding.

    Args:
        actual: what the implementation gave.
        exact: the reference run in float64.
        reference: the reference run in the implementation's dtype.
        factor: instead of two, where a library sums and its order is not ours to choose.
    """
    assert actual.shape == exact.shape, f"shape {list(actual.shape)} != {list(exact.shape)}"
    assert actual.isfinite().all(), "the result is not finite"
    error = (actual.double() - exact).abs().max().item() if actual.numel() else 0.0
    allowed = (reference.double() - exact).abs().max().item() if actual.numel() else 0.0
    scale = exact.abs().max().item() if actual.numel() else 0.0
    budget = factor * allowed + torch.finfo(actual.dtype).eps * scale
    assert error <= budget, f"error {error:.3e} is over the budget {budget:.3e}"


def assert_draws_within_budget(
    draws: Sequence[tuple[Tensor, Tensor, Tensor]], *, factor: int = 2
) -> None:
    """The same of several draws of one case, as if they were one: in a single one the largest error
    of either may be far from what it is in others."""
    assert_within_budget(*map(torch.cat, zip(*draws, strict=True)), factor=factor)


def impls_on(
    device: str,
    implementations: Mapping[str, Implementation],
    features: frozenset[str] | None = None,
) -> list[str]:
    """The implementations that are made for a device, and for arguments that want some features: on
    another, and for others, there is nothing to skip."""
    return [
        name
        for name, i in implementations.items()
        if device in i.capability.devices
        and (features is None or not i.capability.features_refused(features))
    ]


def skip_reason(implementation: Implementation, device: str) -> str | None:
    """Why ``implementation`` cannot run on ``device`` here, or None when it can."""
    capability = implementation.capability
    if device not in capability.devices:
        return f"no {device} in {sorted(capability.devices)}"
    return capability.available()


def impl_fixture(
    implementations: Mapping[str, Implementation], features: frozenset[str] | None = None
) -> Callable[..., str]:
    """A fixture of the names of those for a CPU; one that cannot run here is skipped."""

    @pytest.fixture(params=impls_on("cpu", implementations, features))
    def impl(request: pytest.FixtureRequest) -> str:
        if reason := skip_reason(implementations[request.param], "cpu"):
            pytest.skip(reason)
        return str(request.param)

    return impl


def compile_afresh(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[str]]:
    """Compile ``fn(*args)`` afresh with Inductor, run it once, and return what it gives and its
    code."""
    from torch._inductor.utils import run_and_get_code

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch._dynamo.reset()
        return run_and_get_code(torch.compile(fn, fullgraph=True, dynamic=False), *args)


def pool_clones(
    fn: Callable[..., Any], args: Sequence[Any], pools: Collection[Tensor]
) -> list[PoolClone]:
    """Compile ``fn(*args)`` afresh with Inductor, run it once, and find its pool clones."""
    return clones_in(compile_afresh(fn, args)[1], pools)


def clones_in(codes: Sequence[str], pools: Collection[Tensor]) -> list[PoolClone]:
    """Find the clones of pools in compiled code."""
    sizes = {pool.numel() for pool in pools}
    return [clone for code in codes for clone in find_pool_clones(code, sizes)]
