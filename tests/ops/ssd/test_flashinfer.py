"""FlashInfer's decode: the translation without a GPU, the call as it is, and both on one."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops import flashinfer_one_token
from tests.ops.contract import written_slots
from tests.ops.flashinfer_one_token import check_translated, held, tensors_of
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.ssd.cases import Case, Inputs, make_inputs
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import needs_interpreter
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.core.planning import Planned
from torch_hybrid.ops.flashinfer.one_token import APART, IN_PLACE
from torch_hybrid.ops.ssd import recurrent_ssd
from torch_hybrid.ops.ssd.op import RECURRENT_IMPLEMENTATIONS
from torch_hybrid.ops.ssd.reference import ssd_reference

IMPLEMENTATION = RECURRENT_IMPLEMENTATIONS["flashinfer"]
STEP = {"lengths": (1, 1, 1, 0, 0), "num_padding_tokens": 2}
CASES = {
    "mamba2": Case(k_dim=128, v_dim=64, **STEP),
    "lightning": Case(num_groups=2, num_heads=2, k_dim=128, v_dim=128, lightning=True, **STEP),
}


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """FlashInfer's function by its documentation and its checks: one token of each sequence; one
    whose slot is the padding's starts from zeros, and is not written."""
    num_heads, v_dim = x.shape[1:]
    assert len(state) >= len(x)
    # Multiples of 128 bytes on a GPU; memory of a CPU begins at those of 64.
    assert all(y.stride(-1) == 1 and y.data_ptr() % 64 == 0 for y in (x, B, C))
    assert x.stride(1) == v_dim
    assert B.stride(1) == C.stride(1) == state.shape[3]
    assert dt.stride()[1:] == (1, 0)
    assert A.stride() == (1, 0, 0)
    assert D.stride() == (1, 0)
    assert dt.dtype == D.dtype == A.dtype == torch.float32
    assert x.dtype == B.dtype == C.dtype == out.dtype
    assert out.is_contiguous()
    written = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    times = num_heads // B.shape[1]
    for n, (read, slot) in enumerate(
        zip(state_batch_indices.tolist(), written.tolist(), strict=True)
    ):
        own = torch.zeros_like(state[0]) if read == pad_slot_id else state[read]
        step = dt[n, :, :, None]
        keys = B[n].repeat_interleave(times, 0)[:, None]
        own = (A * step).exp() * own + step * keys * x[n, :, :, None]
        queries = C[n].repeat_interleave(times, 0)[:, None]
        out[n] = (own * queries).sum(-1) + D * x[n]
        if read != pad_slot_id:
            state[slot] = own
    return out


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.mamba"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.mamba"].selective_state_update = selective_state_update


def plan_for(inputs: Inputs) -> Planned:
    return flashinfer_one_token.plan_for(IMPLEMENTATION, inputs, head_k_dim=128, head_v_dim=64)


def given(inputs: Inputs, device: str = "cpu") -> list[Tensor]:
    return tensors_of(plan_for(inputs), device)


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("place", [IN_PLACE, APART], ids=["in place", "apart"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_translated_by_documentation_in_interpreter(case: Case, place: int):
    """Outputs, written slots, rows of padding and all else; decays at their ends."""
    inputs = make_inputs(case, torch.float16)
    if not case.lightning:
        inputs.g[0] = torch.tensor([0.0, -1e-12, -200.0, -torch.inf])
    if place == IN_PLACE:
        inputs = held(inputs)
    else:
        inputs.state_indices[2] = 0  # its state is not kept
    assert plan_for(inputs).values == (place,)
    ours, expected = inputs.copy(), inputs.copy()
    out = IMPLEMENTATION.load()(*ours.args(), **ours.options(), planned=given(inputs))
    exact = ssd_reference(*expected.args(), **expected.options())
    check_translated(out, ours.state, inputs, exact, expected)


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    theirs = parameters_of("mamba/selective_state_update.py", "selective_state_update")
    assert theirs == list(inspect.signature(selective_state_update).parameters)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_k_dim": 96}, "head_k_dim 96 is not one of [64, 128, 256]"),
        ({"head_v_dim": 96}, "head_v_dim 96 is not one of [64, 128]"),
    ],
)
def test_what_it_cannot_serve_is_refused(sizes: dict[str, int], message: str):
    need = Need(device=torch.device("cuda"), dtype=torch.bfloat16, sizes=sizes)
    reasons = IMPLEMENTATION.capability.why_not(need)
    assert any(message in reason for reason in reasons), reasons


