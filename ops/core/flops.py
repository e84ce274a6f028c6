"""FLOPs of each op for ``torch.utils.flop_counter``: multiplications and additions of its products.

Lengths are data, and a counter sees only shapes. Paged attention counts as if every sequence filled
its row of the page table, ragged attention as if all sequences were equally long. Neither counts
causal masks, as torch's own formulas do not. A recurrence counts what it needs token by token,
whichever form runs. Copies and element-wise operations count nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import torch

Shape = Sequence[int]


def linear(x: Shape, weights: Sequence[Shape], biases: object, **_: Any) -> int:
    """Count one GEMM for each weight."""
    return 2 * x[0] * x[1] * sum(weight[0] for weight in weights)


def head_linear(x: Shape, weight: Shape, **_: Any) -> int:
    """Count one GEMM for each head."""
    return 2 * x[0] * x[1] * x[2] * weight[1]


def fused_experts(
    x: Shape, expert_ids: Shape, expert_weights: Shape, up: Shape, down: Shape, **_: Any
) -> int:
    """Count two GEMMs for each expert that a token takes."""
    numbers = x[1] // up[2] if up[2] else 1  # that lie in an element of the weights
    return 2 * x[0] * expert_ids[1] * numbers * (up[1] * up[2] + down[1] * down[2])


def paged_attention(
    q: Shape,
    k: Shape,
    v: Shape,
    kv: Shape,
    cu_seqlens: Shape,
    seq_lens: Shape,
    page_table: Shape,
    slot_mapping: Shape,
    *,
    window: int = 0,
    **_: Any,
) -> int:
    """Count logits and outputs of every query, with as many keys as a page table's row names or a
    window holds."""
    num_keys = page_table[1] * kv[2]
    num_keys = min(num_keys, window) if window else num_keys
    return 4 * q[0] * q[1] * q[2] * num_keys


def latent_attention(
    q_latent: Shape,
    q_rope: Shape,
    latent: Shape,
    k_rope: Shape,
    pool: Shape,
    cu_seqlens: Shape,
    seq_lens: Shape,
    page_table: Shape,
    slot_mapping: Shape,
    **_: Any,
) -> int:
    """Count logits and outputs like ``paged_attention``: keys are latents and rope parts, values
    latents."""
    num_keys = page_table[1] * pool[1]
    return 2 * q_latent[0] * q_latent[1] * num_keys * (pool[2] + q_latent[2])


def ragged_attention(
    q: Shape, k: Shape, v: Shape, cu_seqlens: Shape, cu_seqlens_k: Shape, **_: Any
) -> int:
    """Count logits and outputs of every query with its sequence's share of the keys."""
    num_seqs = max(cu_seqlens[0] - 1, 1)
    return 2 * q[0] * q[1] * (q[2] + v[2]) * k[0] // num_seqs


def causal_conv1d(x: Shape, weight: Shape, *args: Any, **_: Any) -> int:
    """Count every filter tap of every channel."""
    return 2 * x[0] * weight[0] * weight[1]


def delta_rule(
    q: Shape, k: Shape, v: Shape, g: Shape, beta: Shape, state: Shape, *args: Any, **_: Any
) -> int:
    """Count three products with the state a token: read by key, write, read by query."""
    return 6 * v[0] * state[1] * state[2] * state[3]


def trained_delta_rule(q: Shape, k: Shape, v: Shape, *_: Any, **_options: Any) -> int:
    """Count the products with the state of a forward."""
    return 6 * v[0] * v[1] * v[2] * k[2]


def delta_rule_backward(q: Shape, k: Shape, v: Shape, *_: Any, **_options: Any) -> int:
    """Count two products with the state again, and the gradients of three."""
    return 16 * v[0] * v[1] * v[2] * k[2]


def delta_step(
    qkv: Shape,
    z: Shape,
    b: Shape,
    a: Shape,
    conv_weight: Shape,
    conv_bias: object,
    A_log: Shape,
    dt_bias: Shape,
    norm_weight: Shape,
    conv_state: Shape,
    state: Shape,
    *args: Any,
    **_: Any,
) -> int:
    """Count a step's convolution and delta rule."""
    return causal_conv1d(qkv, conv_weight) + 6 * qkv[0] * state[1] * state[2] * state[3]


def ssd(
    q: Shape, k: Shape, v: Shape, g: Shape, dt: Shape, D: Shape, state: Shape, *args: Any, **_: Any
) -> int:
    """Count two products with the state a token: write, read by query."""
    return 4 * v[0] * state[1] * state[2] * state[3]


def ssd_step(
    xBC: Shape,
    z: object,
    dt: Shape,
    conv_weight: Shape,
    conv_bias: object,
    A_log: Shape,
    dt_bias: Shape,
    D: Shape,
    norm_weight: object,
    conv_state: Shape,
    state: Shape,
    *args: Any,
    **_: Any,
) -> int:
    """Count a step's convolution and recurrence."""
    return causal_conv1d(xBC, conv_weight) + 4 * xBC[0] * state[1] * state[2] * state[3]


