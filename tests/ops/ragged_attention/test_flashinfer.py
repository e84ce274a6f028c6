"""FlashInfer attends to dense rows: plans and calls without a GPU, and all of it on one."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.flashinfer_prefill import Documented
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.ragged_attention.cases import Case, Inputs, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference
from torch_hybrid.ops.ragged_attention.op import IMPLEMENTATIONS

SMALL = Case(
    num_heads=2, num_k_heads=2, head_dim=24, v_head_dim=16, lengths=((5, 5), (0, 0), (9, 20))
)


def planned_for(inputs: Inputs, device: str) -> list[Tensor]:
    planner = IMPLEMENTATIONS["flashinfer"].load_planner()
    assert planner is not None
    seq_lens = inputs.cu_seqlens_k.diff()
    planned = planner(
        step_lengths(inputs.cu_seqlens_q, len(inputs.q), seq_lens=seq_lens),
        num_heads=inputs.q.shape[1],
        head_dim=inputs.q.shape[2],
        v_head_dim=inputs.v.shape[2],
        dtype=inputs.q.dtype,
        device=torch.device(device),
    )
    return [*(x.to(device) for x in planned.tensors), torch.tensor(planned.values)]


def check(inputs: Inputs, results: tuple[Tensor, Tensor], *, causal: bool = True) -> None:
    used = int(inputs.cu_seqlens_q[-1])
    expected = reference.ragged_attention_with_lse(replace(inputs.exact(), causal=causal))
    out, lse = (result.double().cpu() for result in results)
    error = (out - expected[0])[:used].abs().max()
    assert error <= 2**-6 * expected[0][:used].abs().max(), f"error {error:.1e}"
    torch.testing.assert_close(lse[:used], expected[1][:used].double(), rtol=0, atol=0.01)
    assert not out[used:].any()
    assert (lse[used:] == -torch.inf).all()


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_hybrid.ops.ragged_attention import _flashinfer

    monkeypatch.setattr(_flashinfer, "kernels", lambda form, *_: Documented(form))


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_attends_by_documentation(causal: bool):
    padding = (150, 3, 2)  # more rows than programs that set them
    inputs = make_inputs(SMALL, dtype=torch.bfloat16, padding=padding)
    launcher, planned = IMPLEMENTATIONS["flashinfer"].load(), planned_for(inputs, "cpu")
    results = launcher(replace(inputs, causal=causal, planned=planned))
    check(inputs, results, causal=causal)


@needs_triton
@pytest.mark.usefixtures("documented")
def test_shapes_of_a_plan_follow_from_shapes():
    plans = []
    for lengths in (SMALL.lengths, ((14, 17), (0, 0), (0, 8))):
        case = Case(num_heads=2, num_k_heads=2, head_dim=24, v_head_dim=16, lengths=lengths)
        plans.append(planned_for(make_inputs(case, padding=(3, 3, 2)), "cpu"))
    assert torch.equal(plans[0][-1], plans[1][-1])
    assert plans[0][0].shape == plans[1][0].shape


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    run = list(inspect.signature(Documented.ragged_run).parameters)[1:]
    theirs = parameters_of("prefill.py", "get_batch_prefill_module.ragged_run")
    assert theirs[: len(run)] == run


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("heads", [16, 128])
def test_on_a_gpu(heads: int):
    """DeepSeek's heads: prompts, and new tokens after a prefix.

    Nothing that follows a sequence's rows is NaN: see its README.
    """
    sizes = {"num_heads": heads, "num_k_heads": heads, "head_dim": 192, "v_head_dim": 128}
    for lengths in (((300, 300), (0, 0), (1, 1), (129, 129)), ((70, 470), (1, 90), (200, 200))):
        inputs = make_inputs(
            Case(**sizes, lengths=lengths), dtype=torch.bfloat16, padding=(3, 3, 2)
        )
        args = [tensor.nan_to_num().cuda() for tensor in inputs.args()]
        options = {"scale": 192**-0.5, "planned": planned_for(inputs, "cuda")}
        check(inputs, ragged_attention_with_lse(*args, causal=True, **options, impl="flashinfer"))
