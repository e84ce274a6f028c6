"""Random checkpoints of Ring-2.5 in the published layout, in which every weight matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.ring_reference import is_mla
from tests.tiny_models import VOCAB_SIZE

# Six heads, no power of two; two whole groups of layers and one layer past them; a draft layer.
CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 20,
    "layer_group_size": 2,
    "group_norm_size": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.4,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 7,
}


def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every published weight and its shape."""
    dim, vocab = config["hidden_size"], config["vocab_size"]
    all_shapes = {"model.word_embeddings.weight": [vocab, dim], "model.norm.weight": [dim]}
    if not config.get("tie_word_embeddings"):
        all_shapes["lm_head.weight"] = [vocab, dim]
    for layer_id in range(config["num_hidden_layers"]):
        mixer = _mla(config) if is_mla(config, layer_id) else _lightning(config)
        mlp = _mlp("mlp", dim, config["intermediate_size"])
        if layer_id >= config["first_k_dense_replace"]:
            mlp = _moe(config)
        norms = {f"{name}_layernorm.weight": [dim] for name in ("input", "post_attention")}
        for name, shape in {**norms, **mixer, **mlp}.items():
            all_shapes[f"model.layers.{layer_id}.{name}"] = shape
    draft = config["num_hidden_layers"]
    all_shapes[f"model.layers.{draft}.eh_proj.weight"] = [dim, 2 * dim]
    return all_shapes


def _lightning(config: dict[str, Any]) -> dict[str, list[int]]:
    dim, width = config["hidden_size"], config["head_dim"]
    channels = config["num_attention_heads"] * width
    norms = {
        "attention.query_layernorm.weight": [width],
        "attention.key_layernorm.weight": [width],
    }
    return {
        "attention.query_key_value.weight": [3 * channels, dim],
        "attention.g_proj.weight": [channels, dim],
        "attention.g_norm.weight": [channels],
        "attention.dense.weight": [dim, channels],
        **(norms if config["use_qk_norm"] else {}),
    }


def _mla(config: dict[str, Any]) -> dict[str, list[int]]:
    dim, heads, low = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    nope, rope, value = (config[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, q_width = config["kv_lora_rank"], heads * (nope + rope)
    query = {"attention.q_proj.weight": [q_width, dim]}
    if low is not None:
        query = {
            "attention.q_a_proj.weight": [low, dim],
            "attention.q_a_layernorm.weight": [low],
            "attention.q_b_proj.weight": [q_width, low],
        }
    return {
        **query,
        "attention.kv_a_proj_with_mqa.weight": [rank + rope, dim],
        "attention.kv_a_layernorm.weight": [rank],
        "attention.kv_b_proj.weight": [heads * (nope + value), rank],
        "attention.dense.weight": [dim, heads * value],
    }


def _mlp(name: str, dim: int, width: int) -> dict[str, list[int]]:
    up = {f"{name}.{part}_proj.weight": [width, dim] for part in ("gate", "up")}
    return {**up, f"{name}.down_proj.weight": [dim, width]}


def _moe(config: dict[str, Any]) -> dict[str, list[int]]:
    dim, width, count = (config[f] for f in ("hidden_size", "moe_intermediate_size", "num_experts"))
    all_shapes = {"mlp.gate.weight": [count, dim], "mlp.gate.expert_bias": [count]}
    for expert in range(count):
        all_shapes |= _mlp(f"mlp.experts.{expert}", dim, width)
    return all_shapes | _mlp("mlp.shared_experts", dim, width * config["num_shared_experts"])


def make_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Drawn so that activations keep their scale and no weight is neutral."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: list[int]) -> Tensor:
        normal = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 + 0.2 * normal
        return 0.1 * normal if name.endswith("expert_bias") else normal * shape[-1] ** -0.5

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """As it is published: in several files, with an index."""
    (folder / "config.json").write_text(json.dumps(config))
    names, placed = sorted(weights), {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = folder / f"model-{index + 1:05}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in part}, file, {"format": "pt"})
        placed |= dict.fromkeys(part, file.name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
