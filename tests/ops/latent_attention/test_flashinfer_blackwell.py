"""FlashInfer's decode for Blackwell by its documentation: no GPU that it is for is here."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops.flashinfer_source import needs_flashinfer, parameters_of
from tests.ops.latent_attention.cases import Case, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.latent_attention import reference
from torch_hybrid.ops.latent_attention.op import EXTEND, IMPLEMENTATIONS

FORMS = {"flashinfer_trtllm": "trtllm-gen", "flashinfer_cute_dsl": "cute-dsl"}
DECODE = Case(num_heads=16, rank=512, lengths=((1, 1), (1, 40), (1, 70)))


def decode(
    *,
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    backend: str,
    lse: Tensor,
    return_lse: bool,
    return_lse_base: str,
) -> None:
    """FlashInfer's function by its documentation: one query of each sequence."""
    num_seqs, num_new, num_heads, width = query.shape
    assert num_new == 1
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
    assert width == kv_cache.shape[2] == 576
    assert workspace_buffer.dtype == torch.uint8
    assert block_tables.shape[1] % 8 == 0
    assert len(seq_lens) == len(block_tables) == num_seqs
    assert (seq_lens > 0).all()
    assert seq_lens.max() <= max_seq_len
    assert out.shape == (num_seqs, 1, num_heads, 512)
    assert lse.shape == (num_seqs, num_heads)
    assert (bmm2_scale, return_lse, return_lse_base) == (1.0, True, "basee")
    assert backend in FORMS.values()
    for n, length in enumerate(seq_lens.tolist()):
        position = torch.arange(length)
        page = block_tables[n, position // kv_cache.shape[1]].long()
        rows = kv_cache[page, position % kv_cache.shape[1]].float()
        logits = query[n, 0].float() @ rows.T * bmm1_scale
        out[n, 0] = (logits.softmax(-1) @ rows[:, :512]).to(out.dtype)
        lse[n] = logits.logsumexp(-1)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer as its documentation has it, in place of the package."""
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.mla"].trtllm_batch_decode_with_kv_cache_mla = decode


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("impl", FORMS)
def test_attends_by_documentation(impl: str):
    """Rows of padding, and every row of the pool."""
    inputs = make_inputs(DECODE, dtype=torch.float16, unused=0.0, padding=(2, 2))
    planner = IMPLEMENTATIONS[impl].load_planner()
    assert planner is not None
    lengths = step_lengths(
        inputs.cu_seqlens,
        len(inputs.q_latent),
        seq_lens=inputs.seq_lens,
        page_table=inputs.page_table,
    )
    planned = planner(lengths, num_heads=16, device=torch.device("cuda"))
    args, given = inputs.args(), [*planned.tensors, torch.tensor(planned.values)]
    out, lse = IMPLEMENTATIONS[impl].load()(*args, scale=DECODE.scale, planned=given)
    exact = inputs.to(torch.float64).args()
    expected = reference.latent_attention_with_lse(*exact, scale=DECODE.scale)
    torch.testing.assert_close(out.double(), expected[0], rtol=0.002, atol=0.002)
    torch.testing.assert_close(lse.double(), expected[1].double(), rtol=0.002, atol=0.002)
    assert (lse[3:] == -math.inf).all()
    assert torch.equal(args[4].double(), exact[4])


@needs_triton
def test_more_than_one_token_of_a_sequence_is_refused():
    planner = IMPLEMENTATIONS["flashinfer_trtllm"].load_planner()
    assert planner is not None
    with pytest.raises(
        ValueError, match="one token in each, and sequences without a token last; got 2 rows"
    ):
        planner(step_lengths(torch.tensor([0, 2, 2], dtype=torch.int32), 2))


@needs_flashinfer
def test_its_function_takes_what_the_documentation_says():
    theirs = parameters_of("mla/_core.py", "trtllm_batch_decode_with_kv_cache_mla")
    assert set(inspect.signature(decode).parameters) <= set(theirs)


@pytest.mark.parametrize(
    ("impl", "sizes", "message"),
    [
        ("flashinfer_trtllm", {"num_heads": 96}, "num_heads 96 is not one of [8, 16, 32, 64, 128]"),
        ("flashinfer_trtllm", {"page_size": 16}, "page_size 16 is not one of [32, 64]"),
        ("flashinfer_cute_dsl", {"rank": 256}, "rank 256 is not one of [512]"),
        ("flashinfer_cute_dsl", {"num_heads": 256}, "num_heads 256 is over the limit 128"),
    ],
)
def test_what_it_cannot_serve_is_refused(impl: str, sizes: dict[str, int], message: str):
    need = Need(device=torch.device("cuda"), dtype=torch.bfloat16, sizes=sizes, features=EXTEND)
    reasons = IMPLEMENTATIONS[impl].capability.why_not(need)
    assert message in reasons
    assert "it has no extend" in reasons
