"""FlashInfer's decode: the translation without a GPU, the call as it is, and both on one."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops import flashinfer_one_token
from tests.ops.contract import written_slots
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.delta_rule.gated import make_inputs
from tests.ops.delta_rule.kernels import on_device, tensor_fields
from tests.ops.flashinfer_one_token import check_translated, held, tensors_of
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.core.planning import Planned
from torch_hybrid.ops.delta_rule import recurrent_gated_delta_rule
from torch_hybrid.ops.delta_rule.op import RECURRENT_IMPLEMENTATIONS
from torch_hybrid.ops.delta_rule.reference import gated_delta_rule_reference
from torch_hybrid.ops.flashinfer.one_token import APART, IN_PLACE

IMPLEMENTATION = RECURRENT_IMPLEMENTATIONS["flashinfer"]
SHAPE = {"k_dim": 128, "v_dim": 128}
STEP = Case(lengths=(1, 1, 1, 0, 0), num_padding_tokens=2, **SHAPE)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """FlashInfer's function by its documentation: one token of each sequence, states in a pool;
    a sequence whose slot is -1 is passed over, and its output is 0."""
    assert state is None
    assert backend == "flashinfer"
    assert all(x.shape[1] == 1 for x in (q, k, v, a, b, output))
    assert all(x.data_ptr() % 16 == 0 for x in (q, k, v, output, initial_state))
    assert all(x.data_ptr() % 16 == 0 for x in (initial_state_indices, output_state_indices))
    g = -A_log.exp() * F.softplus(a + dt_bias)
    output.zero_()
    slots = zip(initial_state_indices.tolist(), output_state_indices.tolist(), strict=True)
    for n, (read, written) in enumerate(slots):
        if read < 0:
            continue
        own = initial_state[read][None].repeat(2, 1, 1, 1)  # a null slot before it
        one = torch.ones(1, dtype=torch.int32)
        output[n] = gated_delta_rule_reference(
            *(q[n], k[n], v[n], g[n], b[n].sigmoid(), own, torch.arange(2).int(), one, one),
            scale=scale,
            qk_l2norm=use_qk_l2norm,
        )
        initial_state[max(written, 0)] = own[1]
    return output, initial_state


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.gdn_decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.gdn_decode"].gated_delta_rule_decode_pretranspose = decode


def plan_for(inputs: Inputs) -> Planned:
    return flashinfer_one_token.plan_for(
        IMPLEMENTATION, inputs, head_k_dim=128, num_v_heads=inputs.v.shape[1]
    )


def given(inputs: Inputs, device: str = "cpu") -> list[Tensor]:
    return tensors_of(plan_for(inputs), device)


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("qk_l2norm", [True, False], ids=["unit", "as they are"])
@pytest.mark.parametrize("place", [IN_PLACE, APART], ids=["in place", "apart"])
def test_translated_by_documentation(place: int, qk_l2norm: bool):
    """Outputs, written slots, rows of padding and all else; decays and betas at their ends."""
    inputs = make_inputs(STEP, torch.float16)
    inputs.g[0] = torch.tensor([0.0, -1e-6, -100.0, -torch.inf])
    inputs.beta[1] = torch.tensor([0.0, 1.0, 0.5, 1e-6])
    inputs = replace(inputs, qk_l2norm=qk_l2norm)
    if place == IN_PLACE:
        inputs = held(inputs)
    else:
        inputs.state_indices[2] = 0  # its state is not kept
    assert plan_for(inputs).values == (place,)
    ours, expected = inputs.copy(), inputs.copy()
    out = IMPLEMENTATION.load()(*ours.args(), **ours.options(), planned=given(inputs))
    exact = gated_delta_rule_reference(*expected.args(), **expected.options())
    check_translated(out, ours.state, inputs, exact, expected)


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    theirs = parameters_of("gdn_decode.py", "gated_delta_rule_decode_pretranspose")
    assert theirs == list(inspect.signature(decode).parameters)


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        ({"head_k_dim": 64}, torch.bfloat16, "head_k_dim 64 is not one of [128]"),
        ({"head_v_dim": 256}, torch.bfloat16, "head_v_dim 256 is not one of [128]"),
        ({"max_beta": 2}, torch.bfloat16, "max_beta 2 is over the limit 1"),
        ({}, torch.float16, "dtype torch.float16 is not in"),
    ],
)
def test_what_it_cannot_serve_is_refused(sizes: dict[str, int], dtype: torch.dtype, message: str):
    need = Need(device=torch.device("cuda"), dtype=dtype, sizes=sizes)
    reasons = IMPLEMENTATION.capability.why_not(need)
    assert any(message in reason for reason in reasons), reasons


@needs_cross_compiler
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """What translates, at Qwen3-Next's heads; what moves states is the chunk form's too."""
    for name in ("flashinfer", "flashinfer.gdn_decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = {"gated_delta_rule_decode_pretranspose": lambda *_, **__: None}
    vars(sys.modules["flashinfer.gdn_decode"]).update(stand_in)
    with launches_on("sm_90") as launches, torch.device("meta"):
        q, k, v = (torch.empty(64, heads, 128, dtype=torch.bfloat16) for heads in (16, 16, 32))
        g, beta = torch.empty(2, 64, 32)
        state, slots = torch.empty(65, 32, 128, 128), torch.empty(64, dtype=torch.int32)
        cu_seqlens = torch.empty(65, dtype=torch.int32)
        planned = [slots, torch.tensor([IN_PLACE], device="cpu")]
        IMPLEMENTATION.load()(
            *(q, k, v, g, beta, state, cu_seqlens, slots, slots),
            scale=1.0,
            qk_l2norm=True,
            planned=planned,
        )
    rows = [resources_of(launch, "sm_90", "Qwen3-Next") for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_flashinfer_decode.txt"))


def assert_good_to_bfloat16(inputs: Inputs, out: Tensor, state: Tensor) -> None:
    """Outputs within a rounding, written slots to float32's approximations; all else as it was."""
    exact, written = inputs.exact(), written_slots(inputs).long()
    expected = gated_delta_rule_reference(*exact.args(), **exact.options())
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(state[written].double(), exact.state[written], rtol=1e-4, atol=1e-4)
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
    state[written] = inputs.state[written]
    assert torch.equal(state.nan_to_num(), inputs.state.nan_to_num())


