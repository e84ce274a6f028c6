"""FlashInfer's chunk form: the translation without a GPU, the call as it is, and both on one."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import written_slots
from tests.ops.delta_rule.cases import Case, Inputs
from tests.ops.delta_rule.gated import make_inputs
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.recurrent_triton import on_device, tensors
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_compile import launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.core.planning import Planned
from torch_hybrid.ops.delta_rule import gated_delta_rule
from torch_hybrid.ops.delta_rule.op import (
    GATED_IMPLEMENTATIONS,
    GatedDeltaRule,
)
from torch_hybrid.ops.delta_rule.reference import delta_rule_reference

SHAPE = {"k_dim": 128, "v_dim": 128}
CASES = {
    "mixed": Case(lengths=(5, 0, 1, 70, 33), num_padding_tokens=3, **SHAPE),
    "one": Case(lengths=(40,), num_k_heads=1, num_v_heads=1, **SHAPE),
    "empty": Case(lengths=(0, 0), num_padding_tokens=2, **SHAPE),
}


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashInfer's function by its documentation: same arguments, dense rows, states packed or,
    with indices, in slots."""
    num_seqs = len(cu_seqlens) - 1
    assert num_seqs > 0
    assert output_final_state
    assert not use_qk_l2norm_in_kernel
    assert use_cp is (int((cu_seqlens.diff() > 0).sum()) < 2)
    assert not (use_cp and state_indices is not None)
    dense = (q, k, v, g, beta, cu_seqlens, output, output_state)
    assert all(tensor.is_contiguous() for tensor in dense)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (q, k, v, output, output_state))
    # What follows a sequence is multiplied by 0.
    assert all(tensor.isfinite().all() for tensor in (q, k, v, g, beta))
    slots = torch.arange(num_seqs) if state_indices is None else state_indices
    assert state_indices is not None or len(output_state) == num_seqs
    packed = torch.arange(1, num_seqs + 1, dtype=torch.int32)
    pool = output_state.new_zeros(num_seqs + 1, *output_state.shape[1:])
    if initial_state is not None:
        assert initial_state.shape == output_state.shape
        pool[1:] = initial_state[slots]
    tensors = (q, k, v, g.log(), beta, pool, cu_seqlens, packed, packed)
    out = delta_rule_reference(GatedDeltaRule(*tensors, scale=scale, qk_l2norm=False, impl=""))
    # Neither rows of padding nor states of empty sequences are written.
    output[: cu_seqlens[-1]] = out[: cu_seqlens[-1]]
    some = cu_seqlens.diff() > 0
    output_state[slots[some]] = pool[1:][some]
    return output, output_state


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.gdn_prefill"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.gdn_prefill"].chunk_gated_delta_rule = prefill
    three = SimpleNamespace(multi_processor_count=3)  # one sequence of one head is cut over them
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: three)


def launch(inputs: Inputs) -> Tensor:
    """The launcher itself: the op takes CUDA tensors alone."""
    launcher = GATED_IMPLEMENTATIONS["chunk_flashinfer"].load()
    planned = [torch.tensor(plan_for(inputs).values)]
    return launcher(replace(inputs, planned=planned))


