"""FlashInfer attends to pages: plans and calls without a GPU, and all of it on one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.flashinfer_prefill import Documented
from tests.ops.flashinfer_source import native_parameters_of, needs_flashinfer, parameters_of
from tests.ops.paged_attention.cases import OPTIONS, TENSORS, Case, Inputs, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.core.planning import Planned
from torch_hybrid.ops.paged_attention import paged_attention, reference
from torch_hybrid.ops.paged_attention.op import FEATURES, IMPLEMENTATIONS

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
CASES = {
    "prefill": Case(**HEADS, lengths=((5, 5), (0, 0), (9, 40), (1, 3))),
    "decode": Case(**HEADS, page_size=4, lengths=((1, 1), (1, 9), (1, 8))),
}


def plan_for(inputs: Inputs, device: str, window: int = 0, softcap: float = 0.0) -> Planned:
    """What the planner makes of the lengths, which it is told on the host."""
    planner = IMPLEMENTATIONS["flashinfer"].load_planner()
    assert planner is not None
    lengths = step_lengths(
        inputs.cu_seqlens, len(inputs.q), seq_lens=inputs.seq_lens, page_table=inputs.page_table
    )
    return planner(
        lengths,
        num_q_heads=inputs.q.shape[1],
        num_kv_heads=inputs.k.shape[1],
        head_dim=inputs.q.shape[2],
        page_size=inputs.kv.shape[2],
        window=window,
        softcap=softcap,
        dtype=inputs.q.dtype,
        device=torch.device(device),
    )


def given(planned: Planned, device: str) -> list[Tensor]:
    return [*(x.to(device) for x in planned.tensors), torch.tensor(planned.values)]


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_hybrid.ops.paged_attention import _flashinfer, _flashinfer_plan

    for module in (_flashinfer, _flashinfer_plan):
        monkeypatch.setattr(module, "kernels", lambda form, *_: Documented(form))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attends_by_documentation(case: Case, options: str):
    """Both forms; rows of padding, and every row of the pool."""
    more_tokens = 6 if case is CASES["prefill"] else 2
    inputs = make_inputs(case, dtype=torch.bfloat16, unused=0.0, padding=(more_tokens, 2))
    chosen = OPTIONS[options]
    planned = plan_for(inputs, "cpu", chosen["window"], chosen["softcap"])
    assert len(planned.tensors) == (1 if case is CASES["prefill"] else 4)
    called = replace(inputs.fresh(), planned=given(planned, "cpu"), **chosen)
    out = IMPLEMENTATIONS["flashinfer"].load()(called)
    exact = replace(inputs.to(torch.float64).fresh(), **chosen)
    expected, _ = reference.paged_attention_with_lse(exact)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
    assert torch.equal(called.kv.double(), exact.kv)


@needs_triton
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("documented")
def test_shapes_of_a_plan_follow_from_shapes(case: Case):
    """Whatever the lengths: a bucket has one layout, and its largest step the largest tensors."""
    tokens = sum(new for new, _ in case.lengths)
    full = make_inputs(case, padding=(6, 2))
    empty = replace(
        full, cu_seqlens=full.cu_seqlens * 0, seq_lens=full.seq_lens * 0, page_table=full.page_table
    )
    plans = [plan_for(inputs, "cpu") for inputs in (full, empty)]
    assert tokens
    assert plans[0].values == plans[1].values
    shapes = [[tensor.shape for tensor in plan.tensors] for plan in plans]
    assert shapes[0] == shapes[1]


@needs_flashinfer
def test_its_functions_take_what_the_documentation_says():
    run = list(inspect.signature(Documented.paged_run).parameters)[1:]
    theirs = parameters_of("prefill.py", "get_batch_prefill_module.paged_run")
    assert theirs[: len(run)] == run
    assert parameters_of("prefill.py", "get_batch_prefill_module") == ["backend"]
    plan = list(inspect.signature(Documented.plan).parameters)[1:]
    native = native_parameters_of("batch_prefill.cu", "BatchPrefillWithKVCachePlan")
    assert native == plan
    native = native_parameters_of("batch_prefill_sm90.cu", "BatchPrefillWithKVCacheSM90Plan")
    assert [name.removesuffix("_arr") for name in native] == [
        name.removesuffix("_arr") for name in plan[:16]
    ]


def test_a_plan_is_asked_for():
    inputs = make_inputs(CASES["decode"])
    with pytest.raises(ValueError, match="impl 'torch' plans nothing, got 1 planned tensors"):
        paged_attention(*inputs.args(), scale=1.0, planned=[inputs.q], impl="torch")


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        (96, torch.bfloat16, "head_dim 96 is not one of [64, 128, 256]"),
        (128, torch.float32, "dtype torch.float32 is not in"),
    ],
)
def test_other_shapes_are_refused(size: int, dtype: torch.dtype, message: str):
    capability = IMPLEMENTATIONS["flashinfer"].capability
    need = Need(
        device=torch.device("cuda"), dtype=dtype, sizes={"head_dim": size}, features=FEATURES
    )
    reasons = capability.why_not(need)
    assert any(message in reason for reason in reasons), reasons
    assert "it has no lse" in reasons


ON_A_GPU = {
    "qwen3_next": Case(
        num_q_heads=16, num_kv_heads=2, head_dim=256, lengths=((1, 70), (300, 300), (3, 400))
    ),
    "llama": Case(num_q_heads=32, num_kv_heads=8, head_dim=128, lengths=((129, 129), (65, 1500))),
    "decode": Case(
        num_q_heads=16, num_kv_heads=2, head_dim=256, lengths=((1, 1500), (1, 260), (1, 2))
    ),
    "five to a key head": Case(num_q_heads=5, num_kv_heads=1, head_dim=64, lengths=((1, 3000),)),
}


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu(case: Case, options: str):
    inputs = make_inputs(case, dtype=torch.bfloat16, padding=(5, 2))
    if case is ON_A_GPU["decode"]:
        inputs = make_inputs(case, dtype=torch.bfloat16, padding=(2, 2))
    check(inputs, call(on_device(inputs), plan_for(inputs, "cuda", *values(options)), options))


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("each", [1, 40], ids=["decode", "prefill"])
def test_a_captured_graph_serves_other_lengths(each: int):
    """A bucket is captured with one plan, and replayed with others that are copied into it."""
    batches = []
    for seed, totals in enumerate([(700, 41, 90), (41, 700, 90), (90, 90, 400)]):
        lengths = tuple((each, total) for total in totals)
        case = replace(ON_A_GPU["qwen3_next"], lengths=lengths)
        made = make_inputs(case, dtype=torch.bfloat16, seed=seed, unused=0.0, padding=(5, 5))
        wide = torch.zeros(8, 64, dtype=torch.int32)
        wide[:, : made.page_table.shape[1]] = made.page_table
        batches.append(
            (replace(made, page_table=wide), plan_for(replace(made, page_table=wide), "cuda"))
        )
    pages = max(inputs.kv.shape[1] for inputs, _ in batches)
    first, planned = batches[0]
    captured, held = on_device(first), given(planned, "cuda")
    captured = replace(captured, kv=captured.kv.new_zeros(2, pages, *captured.kv.shape[2:]))

    def step() -> Tensor:
        return paged_attention(*live(captured), scale=1 / 16, planned=held, impl="flashinfer")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for inputs, planned in batches:
        assert planned.values == batches[0][1].values
        for name in ("q", "k", "v", "cu_seqlens", "seq_lens", "page_table", "slot_mapping"):
            getattr(captured, name).copy_(getattr(inputs, name))
        captured.kv[:, : inputs.kv.shape[1]] = inputs.kv.to("cuda")
        for into, tensor in zip(held, planned.tensors, strict=False):
            into.copy_(tensor)
        graph.replay()
        check(inputs, out)


def live(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(getattr(inputs, name) for name in TENSORS)


def values(options: str) -> Sequence[float]:
    return OPTIONS[options]["window"], OPTIONS[options]["softcap"]


def on_device(inputs: Inputs) -> Inputs:
    return replace(inputs, **{name: getattr(inputs, name).to("cuda") for name in TENSORS})


def call(inputs: Inputs, planned: Planned, options: str) -> Tensor:
    held = given(planned, "cuda")
    scale = inputs.q.shape[2] ** -0.5
    return paged_attention(
        *inputs.args(), scale=scale, **OPTIONS[options], planned=held, impl="flashinfer"
    )


def check(inputs: Inputs, out: Tensor, options: str = "plain") -> None:
    exact = replace(inputs.to(torch.float64).fresh(), **OPTIONS[options])
    expected, _ = reference.paged_attention_with_lse(exact)
    error = (out.double().cpu() - expected).abs().max()
    assert error <= 2**-6 * expected.abs().max(), f"error {error:.1e}"
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
