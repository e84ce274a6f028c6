"""A layer gets its plan and cache by the id under which it is called, whatever stands in it.

What several layers share, and two kinds of attention, in models that transformers still computes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

import torch_hybrid as th
from tests.models.oracle import Oracle, ask, assert_serves, make_texts, mixed
from tests.tiny_models import LINEAR, make_model, randomize
from torch_hybrid.models import families
from torch_hybrid.models.families.deepseek_v3 import DeepseekV3Family
from torch_hybrid.models.shard import cut
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import LayerSpec

LENGTHS = (70, 33, 41)
LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}


def assert_served(hf_model: Any, oracle: Oracle) -> th.Runner:
    runner = th.Runner(th.adapt(hf_model), max_seqs=3, max_tokens=256, kv_tokens=512, compile=False)
    assert_serves(runner, oracle, mixed(LENGTHS, seed=0))
    return runner


def share(hf_model: Any, name: str, *, kind: str) -> None:
    """Let the later layers of one kind call the module that the first of them has."""
    layers = [
        layer
        for layer, layer_type in zip(hf_model.model.layers, LAYERS["layer_types"], strict=True)
        if layer_type == kind
    ]
    for layer in layers[1:]:
        setattr(layer, name, getattr(layers[0], name))


def test_modules_that_several_layers_call():
    hf_model = make_model("qwen3_next_dense", **LAYERS)
    share(hf_model, "self_attn", kind="full_attention")
    share(hf_model, "linear_attn", kind="linear_attention")
    runner = assert_served(hf_model, ask(hf_model, make_texts(LENGTHS)))
    layers = runner.model.layers
    assert layers[1].self_attn is layers[3].self_attn
    assert layers[0].linear_attn is layers[2].linear_attn
    for kind, pools in runner.cache.pools.items():
        first, second = (torch.cat([t.flatten() for t in pool.values()]) for pool in pools)
        assert not torch.equal(first, second), kind
    width = layers[1].self_attn.q_proj.out_features
    cut(runner.model, Ranks(rank=0, size=2, group_name="none"), "tensor")
    assert layers[1].self_attn is layers[3].self_attn
    assert layers[0].linear_attn is layers[2].linear_attn
    assert layers[1].self_attn.q_proj.out_features == width // 2
    assert layers[0].linear_attn.mixer.spec.num_v_heads == LINEAR["linear_num_value_heads"] // 2


def test_latents_that_several_layers_call():
    hf_model = make_model("deepseek_v3")
    for layer in hf_model.model.layers[2:]:
        layer.self_attn = hf_model.model.layers[0].self_attn
    assert_served(hf_model, ask(hf_model, make_texts(LENGTHS)))


def test_two_kinds_of_attention(monkeypatch: pytest.MonkeyPatch):
    """The second and the last layer of an MLA model have grouped queries instead."""
    hf_model = make_model("deepseek_v3")
    config, layers = hf_model.config, hf_model.model.layers
    with monkeypatch.context() as grouped:
        grouped.setattr(config, "num_key_value_heads", 2)
        for layer_id in (1, 3):
            layers[layer_id].self_attn = LlamaAttention(config, layer_id).requires_grad_(False)
            randomize(layers[layer_id].self_attn, seed=layer_id)
    full = th.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=config.head_dim, scale=config.head_dim**-0.5
    )

    class Mixed(DeepseekV3Family):
        def specs(self, config: Any) -> list[LayerSpec]:
            latent = super().specs(config)
            return [latent[0], full, latent[2], full]

    monkeypatch.setitem(families.FAMILIES, "deepseek_v3", Mixed())
    runner = assert_served(hf_model, ask(hf_model, make_texts(LENGTHS)))
    assert set(runner.cache.pools) == {"latent_attention", "paged_attention"}
