"""What weights take, by part and by format."""

from __future__ import annotations

import pytest

import torch_hybrid as th
from tests.tiny_models import make_hybrid, make_model
from torch_hybrid.explain.sections import weights
from torch_hybrid.explain.weights import weights_by_part

# Whose rows groups of 32 divide.
FAMILIES = {
    "qwen3_next": {},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32},
    "granitemoehybrid": {"shared_intermediate_size": 64},
    "zaya": {"layer_types": ["hybrid"] * 2},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", ["float32", "int4"])
def test_every_byte_is_of_one_part(family: str, stored: str):
    model = make_hybrid(family, **FAMILIES[family])
    if stored == "int4":
        th.quantize(model, "int4")
    parts = weights_by_part(model)
    total = sum(part.num_bytes + part.scale_bytes for part in parts.values())
    assert total == sum(weight.nbytes for weight in {*model.parameters()})
    kinds = {entry.kind for layer in model.table.layers for entry in layer}
    assert kinds <= {part for part, _ in parts}
    experts = {form for part, form in parts if part == "experts"}
    assert experts == {"float32" if stored == "float32" else "int4 of 32"}


def test_a_block_that_layers_share_counts_once():
    model = th.adapt(make_model("zamba2"))
    parts = weights_by_part(model)
    assert sum(part.num_bytes for part in parts.values()) == sum(
        weight.nbytes for weight in model.parameters()
    )
    block = model.layers[1].shared_transformer
    own = sum(w.nbytes for w in block.self_attn.parameters() if w.ndim > 1)
    adapters = sum(
        w.nbytes for name, w in model.layers[3].named_parameters() if "self_attn.linear_" in name
    )
    assert parts["paged_attention", "float32"].num_bytes == 2 * own + adapters
    assert parts["paged_attention", "float32"].layers == {1, 2, 3}
    assert parts["mamba2", "float32"].layers == {0, 1, 2, 3}


def test_the_table():
    model = make_hybrid("qwen3_next", tie_word_embeddings=False)
    th.quantize(model, "int4")
    rows = {row[0]: row for row in weights(model).rows if row[2] != "float32"}
    assert rows["experts"][1:3] == ("0-1", "int4 of 32")
    assert rows["head"][1:3] == ("-", "int8")
    assert all(row[4] != "-" for row in rows.values())
