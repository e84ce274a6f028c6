"""Kimi-K3's text part in float64, token by token, from a config and weights of the published
layout. It shares nothing with the package: recurrences, routers and experts are loops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE

Weights = dict[str, Tensor]
Config = dict[str, Any]

_LINEAR: Config = {
    "head_dim": 12,
    "num_heads": 3,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3, 5],
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
}
# As it is published, but for sizes: three blocks of layers, the last one of a layer alone.
TEXT: Config = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "situ",
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 24,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_expert_hidden_size": 40,
    "latent_moe_use_norm": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": _LINEAR,
    "attn_res_block_size": 2,
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 2.5,
    "num_nextn_predict_layers": 0,
}
CONFIG: Config = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"model_type": "kimi_k3_vision", "patch_size": 14},
    "torch_dtype": "float32",
}
PREFIX = "language_model."


def shapes(text: Config) -> dict[str, list[int]]:
    """Every published weight of the text part, and its shape."""
    dim, vocab = text["hidden_size"], text["vocab_size"]
    found = {
        "model.embed_tokens.weight": [vocab, dim],
        "model.norm.weight": [dim],
        "model.output_attn_res_norm.weight": [dim],
        "model.output_attn_res_proj.weight": [1, dim],
        "lm_head.weight": [vocab, dim],
    }
    for number in range(text["num_hidden_layers"]):
        is_linear = number + 1 in text["linear_attn_config"]["kda_layers"]
        mixer = _kda(text) if is_linear else _mla(text)
        layer = {f"self_attn.{name}": shape for name, shape in mixer.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{name}.weight"] = [dim]
        for name in ("self_attention_res", "mlp_res"):
            layer |= {f"{name}_norm.weight": [dim], f"{name}_proj.weight": [1, dim]}
        if number < text["first_k_dense_replace"]:
            layer |= _mlp("mlp", dim, text["intermediate_size"])
        else:
            layer |= {f"block_sparse_moe.{name}": shape for name, shape in _moe(text).items()}
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{PREFIX}{name}": shape for name, shape in found.items()}


def _kda(text: Config) -> dict[str, list[int]]:
    dim, linear = text["hidden_size"], text["linear_attn_config"]
    heads, width = linear["num_heads"], linear["head_dim"]
    channels = heads * width
    rows = {"q": channels, "k": channels, "v": channels, "g": channels, "b": heads, "f_a": width}
    return {
        **{f"{name}_proj.weight": [size, dim] for name, size in rows.items()},
        **{f"{n}_conv1d.weight": [channels, 1, linear["short_conv_kernel_size"]] for n in "qkv"},
        "f_b_proj.weight": [channels, width],
        "A_log": [heads + 1],  # padded by heads that are none
        "dt_bias": [channels],
        "o_norm.weight": [width],
        "o_proj.weight": [dim, channels],
    }


def _mla(text: Config) -> dict[str, list[int]]:
    dim, heads, low = text["hidden_size"], text["num_attention_heads"], text["q_lora_rank"]
    nope, rope, value = (text[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = text["kv_lora_rank"]
    return {
        "q_a_proj.weight": [low, dim],
        "q_a_layernorm.weight": [low],
        "q_b_proj.weight": [heads * (nope + rope), low],
        "kv_a_proj_with_mqa.weight": [rank + rope, dim],
        "kv_a_layernorm.weight": [rank],
        "kv_b_proj.weight": [heads * (nope + value), rank],
        "g_proj.weight": [heads * value, dim],
        "o_proj.weight": [dim, heads * value],
    }


def _mlp(name: str, dim: int, width: int) -> dict[str, list[int]]:
    rows = {f"{name}.{part}_proj.weight": [width, dim] for part in ("gate", "up")}
    return {**rows, f"{name}.down_proj.weight": [dim, width]}


def _moe(text: Config) -> dict[str, list[int]]:
    dim, width, latent = (
        text[f] for f in ("hidden_size", "moe_intermediate_size", "routed_expert_hidden_size")
    )
    found = {
        "gate.weight": [text["num_experts"], dim],
        "gate.e_score_correction_bias": [text["num_experts"]],
        "routed_expert_down_proj.weight": [latent, dim],
        "routed_expert_norm.weight": [latent],
        "routed_expert_up_proj.weight": [dim, latent],
        **_mlp("shared_experts", dim, width * text["num_shared_experts"]),
    }
    for expert in range(text["num_experts"]):
        found |= {f"experts.{expert}.w{i}.weight": [width, latent] for i in (1, 3)}
        found[f"experts.{expert}.w2.weight"] = [latent, width]
    return found


def make_weights(text: Config, seed: int) -> Weights:
    """Drawn so that activations keep their scale and no weight is neutral."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: list[int]) -> Tensor:
        normal = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 + 0.2 * normal
        if name.endswith("correction_bias"):
            return 0.1 * normal
        if name.endswith(("A_log", "dt_bias")):  # decays over some 2 to 20 tokens
            return 0.3 * normal - 3.0 * name.endswith("dt_bias")
        return normal * (0.4 if "conv1d" in name else shape[-1] ** -0.5)

    return {name: draw(name, shape) for name, shape in shapes(text).items()}