@needs_cross_compiler
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """What translates, at Nemotron-H's heads."""
    for name in ("flashinfer", "flashinfer.mamba"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["flashinfer.mamba"])["selective_state_update"] = lambda *_, **__: None
    with launches_on("sm_90") as launches, torch.device("meta"):
        q, k = torch.empty(2, 64, 8, 128, dtype=torch.bfloat16)
        v = torch.empty(64, 128, 64, dtype=torch.bfloat16)
        (g, dt), D = torch.empty(2, 64, 128), torch.empty(128)
        state, slots = torch.empty(65, 128, 64, 128), torch.empty(64, dtype=torch.int32)
        cu_seqlens = torch.empty(65, dtype=torch.int32)
        planned = [slots, torch.tensor([IN_PLACE], device="cpu")]
        IMPLEMENTATION.load()(
            *(q, k, v, g, dt, D, state, cu_seqlens, slots, slots), scale=1.0, planned=planned
        )
    rows = [resources_of(launch, "sm_90", "Nemotron-H") for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_flashinfer.txt"))


def on_device(inputs: Inputs) -> Inputs:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return replace(inputs, **{n: x.cuda() for n, x in tensors.items() if isinstance(x, Tensor)})


def assert_exact(inputs: Inputs, out: Tensor, state: Tensor) -> None:
    """Outputs within a rounding, written slots to float32's approximations; all else as it was."""
    exact, written = inputs.exact(), written_slots(inputs).long()
    expected = ssd_reference(*exact.args(), **exact.options())
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(state[written].double(), exact.state[written], rtol=1e-5, atol=1e-5)
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
    state[written] = inputs.state[written]
    assert torch.equal(state.nan_to_num(), inputs.state.nan_to_num())


def call(inputs: Inputs, planned: list[Tensor]) -> Tensor:
    return recurrent_ssd(*inputs.args(), **inputs.options(), planned=planned, impl="flashinfer")


ON_A_GPU = {
    "one": Case(lengths=(1,), num_groups=8, num_heads=128, k_dim=128, v_dim=64),
    "nemotron_h": Case(num_groups=8, num_heads=128, k_dim=128, v_dim=64, **STEP),
    "falcon_h1": Case(
        lengths=(1,) * 21 + (0,) * 3,
        num_padding_tokens=3,
        num_groups=1,
        num_heads=24,
        k_dim=256,
        v_dim=64,
    ),
    "ling": Case(num_groups=32, num_heads=32, k_dim=128, v_dim=128, lightning=True, **STEP),
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
    moved = on_device(inputs)
    out = call(moved, given(inputs, "cuda"))
    assert_exact(inputs, out.cpu(), moved.state.cpu())


@needs_cuda
@needs_flashinfer
def test_a_captured_graph_serves_other_steps():
    """A bucket of six, replayed with fewer sequences and in other slots."""
    case = replace(ON_A_GPU["nemotron_h"], lengths=(1,) * 6, num_padding_tokens=0)
    inputs = held(make_inputs(case, torch.bfloat16))
    captured, planned = on_device(inputs), given(inputs, "cuda")
    call(captured, planned)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, planned)
    for seed, num_live in enumerate((6, 4, 1), 1):
        lengths = (1,) * num_live + (0,) * (6 - num_live)
        shorter = replace(case, lengths=lengths, num_padding_tokens=6 - num_live)
        other = held(make_inputs(shorter, torch.bfloat16, seed))
        for field in fields(captured):
            if isinstance(getattr(captured, field.name), Tensor):
                getattr(captured, field.name).copy_(getattr(other, field.name))
        for into, tensor in zip(planned, given(other), strict=True):
            into.copy_(tensor)
        graph.replay()
        assert_exact(other, out.cpu(), captured.state.cpu())
