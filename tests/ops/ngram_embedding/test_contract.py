"""The contract of ngram_embedding, held by every implementation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from tests.errors import error_text
from tests.ops.contract import impl_fixture
from tests.ops.ngram_embedding.cases import CASES, EOS, Case, Inputs, make_inputs
from tests.ops.pages import offsets
from torch_hybrid.ops.ngram_embedding import ngram_embedding, reference
from torch_hybrid.ops.ngram_embedding.op import IMPLEMENTATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
impl = impl_fixture(IMPLEMENTATIONS)


def look_up(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor]:
    """The rows, and the history afterwards."""
    args = inputs.args()
    return ngram_embedding(*args, eos=EOS, impl=impl), args[5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_is_the_reference(impl: str, name: str, dtype: str):
    inputs = make_inputs(CASES[name], dtype=DTYPES[dtype], padding=(3, 2))
    oracle = inputs.fresh()
    expected = reference.ngram_embedding(oracle)
    out, history = look_up(inputs, impl)
    assert torch.equal(out, expected)
    assert torch.equal(history, oracle.history)


@torch.no_grad()
def test_the_reference_is_transformers():
    config = Qwen4ExpTextConfig(
        vocab_size=50,
        hidden_size=48,
        eos_token_id=EOS,
        ngram_vocab_size_base=200,
        heads_per_ngram=4,
    )
    module = Qwen4ExpTextNGramEmbedding(config, 48, layer_idx=0, ple_layer_index=1)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 11, (60,), generator=rng)
    out = reference.ngram_embedding(
        Inputs(
            tokens=tokens,
            table=module.ngram_embedding.weight,
            multipliers=module.layer_multipliers,
            head_sizes=module.ngram_heads_vocab_sizes,
            head_offsets=module.ngram_heads_offsets,
            history=torch.zeros(1, 2, dtype=torch.int64),
            cu_seqlens=offsets([60]),
            initial_indices=torch.zeros(1).int(),
            state_indices=torch.zeros(1).int(),
        )
    )
    assert torch.equal(out, module(tokens[None], None)[0])


def test_segments_are_the_whole(impl: str):
    """Cutting a text anywhere, also into pieces shorter than the history, changes nothing."""
    whole = make_inputs(Case(order=5, heads_per_order=2, lengths=(50,), num_new=1))
    expected, expected_history = look_up(whole, impl)
    history, outs = whole.history, []
    for start, end in pairwise([0, 1, 3, 20, 21, 24, 50]):
        piece = replace(
            whole,
            tokens=whole.tokens[start:end],
            history=history,
            cu_seqlens=offsets([end - start]),
            initial_indices=whole.state_indices * (start > 0),
        )
        out, history = look_up(piece, impl)
        outs.append(out)
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(history, expected_history)


def test_texts_do_not_reach_across_their_end(impl: str):
    """What follows an eos is as at the start of a text; the eos itself still looks back."""
    inputs = make_inputs(Case(lengths=(12,), num_new=1))
    text = torch.tensor([5, 6, EOS, 8, 9, 10, 5, EOS, EOS, 6, 5, 8])
    out, _ = look_up(replace(inputs, tokens=text), impl)
    for first, end in ((3, 8), (8, 9), (9, 12)):
        alone = replace(inputs, tokens=text[first:end], cu_seqlens=offsets([end - first]))
        assert torch.equal(look_up(alone, impl)[0], out[first:end])
    assert not torch.equal(out[2], out[7])


# ---- errors ----------------------------------------------------------------------------------


def failing(impl: str, **changes: Tensor) -> str:
    return error_text(ValueError, look_up, replace(make_inputs(CASES["decode"]), **changes), impl)


def test_error_texts():
    good = make_inputs(CASES["decode"])
    errors = [
        failing("torch", table=good.table.long()),
        failing("torch", head_sizes=good.head_sizes[:3], head_offsets=good.head_offsets[:3]),
        failing("torch", multipliers=good.multipliers[:1], history=good.history[:, :0]),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
table must be [rows, dim] of a float dtype, got torch.int64 [1680, 12]
heads must be as many for each of the 2 orders of n-grams, at least one of them, got 3
heads must be as many for each of the 0 orders of n-grams, at least one of them, got 16""",
    )