def reference_logits(text: Config, weights: Weights, tokens: list[int]) -> Tensor:
    """[tokens, vocab] logits of one text."""
    exact = {name.removeprefix(PREFIX): weight.double() for name, weight in weights.items()}
    present, blocks = exact["model.embed_tokens.weight"][tokens], []
    for number in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        w = {n.removeprefix(prefix): each for n, each in exact.items() if n.startswith(prefix)}
        own = {n.removeprefix("self_attn."): each for n, each in w.items() if "self_attn." in n}
        is_linear = number + 1 in text["linear_attn_config"]["kda_layers"]
        x = mixed(text, [*blocks, present], w, "self_attention_res") if blocks else present
        if number % text["attn_res_block_size"] == 0:
            blocks, present = [*blocks, present], torch.zeros_like(present)
        x = rms(text, x, w["input_layernorm.weight"])
        present = present + (kda if is_linear else mla)(text, own, x)
        x = mixed(text, [*blocks, present], w, "mlp_res")
        x = rms(text, x, w["post_attention_layernorm.weight"])
        is_dense = number < text["first_k_dense_replace"]
        present = present + (mlp(text, w, "mlp", x) if is_dense else moe(text, w, x))
    x = mixed(text, [*blocks, present], exact, "model.output_attn_res")
    return rms(text, x, exact["model.norm.weight"]) @ exact["lm_head.weight"].T


def rms(text: Config, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    eps = text["rms_norm_eps"] if eps is None else eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mixed(text: Config, sums: list[Tensor], w: Weights, name: str) -> Tensor:
    """The sums of blocks, each token's by the softmax of their normed products with a query."""
    query, weight = w[f"{name}_proj.weight"][0], w[f"{name}_norm.weight"]
    scores = torch.stack([rms(text, each, weight) @ query for each in sums])
    return sum(c[:, None] * each for c, each in zip(scores.softmax(0), sums, strict=True))


def kda(text: Config, w: Weights, x: Tensor) -> Tensor:
    linear = text["linear_attn_config"]
    heads, width, taps = (linear[f] for f in ("num_heads", "head_dim", "short_conv_kernel_size"))

    def convolved(name: str) -> Tensor:
        raw, filters = x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0]
        outs = [
            sum(filters[:, taps - 1 - back] * raw[t - back] for back in range(min(taps, t + 1)))
            for t in range(len(x))
        ]
        return F.silu(torch.stack(outs)).unflatten(1, (heads, width))

    q, k, v = map(convolved, "qkv")
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    step = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]
    rate = w["A_log"][:heads].exp()[:, None]
    bound = linear["gate_lower_bound"]
    decay = (bound * (rate * step.unflatten(1, (heads, width))).sigmoid()).exp()
    state = x.new_zeros(heads, width, width)
    outs = []
    for t in range(len(x)):
        for head in range(heads):
            query, key = (
                part[t, head] / (part[t, head].square().sum() + 1e-6).sqrt() for part in (q, k)
            )
            state[head] *= decay[t, head]
            wrong = v[t, head] - state[head] @ key
            state[head] += beta[t, head] * torch.outer(wrong, key)
            outs.append(state[head] @ query / math.sqrt(width))
    normed = rms(text, torch.stack(outs), w["o_norm.weight"]).view(len(x), -1)
    return (normed * (x @ w["g_proj.weight"].T).sigmoid()) @ w["o_proj.weight"].T


def mla(text: Config, w: Weights, x: Tensor) -> Tensor:
    heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    low = rms(text, x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6)
    q = (low @ w["q_b_proj.weight"].T).unflatten(1, (heads, -1))
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, rope], dim=1)
    latent = rms(text, latent, w["kv_a_layernorm.weight"], 1e-6)
    kv = (latent @ w["kv_b_proj.weight"].T).unflatten(1, (heads, -1))
    key, value = kv.split([nope, text["v_head_dim"]], dim=-1)
    outs = []
    for t in range(len(x)):
        for head in range(heads):
            scores = key[: t + 1, head] @ q[t, head, :nope] + shared[: t + 1] @ q[t, head, nope:]
            chances = (scores / math.sqrt(nope + rope)).softmax(0)
            outs.append(chances @ value[: t + 1, head])
    gate = (x @ w["g_proj.weight"].T).sigmoid()
    return (torch.stack(outs).view(len(x), -1) * gate) @ w["o_proj.weight"].T


def situ(text: Config, gate: Tensor, up: Tensor) -> Tensor:
    first, second = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    return first * (gate / first).tanh() * gate.sigmoid() * second * (up / second).tanh()


def mlp(text: Config, w: Weights, name: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return situ(text, x @ gate.T, x @ up.T) @ down.T


def moe(text: Config, w: Weights, x: Tensor) -> Tensor:
    w = {n.removeprefix("block_sparse_moe."): each for n, each in w.items()}
    return torch.stack([_moe_token(text, w, token) for token in x]) + mlp(
        text, w, "shared_experts", x
    )


def _moe_token(text: Config, w: Weights, x: Tensor) -> Tensor:
    scores, count = (w["gate.weight"] @ x).sigmoid(), text["num_experts_per_token"]
    biased = scores + w["gate.e_score_correction_bias"]
    ordered = biased.sort(descending=True)
    assert ordered.values[count - 1] - ordered.values[count] > 3e-5, "near tie: another seed"
    chosen = ordered.indices[:count].tolist()
    latent = w["routed_expert_down_proj.weight"] @ x
    out = torch.zeros_like(latent)
    for expert in chosen:
        gate, down, up = (w[f"experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
        out = out + scores[expert] / scores[chosen].sum() * (
            down @ situ(text, gate @ latent, up @ latent)
        )
    out = rms(text, out * text["routed_scaling_factor"], w["routed_expert_norm.weight"])
    return w["routed_expert_up_proj.weight"] @ out
