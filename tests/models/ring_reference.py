"""Ring-2.5 in float64, token by token, from a config and weights of the published layout.

It shares nothing with the package: rotary embedding is multiplication by complex numbers, the
recurrence and the router are loops, attention expands all latents.
"""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]


def reference_logits(config: Config, weights: Weights, tokens: list[int]) -> Tensor:
    """[tokens, vocab] logits of one text."""
    exact = {name: weight.double() for name, weight in weights.items()}
    x = exact["model.word_embeddings.weight"][tokens]
    for layer_id in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer_id}."
        layer = {
            name.removeprefix(prefix): weight
            for name, weight in exact.items()
            if name.startswith(prefix)
        }
        mixer = mla if is_mla(config, layer_id) else lightning
        x = x + mixer(config, layer, layer_id, rms(x, layer["input_layernorm.weight"], config))
        normed = rms(x, layer["post_attention_layernorm.weight"], config)
        is_dense = layer_id < config["first_k_dense_replace"]
        x = x + (mlp(layer, "mlp", normed) if is_dense else moe(config, layer, normed))
    head = "model.word_embeddings.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return rms(x, exact["model.norm.weight"], config) @ exact[head].T


def is_mla(config: Config, layer_id: int) -> bool:
    group, count = config["layer_group_size"], config["num_hidden_layers"]
    return layer_id % group == group - 1 or layer_id >= count - count % group


