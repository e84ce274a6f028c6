"""Backward of the gated rule in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.devices import needs_cuda
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.delta_rule.training import gated_delta_rule_backward
from torch_hybrid.ops.delta_rule.training.op import GatedDeltaRuleBackward

LENGTHS = (33, 0, 1, 46)
# The kernel of all inputs holds three sums [C, K]; 549 us of 1x8192 on an H200, and 716 in parts.
MAY_SPILL = {"gradients": 16, "inputs": 288}


def make_backward(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: tuple[int, int] = (1, 3),
    dims: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    qk_l2norm: bool = False,
    num_padding_tokens: int = 7,
) -> GatedDeltaRuleBackward:
    """Make the arguments of a backward, of unit keys and of states at both ends."""
    (H, HV), (K, V), N = heads, dims, len(lengths)
    T = sum(lengths) + num_padding_tokens
    rows = (
        normalize(torch.randn(T, H, K), dim=-1),
        normalize(torch.randn(T, H, K), dim=-1),
        torch.randn(T, HV, V),
    )
    x = GatedDeltaRuleBackward(
        *(each.to(dtype) for each in rows),
        -torch.rand(T, HV),
        torch.rand(T, HV),
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        torch.randn(N, HV, V, K),
        dout=torch.randn(T, HV, V).to(dtype),
        dfinal_state=torch.randn(N, HV, V, K),
        scale=K**-0.5,
        qk_l2norm=qk_l2norm,
        impl="triton",
    )
    return moved(x, device)


def moved(x: GatedDeltaRuleBackward, device: str) -> GatedDeltaRuleBackward:
    """Move all tensors of the arguments to a device."""
    given = {name: getattr(x, name) for name in x.__dataclass_fields__}
    return GatedDeltaRuleBackward(
        **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    )


def gradients(x: GatedDeltaRuleBackward, impl: str = "triton") -> tuple[Tensor, ...]:
    """Call the op."""
    given = {name: getattr(x, name) for name in x.__dataclass_fields__}
    grads: tuple[Tensor, ...] = gated_delta_rule_backward(**{**given, "impl": impl})
    return grads


def check(x: GatedDeltaRuleBackward, tolerance: float) -> None:
    """Compare with the oracle in float64, by the norms of all gradients."""
    wide = moved(x, "cpu")
    for name in ("q", "k", "v", "g", "beta", "initial_state", "dout", "dfinal_state"):
        setattr(wide, name, getattr(wide, name).double())
    for got, exact in zip(gradients(x), gradients(wide, "torch"), strict=True):
        off = (got.cpu().double() - exact).norm() / exact.norm()
        assert off < tolerance, off
    for got in gradients(x)[:5]:
        assert not got[sum(LENGTHS) :].any() or len(got) == sum(LENGTHS)


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_gradients_in_interpreter(qk_l2norm: bool):
    check(make_backward(qk_l2norm=qk_l2norm), 1e-6)


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    check(make_backward(dtype=torch.bfloat16), 2e-2)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (256, 256)], ids=str)
def test_on_a_gpu(dims: tuple[int, int], dtype: torch.dtype, tolerance: float):
    x = make_backward(heads=(2, 4), dims=dims, dtype=dtype, device="cuda")
    check(x, tolerance)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
def test_packed_is_single_on_a_gpu():
    lengths = (70, 300, 64)
    x = make_backward(
        lengths, heads=(2, 4), dims=(128, 128), dtype=torch.bfloat16, device="cuda",
        num_padding_tokens=0,
    )  # fmt: skip
    packed = gradients(x)
    for n, (begin, end) in enumerate(pairwise(x.cu_seqlens.tolist())):
        given = {name: getattr(x, name) for name in x.__dataclass_fields__}
        for name in ("q", "k", "v", "g", "beta", "dout"):
            given[name] = given[name][begin:end]
        for name in ("initial_state", "dfinal_state"):
            given[name] = given[name][n : n + 1]
        given["cu_seqlens"] = x.cu_seqlens.new_tensor([0, end - begin])
        alone = gradients(GatedDeltaRuleBackward(**given))
        assert all(torch.equal(a, b[begin:end]) for a, b in zip(alone[:5], packed, strict=False))
        assert torch.equal(alone[5], packed[5][n : n + 1])


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.delta_rule.training import _triton_gated

    rows = []
    for label, lengths in {"Qwen3-Next": (8192,), "eight of them": (1024,) * 8}.items():
        x = make_backward(
            lengths, heads=(16, 32), dims=(128, 128), dtype=torch.bfloat16, num_padding_tokens=0
        )
        for target in ("sm_80", "sm_90"):  # Triton 3.7.1 fails to compile it for sm_100
            with launches_on(target) as launches:
                _triton_gated.gated_delta_rule_backward(moved(x, "meta"))
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    table = Path(__file__).with_name("resources_gated_backward.txt")
    assert_all_fit(rows, table, may_spill=MAY_SPILL)
