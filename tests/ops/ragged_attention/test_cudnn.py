"""cuDNN attends where sequences attend to themselves, with the log-sum-exp of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.cudnn_oracle import cudnn_by_documentation
from tests.ops.ragged_attention.cases import Case, Inputs, make_inputs
from tests.ops.triton_interpreter import needs_interpreter
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse, reference
from torch_hybrid.ops.ragged_attention.op import IMPLEMENTATIONS

__all__ = ["cudnn_by_documentation"]

SIZES = {"num_heads": 4, "num_k_heads": 2, "head_dim": 24, "v_head_dim": 16}
CASES = {
    "itself": Case(**SIZES, lengths=((0, 0), (9, 9))),
    "themselves": Case(**SIZES, lengths=((9, 9), (0, 0), (9, 9))),
    "a prefix too": Case(**SIZES, lengths=((5, 5), (0, 3), (9, 20))),
}


def check(inputs: Inputs, results: tuple[Tensor, Tensor], *, causal: bool) -> None:
    expected = reference.ragged_attention_with_lse(replace(inputs.exact(), causal=causal))
    used = int(inputs.cu_seqlens_q[-1])
    out, lse = (result.double().cpu() for result in results)
    error = (out - expected[0])[:used].abs().max()
    assert error <= 2**-6 * expected[0][:used].abs().max(), f"error {error:.1e}"
    torch.testing.assert_close(lse[:used], expected[1][:used].double(), rtol=0, atol=0.01)
    assert not out[used:].any()
    assert (lse[used:] == -torch.inf).all()
    assert all(result.is_contiguous() for result in results)


@needs_interpreter
@pytest.mark.usefixtures("cudnn_by_documentation")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attends_by_documentation(case: Case, causal: bool):
    prompts = {"itself": 1, "themselves": 2}
    num_prompts = next((n for name, n in prompts.items() if case is CASES[name]), 0)
    padding = (0, 0, 2) if num_prompts else (3, 3, 2)
    inputs = make_inputs(case, dtype=torch.bfloat16, padding=padding)
    planned = [torch.tensor([num_prompts])]
    launcher, q = IMPLEMENTATIONS["cudnn"].load(), inputs.q
    for rows in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):  # heads outermost in memory
        results = launcher(replace(inputs, q=rows, causal=causal, planned=planned))
        check(inputs, results, causal=causal)


@needs_cuda
@pytest.mark.parametrize(("heads", "num_seqs"), [(16, 1), (128, 1), (16, 3)])
def test_on_a_gpu(heads: int, num_seqs: int):
    """DeepSeek's heads."""
    sizes = {"num_heads": heads, "num_k_heads": heads, "head_dim": 192, "v_head_dim": 128}
    inputs = make_inputs(
        Case(**sizes, lengths=((301, 301),) * num_seqs), dtype=torch.bfloat16, padding=(0, 0, 2)
    )
    args = [tensor.cuda() for tensor in inputs.args()]
    options = {"scale": 192**-0.5, "planned": [torch.tensor([num_seqs])], "impl": "cudnn"}
    q, *others = args
    for rows in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):
        check(inputs, ragged_attention_with_lse(rows, *others, causal=True, **options), causal=True)
