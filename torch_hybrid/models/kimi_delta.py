"""The specs and the mixer that all families with Kimi delta attention and MLA share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from torch_hybrid.models.family import listed, require
from torch_hybrid.specs import KimiDeltaSpec, LatentSpec, LayerSpec


def kimi_delta_specs(
    config: Any, full: LatentSpec, *, gate_lower_bound: float | None
) -> list[LayerSpec]:
    """Return the spec of each layer, from config fields that all these families name alike."""
    linear = kimi_delta_spec(config, gate_lower_bound=gate_lower_bound)
    return listed(config, {"full_attention": full, "linear_attention": linear})


def kimi_delta_spec(config: Any, *, gate_lower_bound: float | None) -> KimiDeltaSpec:
    """Return the spec of the Kimi delta attention layers."""
    require(config, "hidden_act", config.hidden_act, ["silu"])
    return KimiDeltaSpec(
        num_heads=config.linear_num_heads,
        head_k_dim=config.linear_head_dim,
        head_v_dim=config.linear_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        gate_lower_bound=gate_lower_bound,
    )


def kimi_delta_mixer(
    module: Any,
    spec: KimiDeltaSpec,
    rows: Sequence[Tensor],
    *,
    gate_rank: int | None,
    has_full_gate: bool = False,
) -> KimiDeltaAttention:
    """Make our mixer with the weights of a transformers module.

    ``rows`` are the rows of the projections to q, k, v, decay, output gate and b, in that order.
    """
    in_weight = torch.cat(list(rows))
    with on_meta():
        mixer = KimiDeltaAttention(
            in_weight.shape[1], spec, gate_rank=gate_rank, has_full_gate=has_full_gate
        )

    def parameter(weight: Tensor, *shape: int) -> nn.Parameter:
        return nn.Parameter(weight.detach().reshape(shape), requires_grad=False)

    mixer.in_proj.weight = nn.Parameter(in_weight, requires_grad=False)
    mixer.out_proj = module.o_proj
    # Some checkpoints keep the filter in float32; the convolution takes it in its input's dtype.
    conv = module.conv1d.weight.to(in_weight.dtype)
    mixer.conv_weight = parameter(conv, spec.conv_channels, spec.conv_width)
    mixer.A_log = parameter(module.forget_gate.A_log, spec.num_heads)
    mixer.dt_bias = parameter(module.forget_gate.dt_bias, spec.num_heads, spec.head_k_dim)
    mixer.norm_weight = module.o_norm.weight
    return mixer
