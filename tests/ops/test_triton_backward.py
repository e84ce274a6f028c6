"""Backwards of recurrences in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule.backward import make_backward as make_delta_rule
from tests.ops.packed_backward import check, check_single, gradients, make_channels, moved
from tests.ops.selective_scan.backward import make_backward as make_scan
from tests.ops.ssd.backward import make_backward as make_ssd
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.declare import Op
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule

BF16 = {"dtype": torch.bfloat16}
Given = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """What the tests of a backward are told: arguments of ``make``, some by name.

    Attributes:
        make: makes the arguments of a call.
        interpreted: in float32, in the interpreter; some name a tolerance of their own.
        tolerance: of gradients in float32, by their norms.
        rounded: in bfloat16 in the interpreter, which rounds towards 0: that doubles what a GPU's
            rounding costs.
        rounded_tolerance: of those.
        single: packed sequences that must have the bits of each alone, in the interpreter.
        on_a_gpu: in float32 and bfloat16 on a GPU.
        gpu_tolerance: of gradients in float32 there.
        single_on_a_gpu: as ``single``.
        models: published sizes, at which it is compiled.
        targets: what for.
        may_spill: bytes, where that was measured to be faster on an H200.
        table: holds what the kernels take, where that is not beside ``make``.
        setting: in which the interpreter runs.
        launch: launches what is compiled, where that is not the implementation alone.
    """

    make: Callable[..., Op]
    interpreted: Sequence[Given]
    on_a_gpu: Sequence[Given]
    single_on_a_gpu: Given
    models: Mapping[str, Given]
    tolerance: float = 1e-6
    rounded: Given = field(default_factory=dict)
    rounded_tolerance: float = 2e-2
    single: Given | None = None
    gpu_tolerance: float = 2e-6
    targets: Sequence[str] = tuple(SHARED_LIMITS)
    may_spill: Mapping[str, int] = field(default_factory=dict)
    table: str = ""
    setting: Callable[[], AbstractContextManager[object]] = nullcontext
    launch: Callable[[Any], object] | None = None


def short_segments() -> AbstractContextManager[object]:
    """Scan in segments of 16 tokens."""
    from torch_hybrid.ops.selective_scan import _triton

    return mock.patch.object(_triton, "_SEGMENT", 32)  # 16 of so few channels


def launch_gated(x: TrainedDeltaRule) -> None:
    """Launch each kernel of unit rows, which both q and k are given to, once."""
    from torch_hybrid.ops.delta_rule.training import _triton_gated, _triton_unit_rows
    from torch_hybrid.ops.delta_rule.training._triton_unit_rows import UnitRows

    def unit_rows(x: TrainedDeltaRule) -> UnitRows:
        factors = x.q.new_empty(x.q.shape[:2], dtype=torch.float32)
        return UnitRows(x.q, x.k, factors, factors)

    with (
        mock.patch.object(_triton_gated, "unit_rows", unit_rows),
        mock.patch.object(UnitRows, "unnormalise"),
    ):
        _triton_gated.gated_delta_rule_backward(x)
    unit, factors = _triton_unit_rows.normalise(x.q)
    _triton_unit_rows.unnormalise(unit, unit, factors)


PACKED = {"lengths": (70, 300, 64)}
UNLIKE = {"lengths": (300, 0, 70)}
FROM_STATES_OR_NOT = ({"has_states": True}, {"has_states": False})
WIDE = {"dims": (128, 128)}
DIMS = ((128, 128), (64, 96), (256, 256))
# States stand where no other does, however sequences lie to multiples of a chunk.
SHORT = {"lengths": (1, 1, 33, 0, 1, 64, 1, 1), "heads": (1, 1), "dims": (16, 16)}
FAMILIES = {
    "rg_lru": Family(
        make=partial(make_channels, "rg_lru", num_heads=3, head_dim=7),
        interpreted=(*FROM_STATES_OR_NOT, {"lengths": (), "num_padding_tokens": 3}),
        rounded_tolerance=1e-2,
        single={"lengths": (70, 1, 200)},
        on_a_gpu=[
            {"lengths": (300, 0, 70, 2000), "head_dim": 256, **s} for s in FROM_STATES_OR_NOT
        ],
        single_on_a_gpu={"lengths": (70, 300)},
        models={
            "RecurrentGemma-2B": {"num_heads": 10, "head_dim": 256, "has_states": False, **BF16},
            "RecurrentGemma-2B from states": {"num_heads": 10, "head_dim": 256},
        },
    ),
    # An exponent near 8 loses half of 1e-6 of a decay at each token, in any walk: C++ is 8e-6 off.
    "wkv": Family(
        make=partial(make_channels, "wkv", num_channels=21),
        interpreted=(
            *FROM_STATES_OR_NOT,
            {"lengths": (), "num_padding_tokens": 3, "tolerance": 1e-6},
        ),
        tolerance=2e-5,
        rounded_tolerance=1e-2,
        single={"lengths": (70, 1, 200)},
        on_a_gpu=[
            {"lengths": (300, 0, 70, 2000), "num_channels": 300, **s} for s in FROM_STATES_OR_NOT
        ],
        gpu_tolerance=2e-5,
        single_on_a_gpu={"lengths": (70, 300)},
        models={
            "RWKV-4-7B": {"num_channels": 4096, "has_states": False, **BF16},
            "RWKV-4-7B from states": {"num_channels": 4096},
        },
    ),
    "selective_scan": Family(
        make=make_scan,
        interpreted=({"is_whole": True}, {"is_whole": False}),
        rounded={"lengths": (20, 3)},
        single={"lengths": (33, 2, 16)},
        on_a_gpu=[{**UNLIKE, "sizes": s} for s in ((1, 4096, 16), (2, 38, 12), (1, 70, 40))],
        single_on_a_gpu=PACKED,
        models={
            "Falcon-Mamba": {"sizes": (1, 8192, 16), **BF16},
            "Mamba 130M": {"sizes": (1, 1536, 16), **BF16},
        },
        targets=("sm_80", "sm_90"),
        setting=short_segments,
    ),
    "ssd": Family(
        make=make_ssd,
        interpreted=({}, {"is_mamba2": False}, {"has_skip": False}),
        single={"lengths": (33, 2)},
        on_a_gpu=[{**UNLIKE, "dims": dims} for dims in ((128, 64), (24, 12), (256, 64))],
        single_on_a_gpu=PACKED,
        models={
            "Nemotron-H": {"heads": (8, 96), "dims": (128, 80), **BF16},
            "Falcon-H1": {"heads": (1, 24), "dims": (256, 64), **BF16},
            "xLSTM": {"heads": (8, 8), "dims": (256, 528), **BF16},
        },
        targets=("sm_80", "sm_90"),
        # 64 rows a chunk, four warps for values, walks of whole heads of 80. Falcon-H1's and
        # xLSTM's were timed in this form alone.
        may_spill={
            "states: Nemotron-H": 8,
            "values: Nemotron-H": 32,
            "keys: Falcon-H1": 64,
            "keys: xLSTM": 64,
            "values: xLSTM": 232,
        },
    ),
    "gated_delta_rule": Family(
        make=make_delta_rule,
        interpreted=({}, {"qk_l2norm": True}, SHORT),
        on_a_gpu=[{"heads": (2, 4), "dims": dims} for dims in DIMS],
        single_on_a_gpu={**PACKED, **WIDE, "heads": (2, 4)},
        models={
            "Qwen3-Next": {"heads": (16, 32), **WIDE, **BF16},
            "eight of them": {"heads": (16, 32), **WIDE, **BF16, "lengths": (1024,) * 8},
        },
        targets=("sm_80", "sm_90"),  # Triton 3.7.1 fails to compile it for sm_100
        # The kernels of all inputs hold three sums [C, K]: 526 us of 1x8192 on an H200 and 716 in
        # parts, or 267 in Gluon, where one that spilled more took 285. The first has 168 registers,
        # for three programs on an SM.
        may_spill={"systems": 8, "gradients": 16, "inputs": 296, "hopper_inputs": 152},
        table="delta_rule/resources_gated_backward.txt",
        launch=launch_gated,
    ),
    "kimi_delta_attention": Family(
        make=partial(make_delta_rule, by_channel=True),
        # Decays of 16 tokens are e^-640 at most: no factor may overflow.
        interpreted=(
            {"heads": (1, 1), "dims": (40, 24), "qk_l2norm": True},
            {"heads": (1, 1), "dims": (40, 24), "qk_l2norm": True, "most": 40.0},
            SHORT,
        ),
        rounded={"lengths": (70, 0, 1, 65), "heads": (1, 1), "has_states": False},
        on_a_gpu=[
            {"heads": (2, 2), "dims": dims, "most": most} for dims in DIMS for most in (1.0, 40.0)
        ],
        single_on_a_gpu={**PACKED, **WIDE, "heads": (2, 2)},
        models={
            "Kimi-Linear": {"heads": (32, 32), **WIDE, **BF16},
            "eight of them": {"heads": (32, 32), **WIDE, **BF16, "lengths": (1024,) * 8},
        },
        # Four warps with sums [C, 32] in registers take 1514 us of 1x8192 on an H200, eight 2690.
        # The systems have 168 registers, for three programs on an SM.
        may_spill={"systems": 48, "inputs": 40},
        table="delta_rule/resources_kimi_backward.txt",
    ),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


@needs_triton
@each_family
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None], name: str
) -> None:
    interpreter.run(record_property, Path(__file__), f"interpreted and {name}")


def each(cases: Callable[[Family], Sequence[Given]]) -> Any:
    """Run a test of each case of each family."""
    found = [
        pytest.param(family, case, id=f"{name}-{n}")
        for name, family in FAMILIES.items()
        for n, case in enumerate(cases(family))
    ]
    return pytest.mark.parametrize(("family", "case"), found)


@needs_interpreter
@each(lambda family: family.interpreted)
def test_gradients_interpreted(family: Family, case: Given) -> None:
    case = {"tolerance": family.tolerance, **case}
    tolerance = case.pop("tolerance")
    with family.setting():
        check(family.make(**case), tolerance)


@needs_interpreter
@each(lambda family: [family.rounded])
def test_bfloat16_interpreted(family: Family, case: Given) -> None:
    with family.setting():
        check(family.make(**case, **BF16), family.rounded_tolerance)


@needs_interpreter
@each(lambda family: [] if family.single is None else [family.single])
def test_packed_is_single_interpreted(family: Family, case: Given) -> None:
    with family.setting():
        check_single(family.make(**case, num_padding_tokens=0))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each(lambda family: family.on_a_gpu)
def test_on_a_gpu(family: Family, case: Given, dtype: torch.dtype) -> None:
    x = family.make(**case, dtype=dtype, device="cuda")
    check(x, family.gpu_tolerance if dtype == torch.float32 else 8e-3)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each(lambda family: [family.single_on_a_gpu])
def test_packed_is_single_on_a_gpu(family: Family, case: Given, dtype: torch.dtype) -> None:
    check_single(family.make(**case, dtype=dtype, device="cuda", num_padding_tokens=0))


@needs_cross_compiler
@each_family
def test_compiles_without_spills(name: str) -> None:
    family, rows = FAMILIES[name], []
    launch = family.launch or REGISTERED[f"{name}_backward"]["triton"].load()
    for label, model in family.models.items():
        x = moved(family.make(**{"lengths": (8192,), **model}, num_padding_tokens=0), "meta")
        for target in family.targets:
            with launches_on(target) as launches:
                launch(x)
            rows += [resources_of(each, target, label) for each in launches.values()]
    table = Path(__file__).parent / (family.table or f"{name}/resources_backward.txt")
    assert_all_fit(rows, table, may_spill=family.may_spill)