def lightning_step(
    qkv: Shape,
    gate: object,
    q_norm_weight: object,
    k_norm_weight: object,
    cos: object,
    sin: object,
    slopes: Shape,
    norm_weight: object,
    state: Shape,
    *args: Any,
    **_: Any,
) -> int:
    """Count a step's recurrence."""
    return 4 * qkv[0] * state[1] * state[2] * state[3]


def selective_scan(
    x: Shape,
    dt: object,
    B: object,
    C: object,
    z: object,
    A_log: Shape,
    *args: Any,
    **_: Any,
) -> int:
    """Count two products with every channel's state a token: write, read."""
    return 4 * x[0] * A_log[0] * A_log[1]


def nothing(*args: Any, **_: Any) -> int:
    """Count 0: the op has no products."""
    return 0


def select_blocks(
    q: Shape,
    keys: Shape,
    weights: object,
    block_keys: Shape,
    cu_seqlens: Shape,
    seq_lens: Shape,
    page_table: Shape,
    *_: Any,
    **_options: Any,
) -> int:
    """Count the scores of every query with all blocks that a page table's row names."""
    return 2 * q[0] * q[1] * q[2] * page_table[1] * block_keys[1]


def pooled_selection_step(
    q: Shape,
    keys: Shape,
    gates: Shape,
    bias: Shape,
    weights: object,
    state: Shape,
    block_keys: Shape,
    cu_seqlens: Shape,
    seq_lens: Shape,
    page_table: Shape,
    *_: Any,
    **_options: Any,
) -> int:
    """Count the scores like ``select_blocks``."""
    return select_blocks(q, keys, weights, block_keys, cu_seqlens, seq_lens, page_table)


def block_attention(
    q: Shape,
    k: Shape,
    v: Shape,
    kv: Shape,
    blocks: Shape,
    *_: Any,
    block_size: int,
    **_options: Any,
) -> int:
    """Count logits and outputs of every query with as many blocks as it may see."""
    return 4 * q[0] * q[1] * q[2] * blocks[1] * block_size


FORMULAS: dict[str, Callable[..., int]] = {
    "linear": linear,
    "head_linear": head_linear,
    "fused_experts": fused_experts,
    "paged_attention": paged_attention,
    "paged_attention_with_lse": paged_attention,
    "select_blocks": select_blocks,
    "pooled_selection_step": pooled_selection_step,
    "block_attention": block_attention,
    "ngram_embedding": nothing,
    "gated_pooling": nothing,
    "previous_rows": nothing,
    "latent_attention": latent_attention,
    "latent_attention_with_lse": latent_attention,
    "store_latents": nothing,
    "gather_latents": nothing,
    "ragged_attention_with_lse": ragged_attention,
    "merge_states": nothing,
    "causal_conv1d": causal_conv1d,
    "causal_conv1d_forward": causal_conv1d,
    "causal_conv1d_backward": lambda *args, **_: 3 * causal_conv1d(*args),
    "gated_delta_rule_forward": trained_delta_rule,
    "gated_delta_rule_backward": delta_rule_backward,
    "kimi_delta_attention_forward": trained_delta_rule,
    "kimi_delta_attention_backward": delta_rule_backward,
    "recurrent_gated_delta_rule": delta_rule,
    "chunk_gated_delta_rule": delta_rule,
    "gated_delta_step": delta_step,
    "recurrent_kimi_delta_attention": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "kimi_delta_step": delta_step,
    "recurrent_ssd": ssd,
    "chunk_ssd": ssd,
    "ssd_step": ssd_step,
    "lightning_step": lightning_step,
    "rg_lru": nothing,
    "wkv": nothing,
    "recurrent_selective_scan": selective_scan,
    "chunk_selective_scan": selective_scan,
    "state_copy": nothing,
    "draw_tokens": nothing,
    "route": nothing,
    "power_sum": nothing,
    "top_k": nothing,
}

_COUNTER = "torch.utils.flop_counter"
_ops: dict[str, torch._ops.OpOverloadPacket] = {}


def register_formula(op: torch._ops.OpOverloadPacket, name: str) -> None:
    """Have the counter count ``op``: now, or once it is imported.

    The counter imports triton, which takes longer than all of this package; few need it.
    """
    _ops[name] = op
    if _COUNTER in sys.modules:
        _register(name)


def _register(name: str) -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(_ops[name])(FORMULAS[name])


class _AfterImport(MetaPathFinder):
    """Registers all formulas when the counter is imported, and is then gone."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            for known in _ops:
                _register(known)

        spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _AfterImport())
