"""TensorRT-LLM's kernels in FlashInfer by their documentation: no GPU that they are for is here."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.flashinfer_prefill import attend_densely
from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.paged_attention.cases import OPTIONS, Case, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.paged_attention import reference
from torch_hybrid.ops.paged_attention.op import FEATURES, IMPLEMENTATIONS

IMPLEMENTATION = IMPLEMENTATIONS["flashinfer_trtllm"]
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
CASES = {
    "decode": (Case(**HEADS, lengths=((1, 1), (1, 40), (1, 16))), (2, 2)),
    "extend": (Case(**HEADS, lengths=((5, 5), (0, 0), (9, 40), (1, 3))), (6, 2)),
}


def decode(*, query: Tensor, max_seq_len: int, **common: Any) -> None:
    """FlashInfer's function by its documentation: one query of each sequence."""
    context(
        query=query,
        max_q_len=1,
        max_kv_len=max_seq_len,
        batch_size=len(query),
        cum_seq_lens_q=torch.arange(len(query) + 1),
        cum_seq_lens_kv=None,
        **common,
    )


def context(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor | None,
    window_left: int,
    out: Tensor,
    kv_layout: str,
    backend: str,
) -> None:
    """FlashInfer's function by its documentation: queries are the last of each sequence's keys."""
    assert (kv_layout, backend, bmm2_scale) == ("NHD", "trtllm-gen", 1.0)
    assert workspace_buffer.dtype == torch.uint8
    assert len(seq_lens) == batch_size == len(block_tables)
    assert (seq_lens > 0).all()
    assert seq_lens.max() <= max_kv_len
    assert cum_seq_lens_q.diff().max() <= max_q_len
    if cum_seq_lens_kv is not None:
        assert torch.equal(cum_seq_lens_kv.diff(), seq_lens)
    out.fill_(torch.nan)  # rows of padding may hold anything
    page_size = kv_cache[0].shape[1]
    for n, length in enumerate(seq_lens.tolist()):
        rows = slice(*cum_seq_lens_q[n : n + 2].tolist())
        position = torch.arange(length)
        page = block_tables[n, position // page_size].long()
        keys, values = (pool[page, position % page_size].float() for pool in kv_cache)
        dense = attend_densely(query[rows], keys, values, bmm1_scale, window_left, 0.0)
        out[rows] = dense.to(out.dtype)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache = decode
    sys.modules["flashinfer.prefill"].trtllm_batch_context_with_kv_cache = context


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("options", ["plain", "window"])
@pytest.mark.parametrize(("case", "padding"), CASES.values(), ids=CASES)
def test_attends_by_documentation(case: Case, padding: tuple[int, int], options: str):
    """Both functions; rows of padding, and every row of the pool."""
    inputs = make_inputs(case, dtype=torch.float16, unused=0.0, padding=padding)
    planner = IMPLEMENTATION.load_planner()
    assert planner is not None
    lengths = step_lengths(
        inputs.cu_seqlens, len(inputs.q), seq_lens=inputs.seq_lens, page_table=inputs.page_table
    )
    planned = planner(lengths, head_dim=case.head_dim, device=torch.device("cuda"))
    assert planned.values == (0 if case is CASES["decode"][0] else 16,)
    args, scale, chosen = inputs.args(), case.head_dim**-0.5, OPTIONS[options]
    given = [*planned.tensors, torch.tensor(planned.values)]
    out = IMPLEMENTATION.load()(*args, scale=scale, **chosen, planned=given)
    exact = inputs.to(torch.float64).args()
    expected, _ = reference.paged_attention_with_lse(*exact, scale=scale, **chosen)
    torch.testing.assert_close(out.double(), expected, rtol=0.002, atol=0.002)
    assert torch.equal(args[3].double(), exact[3])


@needs_triton
def test_what_is_planned_follows_from_shapes():
    """Whatever the lengths, but for how many new tokens a sequence may have."""
    planner = IMPLEMENTATION.load_planner()
    assert planner is not None
    shapes = []
    for new in ((1, 2, 5), (0, 8, 0), (7, 0, 0)):
        cu_seqlens = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
        planned = planner(step_lengths(cu_seqlens, 8))
        assert planned.values == (8,)
        shapes.append([tensor.shape for tensor in planned.tensors])
    assert shapes[0] == shapes[1] == shapes[2]


@needs_flashinfer
def test_its_functions_take_what_the_documentation_says():
    ours = set(inspect.signature(context).parameters)
    assert ours <= set(parameters_of("prefill.py", "trtllm_batch_context_with_kv_cache"))
    of_context = {"max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"}
    theirs = set(parameters_of("decode.py", "trtllm_batch_decode_with_kv_cache"))
    assert (ours - of_context) | {"max_seq_len"} <= theirs


@needs_triton
def test_a_softcap_is_refused():
    inputs = make_inputs(CASES["decode"][0])
    with pytest.raises(ValueError, match="impl 'flashinfer_trtllm' has no softcap, got 2"):
        IMPLEMENTATION.load()(*inputs.args(), scale=1.0, window=0, softcap=2.0, planned=())


def test_what_it_cannot_serve_is_refused():
    need = Need(
        device=torch.device("cuda"),
        dtype=torch.float32,
        sizes={"head_dim": 96, "page_size": 24},
        features=FEATURES,
    )
    reasons = "; ".join(IMPLEMENTATION.capability.why_not(need))
    for reason in (
        "dtype torch.float32 is not in",
        "head_dim 96 is not one of [64, 128, 256]",
        "page_size 24 is not one of [16, 32, 64, 128]",
        "it has no lse",
        "it has no softcap",
    ):
        assert reason in reasons
