"""Peculiarities of Zamba2: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import torch_hybrid as th
from tests.models.oracle import ask, assert_serves, chunked, decoded, make_texts, serve
from tests.models.refused import refusals
from tests.tiny_models import make_model
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.models.shard import cut
from torch_hybrid.ranks import Ranks

TINY = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256, "page_size": 16, "compile": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "one block": {"num_mem_blocks": 1},
    "nothing is shared": {"num_mem_blocks": 3},
    "adapters of the MLP alone": {"use_shared_attention_adapter": False},
    "fewer heads of keys": {"use_shared_attention_adapter": False, "num_key_value_heads": 2},
    "no positions": {"use_mem_rope": False},
    "no block": {"layers_block_type": ["linear_attention"] * 2, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str):
    hf_model = make_model("zamba2", **VARIANTS[name])
    oracle = ask(hf_model, make_texts([60, 3]))
    runner = th.Runner(th.adapt(hf_model), **TINY)
    assert_serves(runner, oracle, chunked([60, 3], 25), decoded([60, 3], 2))


def test_scores_are_scaled_by_half_the_width_of_a_head():
    """Attention reads the hidden state and the embedding side by side: heads are twice as wide."""
    model = th.adapt(make_model("zamba2"))
    [spec] = {entry.spec for entry in model.table.of_kind("paged_attention")}
    assert (spec.head_dim, spec.scale) == (32, 16**-0.5)


def linears_of(layer: Any) -> dict[str, nn.Module]:
    """What a layer's block multiplies with, by name."""
    kinds = (nn.Linear, ScaledLinear)
    block = layer.shared_transformer
    return {name: part for name, part in block.named_modules() if isinstance(part, kinds)}


def assert_shared(model: th.HybridModel) -> None:
    """The first and the third call are of one block, with adapters of their own."""
    first, second, third = (linears_of(layer) for layer in model.layers[1:])
    assert first.keys() == third.keys()
    for name, linear in first.items():
        assert (linear is third[name]) != ("adapter" in name), name
        assert linear is not second[name], name


def test_layers_share_a_block_and_no_adapters():
    hf_model = make_model("zamba2")
    num_bytes = sum(weight.nbytes for weight in hf_model.parameters())
    model = th.adapt(hf_model)
    assert_shared(model)
    assert sum(weight.nbytes for weight in model.parameters()) == num_bytes


def test_integers_of_a_block_are_shared(tmp_path: Path):
    """In memory, and made as they are read."""
    sizes = {"adapter_rank": 32}
    model = th.adapt(make_model("zamba2", **sizes))
    th.quantize(model, "int4")
    make_model("zamba2", **sizes).save_pretrained(tmp_path)
    loaded = th.from_pretrained(tmp_path, weights="int4")
    for each in (model, loaded):
        assert_shared(each)
    texts = make_texts([30])
    first, second = (serve(th.Runner(m, **TINY), texts, chunked([30], 20)) for m in (model, loaded))
    assert torch.equal(first[0], second[0])


def test_a_ranks_part_of_a_block_is_shared():
    model = th.adapt(make_model("zamba2"))
    whole = sum(weight.nbytes for weight in model.parameters())
    cut(model, Ranks(rank=1, size=2, group_name="two"), "tensor")
    first, _, third = (
        dict(layer.shared_transformer.self_attn.named_children()) for layer in model.layers[1:]
    )
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert first[name] is third[name], name
    assert sum(weight.nbytes for weight in model.parameters()) < 0.75 * whole


def test_a_block_that_was_changed_in_one_layer_alone_is_not_shared():
    """Whoever unties a weight has two of them."""
    hf_model = make_model("zamba2")
    block = hf_model.model.layers[3].shared_transformer
    weight = block.self_attn.q_proj.weight
    block.self_attn.q_proj.weight = nn.Parameter(weight.roll(1, 0), requires_grad=False)
    oracle = ask(hf_model, make_texts([40]))
    assert_serves(th.Runner(th.adapt(hf_model), **TINY), oracle, chunked([40], 25))


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {"use_conv_bias": False},
    {"num_key_value_heads": 2},
    {"layers_block_type": ["linear_attention", "full_attention"] * 2},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "zamba2", REFUSED),
        """\
zamba2: config field rope_parameters.rope_type must be one of ['default', 'linear', 'llama3', 'yarn'], got 'dynamic'
zamba2: config field use_conv_bias must be one of ['True'], got False
zamba2: config field num_key_value_heads must be one of ['4'], got 2
zamba2: config field layer_types must be one of ['hybrid', 'linear_attention'], got 'full_attention'""",  # noqa: E501
    )
