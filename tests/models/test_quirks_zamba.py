"""Peculiarities of Zamba, the first: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import torch_hybrid as th
from tests.models.oracle import ask, assert_equal_logits, chunked, decoded, make_texts, serve
from tests.models.refused import refusals
from tests.tiny_models import make_model
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.models.shard import cut
from torch_hybrid.ranks import Ranks

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "one head of Mamba": {"n_mamba_heads": 1},
    "fewer heads of keys": {"num_key_value_heads": 2},
    "attention of another width": {"attention_head_dim": 16},
    "no biases": {"mamba_proj_bias": False, "mamba_conv_bias": False},
    "no block": {"layers_block_type": ["linear_attention"] * 2, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path):
    hf_model = make_model("zamba", **VARIANTS[name])
    oracle = ask(hf_model, make_texts([60, 3]))
    hf_model.save_pretrained(tmp_path)
    runner = th.Runner(th.from_pretrained(tmp_path), **TINY)
    for steps in (chunked([60, 3], 25), decoded([60, 3], 2)):
        assert_equal_logits(serve(runner, oracle.texts, steps), oracle)


def test_rows_of_x_and_of_the_gate_come_in_turn():
    theirs, ours = make_model("zamba"), th.adapt(make_model("zamba"))
    rows = theirs.model.layers[0].mamba.in_proj.weight
    x, gate = ours.layers[0].mamba.mixer.in_proj.weight.chunk(2)
    assert torch.equal(x, rows[0::2])
    assert torch.equal(gate, rows[1::2])


def test_scores_are_scaled_by_half_the_width_of_a_head():
    """Attention reads the hidden state and the embedding side by side: heads are twice as wide."""
    model = th.adapt(make_model("zamba"))
    [spec] = {entry.spec for entry in model.table.of_kind("paged_attention")}
    assert (spec.head_dim, spec.scale) == (32, 16**-0.5)


def test_it_does_not_know_where_its_tokens_stand():
    oracle = ask(make_model("zamba"), make_texts([12]))
    runner = th.Runner(th.adapt(make_model("zamba")), **TINY)
    seqs, apart = runner.new_sequences(1), torch.arange(12) * 7 + 3
    logits = runner.extend(seqs, oracle.texts, logits="all", positions=apart)
    assert_equal_logits([logits], oracle)


def assert_shared(model: th.HybridModel) -> None:
    """Both calls multiply with the same."""
    blocks = [model.layers[i].shared_transf for i in (1, 3)]
    first, second = (
        [part for part in block.modules() if isinstance(part, nn.Linear | ScaledLinear)]
        for block in blocks
    )
    assert len(first) == 7
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_layers_share_a_block():
    hf_model = make_model("zamba")
    num_bytes = sum(weight.nbytes for weight in hf_model.parameters())
    model = th.adapt(hf_model)
    assert_shared(model)
    assert sum(weight.nbytes for weight in model.parameters()) == num_bytes


def test_integers_and_a_ranks_part_of_the_block_are_shared():
    model = th.adapt(make_model("zamba"))
    th.quantize(model, "int8")
    assert_shared(model)
    model = th.adapt(make_model("zamba"))
    whole = sum(weight.nbytes for weight in model.parameters())
    cut(model, Ranks(rank=1, size=2, group_name="two"), "tensor")
    assert_shared(model)
    assert sum(weight.nbytes for weight in model.parameters()) < 0.75 * whole


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: list[dict[str, Any]] = [
    {"hidden_mamba_act": "gelu"},
    {"layers_block_type": ["linear_attention", "full_attention"] * 2},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "zamba", REFUSED),
        """\
zamba: config field hidden_mamba_act must be one of ['silu'], got 'gelu'
zamba: config field layer_types must be one of ['hybrid', 'linear_attention'], got 'full_attention'""",  # noqa: E501
    )


def test_heads_that_ranks_do_not_divide():
    model = th.adapt(make_model("zamba", n_mamba_heads=2))
    with pytest.raises(th.UnsupportedError, match="must divide num_heads, got 4 ranks and 2"):
        model.table.divided(4)
