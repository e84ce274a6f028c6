"""cuDNN attends to the rows of a step without a prefix, and pages are written all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.cudnn_oracle import cudnn_by_documentation
from tests.ops.paged_attention.cases import Case, Inputs, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_interpreter
from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.paged_attention import paged_attention, reference
from torch_hybrid.ops.paged_attention.op import IMPLEMENTATIONS

__all__ = ["cudnn_by_documentation"]

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
CASES = {
    "a prompt": Case(**HEADS, lengths=((0, 0), (9, 9))),
    "prompts": Case(**HEADS, lengths=((9, 9), (0, 0), (9, 9))),
    "after a prefix": Case(**HEADS, lengths=((5, 5), (0, 0), (9, 40), (1, 1))),
}


def planned_for(inputs: Inputs) -> list[Tensor]:
    lengths = step_lengths(inputs.cu_seqlens, len(inputs.q), seq_lens=inputs.seq_lens)
    return [torch.tensor(cudnn_attention.plan(lengths).values)]


def heads_first(x: Tensor) -> Tensor:
    """The same [T, H, D], with heads outermost in memory, as some models make them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def check(inputs: Inputs, out: Tensor, kv: Tensor) -> None:
    assert out.is_contiguous()
    exact = inputs.to(torch.float64).fresh()
    expected, _ = reference.paged_attention_with_lse(exact)
    error = (out.double().cpu() - expected).abs().max()
    assert error <= 2**-6 * expected.abs().max(), f"error {error:.1e}"
    assert not out[int(inputs.cu_seqlens[-1]) :].any()
    torch.testing.assert_close(kv.double().cpu(), exact.kv, rtol=0, atol=0, equal_nan=True)


@needs_interpreter
@pytest.mark.usefixtures("cudnn_by_documentation")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attends_by_documentation(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Rows of the step, of padding, and every row of the pool."""
    prompts = {"a prompt": 1, "prompts": 2}
    num_prompts = next((n for name, n in prompts.items() if case is CASES[name]), 0)
    monkeypatch.setattr(cudnn_attention, "_SHORTEST", 8)
    inputs = make_inputs(case, dtype=torch.bfloat16, padding=(0 if num_prompts else 6, 2))
    given = replace(inputs.fresh(), planned=planned_for(inputs))
    assert given.planned[0].tolist() == [num_prompts]
    for q in (given.q, heads_first(given.q)):
        check(inputs, IMPLEMENTATIONS["cudnn"].load()(replace(given, q=q)), given.kv)


ON_A_GPU = {
    "llama": Case(num_q_heads=32, num_kv_heads=8, head_dim=128, lengths=((650, 650),)),
    "several": Case(num_q_heads=12, num_kv_heads=2, head_dim=128, lengths=((131, 131),) * 3),
    "five to a key head": Case(num_q_heads=5, num_kv_heads=1, head_dim=64, lengths=((300, 300),)),
    "head_dim 80": Case(num_q_heads=4, num_kv_heads=2, head_dim=80, lengths=((300, 300),)),
}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, dtype=dtype, padding=(0, 2))
    args = [tensor.cuda() for tensor in inputs.args()]
    planned = planned_for(inputs)
    assert planned[0].tolist() == [len(case.lengths)]
    options = {"scale": case.head_dim**-0.5, "planned": planned, "impl": "cudnn"}
    for q in (args[0], heads_first(args[0])):
        check(inputs, paged_attention(q, *args[1:], **options), args[3])


@needs_cuda
def test_a_bucket_is_captured_for_prompts_that_fill_it_and_for_others():
    """640 tokens of up to eight sequences; what is captured first is a step of padding."""
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    wholes, others = [((640, 640),), ((640, 640),)], [((39, 39), (600, 690)), ((1, 41), (5, 5))]
    for lengths in (wholes, others):
        batches = [
            make_inputs(
                Case(**heads, lengths=each),
                dtype=torch.bfloat16,
                seed=seed,
                padding=(640 - sum(new for new, _ in each), 8 - len(each)),
            )
            for seed, each in enumerate(lengths)
        ]
        assert {planned_for(batch)[0].item() for batch in batches} == {int(lengths is wholes)}
        replay_all([replace(batch, page_table=widened(batch.page_table)) for batch in batches])


def widened(page_table: Tensor) -> Tensor:
    return torch.nn.functional.pad(page_table, (0, 64 - page_table.shape[1]))


def replay_all(batches: list[Inputs]) -> None:
    """Each batch in its turn in the graph that the first one's shapes and plan are captured for."""
    pages = max(inputs.kv.shape[1] for inputs in batches)
    static = [tensor.cuda() for tensor in batches[0].args()]
    static[3] = static[3].new_zeros(2, pages, *static[3].shape[2:])
    static[4].zero_()
    options = {"scale": 128**-0.5, "planned": planned_for(batches[0]), "impl": "cudnn"}
    paged_attention(*static, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*static, **options)
    for inputs in batches:
        for into, tensor in zip(static, inputs.args(), strict=True):
            if into is static[3]:
                into = into[:, : tensor.shape[1]]
            into.copy_(tensor)
        graph.replay()
        check(inputs, out, static[3][:, : inputs.kv.shape[1]])