def as_given(inputs: Inputs) -> Inputs:
    """The same call with what FlashInfer is given for q and k: unit rows in their dtype."""

    def unit(x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * (x32.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    if not inputs.qk_l2norm:
        return inputs.copy()
    return replace(inputs.copy(), q=unit(inputs.q), k=unit(inputs.k), qk_l2norm=False)


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("qk_l2norm", [True, False], ids=["unit", "as they are"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_translated_by_documentation(case: Case, qk_l2norm: bool):
    """Outputs, written slots, padding rows and all else, for forks and states that nobody keeps."""
    inputs = make_inputs(case, torch.float16)  # the interpreter cuts bfloat16 off
    if not qk_l2norm:  # shorter than 1: a longer key lets its state grow without bound
        short = {"q": inputs.q * 2**-4, "k": inputs.k * 2**-5}
        inputs = replace(inputs, qk_l2norm=False, **short)
    if len(case.lengths) == 5:
        inputs.initial_indices[2:4] = len(inputs.state) - 1
        inputs.state_indices[4] = 0
    assert_right(inputs)


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "carried on"])
def test_states_in_place_by_documentation(begun: bool):
    """Where no state has to be copied none is, and the null slot stays as it is."""
    inputs = make_inputs(CASES["mixed"], torch.float16)
    kept = inputs.state_indices * (inputs.cu_seqlens.diff() > 0)
    inputs = replace(inputs, initial_indices=0 * kept if begun else kept, state_indices=kept)
    if not begun:
        inputs.state[kept[kept > 0].long()] = 0.5
    assert plan_for(inputs).values == (0, 1 if begun else 2)
    assert_right(inputs)


def assert_right(inputs: Inputs) -> None:
    """Outputs, written slots, padding rows and all else are those of the reference."""
    ours, given = inputs.copy(), as_given(inputs)
    expected = delta_rule_reference(given)
    assert_close(launch(ours), expected, 2**-10)
    written = written_slots(inputs).long()
    assert_close(ours.state[written], given.state[written], 2**-10)
    ours.state[written] = inputs.state[written]
    assert torch.equal(ours.state.nan_to_num(), inputs.state.nan_to_num())


@needs_interpreter
@pytest.mark.usefixtures("documented")
def test_dense_values_as_they_lie_by_documentation():
    inputs = make_inputs(CASES["one"], torch.bfloat16)
    dense = replace(inputs.copy(), v=inputs.v.contiguous())
    assert torch.equal(launch(dense), launch(inputs.copy()))


def plan_for(inputs: Inputs) -> Planned:
    planner = GATED_IMPLEMENTATIONS["chunk_flashinfer"].load_planner()
    assert planner is not None
    slots = {"initial_indices": inputs.initial_indices, "state_indices": inputs.state_indices}
    lengths = step_lengths(inputs.cu_seqlens, len(inputs.q), **slots)
    sizes = {"head_k_dim": 128, "head_v_dim": 128, "num_v_heads": inputs.v.shape[1]}
    return planner(lengths, **sizes, device=torch.device("cuda"))


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "num_v_heads", "is_cut"),
    [((9,), 32, 1), ((9, 9), 32, 1), ((9, 9, 9), 32, 0), ((9, 0, 0, 0, 9), 32, 1), ((9,), 66, 0)],
)
def test_few_sequences_are_cut_over_the_device(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], num_v_heads: int, is_cut: int
):
    """Those that have tokens count, and not those that a step is padded with."""
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    inputs = make_inputs(Case(lengths=lengths, num_k_heads=1, num_v_heads=num_v_heads))
    values = plan_for(inputs).values
    assert values[0] == is_cut
    assert values[1] == 0 or not is_cut  # what is cut reads a state while it writes it


@needs_triton
@pytest.mark.parametrize(
    ("initial", "final", "place"),
    [
        ((0, 0, 0), (3, 4, 5), 1),
        ((3, 4, 5), (3, 4, 5), 2),
        ((3, 0, 5), (3, 4, 5), 2),  # of the second, which is empty, nothing is read
        ((3, 4, 0), (3, 4, 5), 0),
        ((3, 4, 4), (3, 4, 5), 0),
        ((0, 0, 0), (3, 4, 0), 0),
        ((0, 0, 0), (3, 0, 5), 1),
    ],
)
def test_where_states_are(
    monkeypatch: pytest.MonkeyPatch,
    initial: tuple[int, ...],
    final: tuple[int, ...],
    place: int,
):
    """Apart, begun in place or carried on in place, of the sequences that have tokens."""
    device = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    inputs = make_inputs(Case(lengths=(9, 0, 9)))
    slots = {"initial_indices": initial, "state_indices": final}
    inputs = replace(inputs, **{name: torch.tensor(x).int() for name, x in slots.items()})
    assert plan_for(inputs).values == (0, place)


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    theirs = parameters_of("gdn_prefill.py", "chunk_gated_delta_rule")
    assert theirs == list(inspect.signature(prefill).parameters)


@pytest.mark.parametrize(
    ("dtype", "k_dim", "v_dim", "message"),
    [
        (torch.bfloat16, 64, 128, "head_k_dim 64 is not one of [128]"),
        (torch.bfloat16, 128, 256, "head_v_dim 256 is not one of [128]"),
        (torch.float32, 128, 128, "dtype torch.float32 is not in"),
    ],
)
def test_other_shapes_are_refused(dtype: torch.dtype, k_dim: int, v_dim: int, message: str):
    capability = GATED_IMPLEMENTATIONS["chunk_flashinfer"].capability
    sizes = {"head_k_dim": k_dim, "head_v_dim": v_dim}
    reasons = capability.why_not(Need(device=torch.device("cuda"), dtype=dtype, sizes=sizes))
    assert any(message in reason for reason in reasons), reasons


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """To a fraction of the largest; nothing is where there is nothing."""
    if expected.numel():
        error, scale = (actual.double() - expected).abs().max(), expected.abs().max()
        assert error <= tolerance * scale, f"error {error:.1e}, values up to {scale:.1e}"


