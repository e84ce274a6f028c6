"""The chunk forms in Triton: in the interpreter, compiled for GPUs not there, and on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import needs_cuda
from tests.ops.delta_rule import gated, kimi
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.delta_rule.kernels import (
    Shape,
    check_many_chunks,
    check_walks,
    on_meta,
    scanned_in_one_form,
)
from tests.ops.recurrent_triton import check, check_captured
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.delta_rule import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.op import GATED_IMPLEMENTATIONS, KIMI_IMPLEMENTATIONS
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What differs between the rules.

    ``contract`` is what of it the interpreter can do in seconds; the whole of it:
    TRITON_INTERPRET=1 pytest tests/ops/delta_rule -k triton. ``shapes`` are (key heads, value
    heads, K, V, dtype) of 8192 tokens in 16 sequences.
    """

    name: str
    op: Callable[..., Tensor]
    implementations: Mapping[str, Implementation]
    cases: Mapping[str, Case]
    make_inputs: Callable[..., Inputs]
    num_k_heads: int  # of 4 value heads
    contract: str
    shapes: Mapping[str, tuple[int, int, int, int, torch.dtype]]
    may_spill: Mapping[str, int]

    def case(self, num_v_heads: int, **case: Any) -> Case:
        """Make a case of the rule's ratio of heads."""
        num_k_heads = num_v_heads * self.num_k_heads // 4
        return Case(num_k_heads=num_k_heads, num_v_heads=num_v_heads, **case)

    def call(self, inputs: Inputs, num_segments: int = 0) -> Tensor:
        """Call the op, which walks so many segments at once."""
        planned = [torch.tensor([num_segments, 0])] if num_segments else []
        options = {**inputs.options(), "planned": planned, "impl": "chunk_triton"}
        return self.op(*inputs.args(), **options)


RULES = (
    Rule(
        name="gated",
        op=gated_delta_rule,
        implementations=GATED_IMPLEMENTATIONS,
        cases=gated.CASES,
        make_inputs=gated.make_inputs,
        num_k_heads=2,
        contract="gated and chunk32-triton and (exact and (one_token or odd_dims) or "
        "exact and three_value_heads and fp32) or by_documentation",
        shapes={
            "Qwen3-Next": (16, 32, 128, 128, torch.bfloat16),
            "Qwen3-Next float32": (16, 32, 128, 128, torch.float32),
            "OLMo-hybrid": (30, 30, 96, 192, torch.bfloat16),
        },
        may_spill={"prepare": 32},  # on an H200 1.40x as fast
    ),
    Rule(
        name="kimi",
        op=kimi_delta_attention,
        implementations=KIMI_IMPLEMENTATIONS,
        cases=kimi.CASES,
        make_inputs=kimi.make_inputs,
        num_k_heads=4,
        contract="kimi and chunk32-triton and (exact and (one_token or odd_dims) or "
        "exact and one_head and fp32)",
        shapes={
            "Kimi-Linear": (32, 32, 128, 128, torch.bfloat16),
            "Kimi-Linear float32": (32, 32, 128, 128, torch.float32),
        },
        # Outside its loops, for chunks of strong decays; with fewer registers it was slower.
        may_spill={"prepare": 24, "prepare: Kimi-Linear, rounded": 64},
    ),
)
ROUNDED = "chunk_triton_rounded"
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])


@needs_triton
@EACH_RULE
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None], rule: Rule
):
    interpreter.run(record_property, Path(__file__).parent, rule.contract)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kimis_gentle_decays_beside_strong_ones_in_interpreter(dtype: torch.dtype):
    """Pairs of rows meet in one way where all decays of a slice are gentle, else in another."""
    inputs = kimi.make_inputs(kimi.case(34, num_heads=1, k_dim=32), dtype)
    gentle = inputs.g[:, :, :16].clamp(min=-0.5)
    inputs = replace(inputs, g=torch.cat([gentle, inputs.g[:, :, 16:] * 20], -1))
    check(RULES[1].call, delta_rule_reference, inputs, "cpu")


@needs_interpreter
@EACH_RULE
@pytest.mark.parametrize("lengths", [(40, 0, 5), (9, 9, 9)], ids=["uneven", "even"])
def test_segments_in_interpreter(
    rule: Rule, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """Three segments end inside sequences; of two launches one walks, by lengths on the device."""
    from torch_hybrid.ops.delta_rule import _triton_scan as delta_scan
    from torch_hybrid.ops.delta_rule import _triton_scan_kernel
    from torch_hybrid.ops.delta_rule._triton_scan import EVEN, UNEVEN, ScanConfig

    forms = (
        ScanConfig(block_v=16, num_warps=4, steps=UNEVEN.value),
        ScanConfig(block_v=32, num_warps=8, steps=EVEN.value),
    )
    monkeypatch.setattr(delta_scan, "_ALONE", 2)
    monkeypatch.setattr(_triton_scan_kernel, "scan_configs", lambda *args, **options: forms)
    shape = {"num_k_heads": 1, "num_v_heads": 1, "k_dim": 16, "v_dim": 32}
    case = Case(lengths=lengths, num_padding_tokens=2, **shape)
    inputs = rule.make_inputs(case, torch.bfloat16)
    check(partial(rule.call, num_segments=3), delta_rule_reference, inputs, "cpu")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "case"),
    [pytest.param(r, case, id=f"{r.name}-{name}") for r in RULES for name, case in r.cases.items()],
)
def test_on_a_gpu(rule: Rule, case: Case, dtype: torch.dtype):
    check(rule.call, delta_rule_reference, rule.make_inputs(case, dtype))


