"""The rounded form of delta rules on a GPU: what reaches a state is rounded to float16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget, written_slots
from tests.ops.delta_rule import gated as gdn_cases
from tests.ops.delta_rule import kimi as kda_cases
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.recurrent_triton import on_device
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.delta_rule import op
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

NAME = "chunk_triton_rounded"
# Of a state's largest number. On an H200 it was 4e-4 to 7e-4, and 5e-3 to 8e-3 with
# flash-linear-attention 0.6.0, whose kernels round to bfloat16.
BUDGET = 2**-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    implementations: Mapping[str, Implementation]
    reference: Callable[..., Tensor]
    cases: Mapping[str, Case]
    make_inputs: Callable[..., Inputs]

    all: ClassVar[dict[str, Family]] = {}

    def launch(self, inputs: Inputs, num_segments: int = 1, is_even: int = 0) -> Tensor:
        """Call the launcher, which the interpreter runs on a CPU too."""
        planned = [torch.tensor([num_segments, is_even])]
        return self.implementations[NAME].load()(replace(inputs, planned=planned))

    def check(self, inputs: Inputs, device: str, num_segments: int = 1) -> None:
        """Outputs are as exact as the reference's; states within BUDGET; all else is as it was."""
        exact, own, moved = inputs.exact(), inputs.copy(), on_device(inputs, device)
        expected = self.reference(exact)
        out_own = self.reference(own)
        out, state = self.launch(moved, num_segments).cpu(), moved.state.cpu()
        assert_within_budget(out, expected, out_own)
        slots = written_slots(inputs).long()
        error = (state[slots] - exact.state[slots]).abs().max()
        assert error <= BUDGET * exact.state[slots].abs().max()
        others = torch.ones(len(state), dtype=torch.bool)
        others[slots] = False
        torch.testing.assert_close(
            state[others], inputs.state[others], rtol=0, atol=0, equal_nan=True
        )


Family.all = {
    "gated_delta_rule": Family(
        implementations=op.GATED_IMPLEMENTATIONS,
        reference=delta_rule_reference,
        cases=gdn_cases.CASES,
        make_inputs=gdn_cases.make_inputs,
    ),
    "kimi_delta_attention": Family(
        implementations=op.KIMI_IMPLEMENTATIONS,
        reference=delta_rule_reference,
        cases=kda_cases.CASES,
        make_inputs=kda_cases.make_inputs,
    ),
}
EACH_FAMILY = pytest.mark.parametrize("family", Family.all.values(), ids=Family.all)


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "interpreted")


@needs_interpreter
@EACH_FAMILY
@pytest.mark.parametrize("name", ["one_token", "odd_dims"])
def test_it_is_within_its_budget_interpreted(family: Family, name: str):
    family.check(family.make_inputs(family.cases[name], torch.bfloat16), "cpu")


@needs_interpreter
@EACH_FAMILY
def test_numbers_far_from_one_interpreted(family: Family):
    """float16 ends at 65504; states and values do not."""
    inputs = family.make_inputs(family.cases["one_head"], torch.bfloat16)
    family.check(replace(inputs, v=inputs.v * 2.0**16, state=inputs.state * 2.0**16), "cpu")


def alike(inputs: Inputs) -> Inputs:
    """Keys of a repeated token, all written and none forgotten: powers of systems would grow."""
    k = inputs.k[:1].expand_as(inputs.k) + 2**-5 * inputs.k
    return replace(inputs, k=k, beta=inputs.beta / 16 + 0.9, g=inputs.g / 256)


@needs_interpreter
@EACH_FAMILY
def test_keys_that_are_alike_interpreted(family: Family):
    case = replace(family.cases["one_head"], lengths=(70,))
    family.check(alike(family.make_inputs(case, torch.bfloat16)), "cpu")


@needs_cuda
@EACH_FAMILY
def test_keys_that_are_alike_on_a_gpu(family: Family):
    for name in ("mixed", "qwen3_next" if "qwen3_next" in family.cases else "mixed"):
        family.check(alike(family.make_inputs(family.cases[name], torch.bfloat16)), "cuda")


@needs_cuda
@EACH_FAMILY
@pytest.mark.parametrize("num_segments", [1, 3])
def test_every_case_on_a_gpu(family: Family, num_segments: int):
    for case in family.cases.values():
        if case.k_dim <= 128:
            family.check(family.make_inputs(case, torch.bfloat16), "cuda", num_segments)


@needs_cuda
@EACH_FAMILY
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
def test_decays_on_a_gpu(family: Family, decay: float):
    inputs = family.make_inputs(family.cases["mixed"], torch.bfloat16)
    family.check(replace(inputs, g=torch.full_like(inputs.g, decay)), "cuda")


@needs_cuda
@EACH_FAMILY
def test_how_it_is_walked_shows_in_no_bit_on_a_gpu(family: Family):
    shape = {"num_k_heads": 32, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
    inputs = family.make_inputs(Case(lengths=(4096, 37, 900), **shape), torch.bfloat16)
    whole, slots = on_device(inputs, "cuda"), inputs.state_indices.long().cuda()
    out = family.launch(whole)
    for num_segments, is_even in ((4, 0), (1, 1), (3, 1)):
        other = on_device(inputs, "cuda")
        assert torch.equal(out, family.launch(other, num_segments, is_even))
        assert torch.equal(whole.state[slots], other.state[slots])


@needs_cuda
@EACH_FAMILY
@pytest.mark.parametrize("is_even", [0, 1])
def test_a_sequence_of_nans_is_alone_with_them_on_a_gpu(family: Family, is_even: int):
    """Chunks are fetched whole: what follows a sequence lies beside it."""
    shape = {"num_k_heads": 32, "num_v_heads": 32, "k_dim": 128, "v_dim": 128}
    inputs = family.make_inputs(Case(lengths=(70, 50, 64, 129), **shape), torch.bfloat16)
    broken = replace(inputs, **{name: getattr(inputs, name).clone() for name in "qkv"})
    for name in "qkv":
        getattr(broken, name)[70:120] = torch.nan
    own, other = on_device(inputs, "cuda"), on_device(broken, "cuda")
    out, out_other = family.launch(own, 1, is_even), family.launch(other, 1, is_even)
    kept = torch.arange(len(out)) < 70
    kept |= torch.arange(len(out)) >= 120
    assert torch.equal(out[kept.cuda()], out_other[kept.cuda()])
    slots = inputs.state_indices[[0, 2, 3]].long().cuda()
    assert torch.equal(own.state[slots], other.state[slots])


@EACH_FAMILY
def test_it_takes_bfloat16_alone(family: Family):
    capability = family.implementations[NAME].capability
    assert not capability.exact
    assert capability.dtypes == {torch.bfloat16}