def call(inputs: Inputs) -> Tensor:
    planned = [torch.tensor(plan_for(inputs).values)]
    return gated_delta_rule(
        *inputs.args(), **inputs.options(), planned=planned, impl="chunk_flashinfer"
    )


def assert_good_to_bfloat16(inputs: Inputs, out: Tensor, state: Tensor) -> None:
    """Outputs and written slots within a few roundings of operands; all else as it was."""
    exact, written = inputs.exact(), written_slots(inputs).long()
    expected = delta_rule_reference(exact)
    assert_close(out, expected, 2**-6)
    assert_close(state[written], exact.state[written], 2**-6)
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
    state[written] = inputs.state[written]
    assert torch.equal(state.nan_to_num(), inputs.state.nan_to_num())


@needs_cross_compiler
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """What translates, at Qwen3-Next's heads."""
    for name in ("flashinfer", "flashinfer.gdn_prefill"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.gdn_prefill"].chunk_gated_delta_rule = lambda *_, **__: None
    with launches_on("sm_90") as launches, torch.device("meta"):
        q, k, v = (torch.empty(8192, heads, 128, dtype=torch.bfloat16) for heads in (16, 16, 32))
        g, beta = torch.empty(2, 8192, 32)
        state = torch.empty(65, 32, 128, 128)
        cu_seqlens, slots = torch.empty(9, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        x = GatedDeltaRule(
            *(q, k, v, g, beta, state, cu_seqlens, slots, slots),
            scale=1.0,
            qk_l2norm=True,
            chunk_size=64,
            planned=[torch.zeros(2, dtype=torch.int64, device="cpu")],
            impl="chunk_flashinfer",
        )
        GATED_IMPLEMENTATIONS["chunk_flashinfer"].load()(x)
    rows = [resources_of(launch, "sm_90", "Qwen3-Next") for launch in launches.values()]
    assert_all_fit(rows, Path(__file__).with_name("resources_flashinfer.txt"))


ON_A_GPU = {
    "ragged": Case(lengths=(5, 0, 1, 70, 633, 2, 64), num_padding_tokens=3, **SHAPE),
    "cut over the device": Case(lengths=(3000,), num_k_heads=2, num_v_heads=4, **SHAPE),
    "two of them": Case(lengths=(1500, 0, 17), num_padding_tokens=9, **SHAPE),
    "many heads": Case(lengths=(200, 300, 1), num_k_heads=16, num_v_heads=32, **SHAPE),
}


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, dtype)
    if len(case.lengths) > 2:
        inputs.state_indices[2] = 0  # its state is not kept
    moved = on_device(inputs, "cuda")
    assert_good_to_bfloat16(inputs, call(moved).cpu(), moved.state.cpu())


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize(
    ("num_v_heads", "place"),
    [(4, 0), (32, 0), (32, 1), (32, 2)],
    ids=["cut over the device", "apart", "begun", "carried on"],
)
def test_a_captured_graph_serves_other_lengths(num_v_heads: int, place: int):
    """Three sequences of a bucket of 600 tokens, replayed with other lengths and slots."""
    shape = {"num_k_heads": num_v_heads // 2, "num_v_heads": num_v_heads, **SHAPE}
    first = Case(lengths=(1, 100, 1), num_padding_tokens=498, **shape)
    captured = on_device(started(make_inputs(first, torch.bfloat16), place), "cuda")
    call(captured)  # compiles the kernels, which cannot be done while capturing
    planned = [torch.tensor(plan_for(captured).values)]  # no length is read while it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta_rule(
            *captured.args(), **captured.options(), planned=planned, impl="chunk_flashinfer"
        )
    for seed, lengths in enumerate([(548, 3, 49), (64, 65, 463)], 1):
        case = Case(lengths=lengths, num_padding_tokens=600 - sum(lengths), **shape)
        other = started(make_inputs(case, torch.bfloat16, seed), place)
        assert torch.tensor(plan_for(other).values).equal(planned[0])  # else captured for itself
        for field in tensors(captured):
            getattr(captured, field).copy_(getattr(other, field))
        graph.replay()
        assert_good_to_bfloat16(other, out.cpu(), captured.state.cpu())


def started(inputs: Inputs, place: int) -> Inputs:
    """All sequences begin (1) or carry on (2), or all but the last carry on (0)."""
    initial = inputs.state_indices * (place != 1)
    if place == 0:
        initial[-1] = 0
    inputs.state.nan_to_num_()
    return replace(inputs, initial_indices=initial)