@needs_cuda
@EACH_RULE
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
def test_decays_on_a_gpu(rule: Rule, decay: float):
    inputs = rule.make_inputs(rule.case(4, lengths=(130, 17)), torch.bfloat16)
    inputs.g.fill_(decay)
    check(rule.call, delta_rule_reference, inputs)


@needs_cuda
@EACH_RULE
def test_a_captured_graph_serves_other_lengths(rule: Rule):
    """Three sequences of a bucket of 200 tokens, replayed with other lengths and slots."""
    shape = {"k_dim": 32, "v_dim": 32}
    first = rule.case(4, lengths=(1, 100, 1), num_padding_tokens=98, **shape)
    others = [
        replace(first, lengths=lengths, num_padding_tokens=200 - sum(lengths))
        for lengths in [(150, 0, 49), (64, 65, 63)]
    ]
    first, *others = (
        rule.make_inputs(case, torch.bfloat16, seed) for seed, case in enumerate([first, *others])
    )
    check_captured(rule.call, delta_rule_reference, first, others)


@needs_cuda
@EACH_RULE
@pytest.mark.parametrize("lengths", [(4096,), (4000, 4096), (900,) * 9, (8000, *[0] * 8)], ids=str)
def test_many_chunks_on_a_gpu(rule: Rule, lengths: tuple[int, ...]):
    """In segments; rows of V of a program for sequences that are alike, and for one alone."""
    case = rule.case(32, lengths=lengths, k_dim=128, v_dim=128)
    check_many_chunks(rule.op, rule.make_inputs(case, torch.bfloat16))


@needs_cuda
@EACH_RULE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_it_is_walked_shows_in_no_bit(rule: Rule, dtype: torch.dtype):
    case = rule.case(32, lengths=(4096, 37, 900), k_dim=128, v_dim=128)
    check_walks(rule.op, rule.make_inputs(case, dtype))


@needs_cross_compiler
@EACH_RULE
def test_room_for_sequences_adds_factors_of_chunks_alone(rule: Rule) -> None:
    few, many = (allocated_by(rule, num_seqs) for num_seqs in (8, 1024))
    assert many - few <= 1016 * 32 * 4 * (4 * 64 + 16 * 64)


def allocated_by(rule: Rule, num_seqs: int) -> int:
    """Count the bytes that a call allocates."""
    size = {"num_seqs": num_seqs, "num_tokens": 8192, "k_dim": 128, "v_dim": 128}
    heads = {"num_k_heads": 32, "num_v_heads": 32, "channels": rule.name == "kimi"}
    x = on_meta(Shape(**size, **heads, dtype=torch.bfloat16))
    run = rule.implementations["chunk_triton"].load()
    with launches_on("sm_90"), Allocated() as allocated:
        run(x)
    return allocated.num_bytes


class Allocated(TorchDispatchMode):
    """Bytes of tensors that are made empty."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        out = op(*args, **(options or {}))
        if "empty" in op.name():
            self.num_bytes += out.numel() * out.element_size()
        return out


@needs_cross_compiler
@EACH_RULE
def test_compiles_without_spills(rule: Rule) -> None:
    rows = [
        resources_of(launch, target, label)
        for label, shape in rule.shapes.items()
        for target in SHARED_LIMITS
        for launch in record_launches(rule, target, *shape).values()
    ]
    for label, shape in rule.shapes.items():
        scans = record_launches(rule, "sm_90", *shape, form=1)
        scans.pop("_prepare_kernel")
        rows += [resources_of(scan, "sm_90", f"{label}, even") for scan in scans.values()]
        if shape[-1] == torch.bfloat16:
            rounded = record_launches(rule, "sm_90", *shape, impl=ROUNDED).values()
            rows += [resources_of(each, "sm_90", f"{label}, rounded") for each in rounded]
    if rule.name == "gated":
        shape = rule.shapes["Qwen3-Next"]
        one = record_launches(rule, "sm_90", *shape, impl=ROUNDED, planned=(1, 0))
        rows.append(resources_of(one["hopper_scan_kernel"], "sm_90", "Qwen3-Next, rounded, one"))
    table = Path(__file__).with_name(f"resources_{rule.name}_chunk.txt")
    assert_all_fit(rows, table, may_spill=rule.may_spill)
    for row in rows:
        assert (row.products == "-") == ("float32" in row.kernel), row


def record_launches(
    rule: Rule,
    target: str,
    num_k_heads: int,
    num_v_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    *,
    form: int = 0,
    impl: str = "chunk_triton",
    planned: tuple[int, ...] = (),
) -> dict[str, Launch]:
    """What the launcher launches for q, k and v that are slices of one projection."""
    shape = Shape(
        num_seqs=16,
        num_tokens=8192,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype=dtype,
        channels=rule.name == "kimi",
    )
    x = replace(on_meta(shape), planned=[torch.tensor(planned)] if planned else [])
    from torch_hybrid.ops.delta_rule import _triton_scan_kernel

    with launches_on(target) as launches, scanned_in_one_form(_triton_scan_kernel, form):
        rule.implementations[impl].load()(x)
    return launches
