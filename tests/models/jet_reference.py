"""Jet-Nemotron in float64, token by token, from a config and weights of the published layout.

It shares nothing with the package: rotary embedding is multiplication by complex numbers, the
recurrence and the convolution are loops.
"""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE

Weights = dict[str, Tensor]
Config = dict[str, Any]

# As it is published, but for sizes: heads that are no power of two, a window of 20 tokens.
CONFIG: Config = {
    "architectures": ["JetNemotronForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_jet_nemotron.JetNemotronConfig",
        "AutoModelForCausalLM": "modeling_jet_nemotron.JetNemotronForCausalLM",
    },
    "bos_token_id": 3,
    "efficient_attention_config": {
        "jet": {
            "conv_size": 4,
            "dconv_generator_reduction": 8,
            "dconv_implementation": "triton",
            "expand_v": 2.6666666667,
            "head_dim": 12,
            "mode": "chunk",
            "norm_eps": "1e-5",
            "num_heads": 3,
        },
        "swa": {"window_size": 20},
    },
    "eos_token_id": 7,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_types": ["jet", "swa", "jet", "attn"],
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "model_type": "jet_nemotron",
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_mrope": False,
    "vocab_size": VOCAB_SIZE,
}


def shapes(config: Config) -> dict[str, list[int]]:
    """Every published weight and its shape."""
    dim, width = config["hidden_size"], config["intermediate_size"]
    found = {"model.embed_tokens.weight": [config["vocab_size"], dim], "model.norm.weight": [dim]}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = [config["vocab_size"], dim]
    for layer_id, kind in enumerate(config["layer_types"]):
        mixer = _block(config) if kind == "jet" else _attention(config)
        layer = {f"self_attn.{name}": shape for name, shape in mixer.items()}
        layer |= {f"mlp.{name}_proj.weight": [width, dim] for name in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": [dim, width]}
        layer |= {f"{name}_layernorm.weight": [dim] for name in ("input", "post_attention")}
        found |= {f"model.layers.{layer_id}.{name}": shape for name, shape in layer.items()}
    return found


def _attention(config: Config) -> dict[str, list[int]]:
    dim, count = config["hidden_size"], config["num_attention_heads"]
    rows = {"q": dim, "k": dim // count * config["num_key_value_heads"]}
    rows["v"] = rows["k"]
    weights = {f"{name}_proj.weight": [size, dim] for name, size in rows.items()}
    biases = {f"{name}_proj.bias": [size] for name, size in rows.items()}
    return {**weights, **biases, "o_proj.weight": [dim, dim]}


def _block(config: Config) -> dict[str, list[int]]:
    dim, block = config["hidden_size"], config["efficient_attention_config"]["jet"]
    heads, values = block["num_heads"], round(block["head_dim"] * block["expand_v"])
    k, v = heads * block["head_dim"], heads * values
    rows = {"q": k, "k": k, "v": v, "g": v, "b": heads, "a": heads}
    rank, width = v // block["dconv_generator_reduction"], block["conv_size"]
    return {
        **{f"{name}_proj.weight": [size, dim] for name, size in rows.items()},
        "A_log": [heads],
        "dt_bias": [heads],
        "dynamic_conv1d.kernel_generator.w1.weight": [rank, dim],
        "dynamic_conv1d.kernel_generator.w2.weight": [v * width, rank],
        "dynamic_conv1d.kernel_generator.w2.bias": [v * width],
        "o_norm.weight": [values],
        "o_proj.weight": [dim, v],
    }


def make_weights(config: Config, seed: int) -> Weights:
    """Drawn so that activations keep their scale and no weight is neutral."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: list[int]) -> Tensor:
        normal = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 + 0.2 * normal
        if name.endswith(("bias", "A_log")):  # with dt_bias: decays over some 3 to 30 tokens
            return 0.5 * normal - 2.5 * name.endswith("dt_bias")
        return normal * shape[-1] ** -0.5

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def reference_logits(config: Config, weights: Weights, tokens: list[int]) -> Tensor:
    """[tokens, vocab] logits of one text."""
    exact = {name: weight.double() for name, weight in weights.items()}
    x = exact["model.embed_tokens.weight"][tokens]
    eps = config["rms_norm_eps"]
    for layer_id, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer_id}."
        w = {n.removeprefix(prefix): each for n, each in exact.items() if n.startswith(prefix)}
        mixer = jet_block if kind == "jet" else attention
        own = {n.removeprefix("self_attn."): each for n, each in w.items() if "self_attn." in n}
        x = x + mixer(config, own, kind, rms(x, w["input_layernorm.weight"], eps))
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        gate = F.silu(normed @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    tied = exact["model.embed_tokens.weight"]
    return rms(x, exact["model.norm.weight"], eps) @ exact.get("lm_head.weight", tied).T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(config: Config, w: Weights, kind: str, x: Tensor) -> Tensor:
    """Of queries to the keys of a window, or of all tokens so far."""
    count, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] // count
    window = config["efficient_attention_config"]["swa"]["window_size"] if kind == "swa" else len(x)

    def project(name: str, heads: int) -> Tensor:
        return (x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]).unflatten(1, (heads, -1))

    q, k = (turned(project(n, h), config) for n, h in (("q", count), ("k", groups)))
    v = project("v", groups)
    outs = []
    for t in range(len(x)):
        first = max(t - window + 1, 0)
        for head in range(count):
            group = head * groups // count
            scores = k[first : t + 1, group] @ q[t, head] / math.sqrt(width)
            outs.append(scores.softmax(0) @ v[first : t + 1, group])
    return torch.stack(outs).view(len(x), -1) @ w["o_proj.weight"].T


def turned(x: Tensor, config: Config) -> Tensor:
    """Rotate dim i of each head [T, H, D] with dim i + D / 2."""
    half = x.shape[-1] // 2
    out = x.clone()
    for t in range(len(x)):
        for i in range(half):
            angle = t * config["rope_theta"] ** (-i / half)
            pair = torch.complex(x[t, :, i], x[t, :, i + half]) * cmath.exp(1j * angle)
            out[t, :, i], out[t, :, i + half] = pair.real, pair.imag
    return out


def jet_block(config: Config, w: Weights, kind: str, x: Tensor) -> Tensor:
    """Delta rule of values that each token's own filters convolve."""
    block = config["efficient_attention_config"]["jet"]
    heads, width, taps = block["num_heads"], block["head_dim"], block["conv_size"]
    q, k = (F.silu(x @ w[f"{n}_proj.weight"].T).unflatten(1, (heads, -1)) for n in "qk")
    raw, z = (x @ w[f"{n}_proj.weight"].T for n in "vg")
    name = "dynamic_conv1d.kernel_generator.w"
    hidden = F.silu(x @ w[f"{name}1.weight"].T)
    filters = (hidden @ w[f"{name}2.weight"].T + w[f"{name}2.bias"]).unflatten(1, (-1, taps))
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    rate = w["A_log"].exp()
    decay = (-rate * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])).exp()
    values = w["o_norm.weight"].shape[0]
    state = x.new_zeros(heads, values, width)
    outs = []
    for t in range(len(x)):
        mixed = sum(
            filters[t, :, taps - 1 - back] * raw[t - back] for back in range(min(taps, t + 1))
        )
        v = F.silu(mixed).unflatten(0, (heads, -1))
        for head in range(heads):
            query, key = (
                part[t, head] / (part[t, head].square().sum() + 1e-6).sqrt() for part in (q, k)
            )
            state[head] *= decay[t, head]
            wrong = v[head] - state[head] @ key
            state[head] += beta[t, head] * torch.outer(wrong, key)
            outs.append(state[head] @ query / math.sqrt(width))
    normed = rms(torch.stack(outs), w["o_norm.weight"], float(block["norm_eps"]))
    return (normed.view(len(x), -1) * F.silu(z)) @ w["o_proj.weight"].T