def call(inputs: Inputs, planned: list[Tensor]) -> Tensor:
    return recurrent_gated_delta_rule(
        *inputs.args(), **inputs.options(), planned=planned, impl="flashinfer"
    )


HEADS = {"num_k_heads": 16, "num_v_heads": 32, **SHAPE}
ON_A_GPU = {
    "few heads": STEP,
    "one": Case(lengths=(1,), **HEADS),
    "many": Case(lengths=(1,) * 37 + (0,) * 3, num_padding_tokens=3, **HEADS),
}


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("place", [IN_PLACE, APART], ids=["in place", "apart"])
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu(case: Case, place: int):
    inputs = make_inputs(case, torch.bfloat16)
    if place == IN_PLACE:
        inputs = held(inputs)
    else:
        inputs.state_indices[0] = 0
    assert plan_for(inputs).values == (place,)
    moved = on_device(inputs, "cuda")
    out = call(moved, given(inputs, "cuda"))
    assert_good_to_bfloat16(inputs, out.cpu(), moved.state.cpu())


@needs_cuda
@needs_flashinfer
def test_a_captured_graph_serves_other_steps():
    """A bucket of six, replayed with fewer sequences and in other slots."""
    case = Case(lengths=(1,) * 6, **HEADS)
    inputs = held(make_inputs(case, torch.bfloat16))
    captured, planned = on_device(inputs, "cuda"), given(inputs, "cuda")
    call(captured, planned)  # compiles the kernel, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, planned)
    for seed, num_live in enumerate((6, 4, 1), 1):
        lengths = (1,) * num_live + (0,) * (6 - num_live)
        shorter = replace(case, lengths=lengths, num_padding_tokens=6 - num_live)
        other = held(make_inputs(shorter, torch.bfloat16, seed))
        for field in tensor_fields(captured):
            getattr(captured, field).copy_(getattr(other, field))
        for into, tensor in zip(planned, given(other), strict=True):
            into.copy_(tensor)
        graph.replay()
        assert_good_to_bfloat16(other, out.cpu(), captured.state.cpu())