def rms(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    return rms_eps(x, weight, config["rms_norm_eps"])


def rms_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def slope(head: int, num_heads: int) -> float:
    """Of ALiBi: a geometric series for a power of two, its refinement's odd terms beyond."""
    power = 2 ** int(math.log2(num_heads))
    if head < power:
        return 2.0 ** (-8 * (head + 1) / power)
    return 2.0 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def frequencies(config: Config, dim: int) -> tuple[list[float], float]:
    """Radians per position of each pair of dims, and the factor on rotated vectors."""
    theta, scaling = config["rope_theta"], config.get("rope_scaling")
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if not scaling:
        return plain, 1.0
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def bound(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(bound(scaling["beta_fast"])), 0)
    high = min(math.ceil(bound(scaling["beta_slow"])), dim - 1)
    slowed = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    stretched = [f * (1 - s) + f / factor * s for f, s in zip(plain, slowed, strict=True)]
    scales = [0.1 * scaling[m] * math.log(factor) + 1 for m in ("mscale", "mscale_all_dim")]
    return stretched, scales[0] / scales[1]


def turn(x: Tensor, pairs: list[tuple[int, int]], config: Config, position: int) -> Tensor:
    """Rotate the pairs of dims of x [..., D]; the other dims stay."""
    out = x.clone()
    freqs, amplitude = frequencies(config, 2 * len(pairs))
    for (i, j), freq in zip(pairs, freqs, strict=True):
        rotated = torch.complex(x[..., i], x[..., j]) * cmath.exp(1j * freq * position) * amplitude
        out[..., i], out[..., j] = rotated.real, rotated.imag
    return out


def lightning(config: Config, w: Weights, layer_id: int, x: Tensor) -> Tensor:
    count, width = config["num_attention_heads"], config["head_dim"]
    qkv = x @ w["attention.query_key_value.weight"].T
    if config.get("linear_silu"):
        qkv = F.silu(qkv)
    q, k, v = (part.unflatten(-1, (count, width)) for part in qkv.chunk(3, dim=-1))
    if config["use_qk_norm"]:
        q = rms(q, w["attention.query_layernorm.weight"], config)
        k = rms(k, w["attention.key_layernorm.weight"], config)
    half = int(width * config["partial_rotary_factor"]) // 2
    pairs = [(i, i + half) for i in range(half)]
    factor = 1 - layer_id / (config["num_hidden_layers"] - 1) + 1e-5
    outs = []
    state = x.new_zeros(count, width, width)
    decay = torch.tensor([math.exp(-slope(h, count) * factor) for h in range(count)]).to(x)
    for t in range(len(x)):
        qt, kt = turn(q[t], pairs, config, t), turn(k[t], pairs, config, t)
        state = decay[:, None, None] * state + v[t][:, :, None] * kt[:, None, :]
        outs.append(torch.einsum("hvk,hk->hv", state, qt) / math.sqrt(width))
    groups = torch.stack(outs).flatten(1).unflatten(-1, (config["group_norm_size"], -1))
    weight = w["attention.g_norm.weight"].unflatten(0, (config["group_norm_size"], -1))
    normed = rms(groups, weight, config).flatten(1)
    gate = (x @ w["attention.g_proj.weight"].T).sigmoid()
    return (normed * gate) @ w["attention.dense.weight"].T


def mla(config: Config, w: Weights, layer_id: int, x: Tensor) -> Tensor:
    count, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank"):
        low = rms_eps(
            x @ w["attention.q_a_proj.weight"].T, w["attention.q_a_layernorm.weight"], 1e-6
        )
        q = low @ w["attention.q_b_proj.weight"].T
    else:
        q = x @ w["attention.q_proj.weight"].T
    q = q.unflatten(-1, (count, nope + rope))
    latent, k_rope = (x @ w["attention.kv_a_proj_with_mqa.weight"].T).split([rank, rope], dim=-1)
    latent = rms_eps(latent, w["attention.kv_a_layernorm.weight"], 1e-6)
    kv = (latent @ w["attention.kv_b_proj.weight"].T).unflatten(-1, (count, -1))
    key, value = kv.split([nope, config["v_head_dim"]], dim=-1)
    pairs = [(2 * i, 2 * i + 1) for i in range(rope // 2)]
    turned = torch.stack([turn(k_rope[t], pairs, config, t) for t in range(len(x))])
    scale = (nope + rope) ** -0.5
    if config.get("rope_scaling"):
        yarn = config["rope_scaling"]
        scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    outs = []
    for t in range(len(x)):
        q_rope = turn(q[t, :, nope:], pairs, config, t)
        scores = torch.einsum("hd,shd->hs", q[t, :, :nope], key[: t + 1])
        scores = (scores + q_rope @ turned[: t + 1].T) * scale
        outs.append(torch.einsum("hs,shv->hv", scores.softmax(-1), value[: t + 1]).flatten())
    return torch.stack(outs) @ w["attention.dense.weight"].T


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe(config: Config, w: Weights, x: Tensor) -> Tensor:
    return torch.stack([_moe_token(config, w, token) for token in x])


def _moe_token(config: Config, w: Weights, x: Tensor) -> Tensor:
    scores = (w["mlp.gate.weight"] @ x).sigmoid()
    biased = scores + w["mlp.gate.expert_bias"]
    assert near_tie(config, biased.detach()) > 3e-5, "routers have a near tie: take another seed"
    chosen = choose(config, biased.tolist())
    total = scores[chosen].sum()
    out = mlp(w, "mlp.shared_experts", x)
    for e in chosen:
        weight = scores[e] / total * config["routed_scaling_factor"]
        out = out + weight * mlp(w, f"mlp.experts.{e}", x)
    return out


def choose(config: Config, biased: list[float]) -> list[int]:
    """The best experts of the best groups, a group being as good as its two best together."""
    size = len(biased) // config["n_group"]

    def group_score(group: int) -> float:
        return sum(sorted(biased[group * size : (group + 1) * size])[-2:])

    groups = sorted(range(config["n_group"]), key=group_score)[-config["topk_group"] :]
    eligible = [group * size + i for group in groups for i in range(size)]
    return sorted(eligible, key=lambda e: biased[e])[-config["num_experts_per_tok"] :]


def near_tie(config: Config, biased: Tensor) -> float:
    """How near the choice for one token is to another one."""
    groups = biased.unflatten(-1, (config["n_group"], -1))
    totals = groups.topk(2, dim=-1).values.sum(-1)
    ordered = totals.sort(descending=True).values
    taken = config["topk_group"]
    gap = math.inf if taken == len(ordered) else float(ordered[taken - 1] - ordered[taken])
    best = totals.topk(taken).indices
    experts = groups[best].flatten().sort(descending=True).values
    k = config["num_experts_per_tok"]
    return min(gap, math.inf if k == len(experts) else float(experts[k - 1] - experts[k]))
