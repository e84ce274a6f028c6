"""ZAYA: attention of convolved queries and keys, and experts by routers that read one another.

The router's state goes from layer to layer within a step, and is not kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.convolved_projection import ConvolvedProjection
from torch_hybrid.models.family import ROPE_TYPES, Family, Swap, listed, parameter, require
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.ops.causal_conv1d.op import MAX_WIDTH
from torch_hybrid.specs import AttentionSpec, ConvolvedProjectionSpec, LayerSpec


def _projection(module: Any, spec: ConvolvedProjectionSpec) -> ConvolvedProjection:
    with on_meta():
        ours = ConvolvedProjection(module.hidden_size, spec)

    projections = (module.q_proj, module.k_proj, module.v_proj_current, module.v_proj_delayed)
    ours.in_proj.weight = parameter(torch.cat([each.weight.detach() for each in projections]))
    channels, heads = module.conv_qk_depthwise, module.conv_qk_grouped
    ours.set_channels(channels.weight.detach().squeeze(1), channels.bias.detach())
    by_head = heads.weight.detach().unflatten(0, (spec.num_heads, spec.head_dim))
    ours.heads.weight = parameter(by_head.transpose(1, 3).flatten(1, 2))
    ours.heads.bias = parameter(heads.bias.detach().unflatten(0, (spec.num_heads, spec.head_dim)))
    return ours


class _ProjectionAdapter(LinearAttentionAdapter):
    """Our projection in the place of attention's; the step comes as its mask of tokens."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, past_key_values: None, conv_mask: LayerStep
    ) -> tuple[Tensor, ...]:
        """Map [1, T, dim] to q, k and v [1, T, heads, head_dim]."""
        _, plan, cache = conv_mask.mixer(self.kind)
        outputs: tuple[Tensor, ...] = self.mixer(hidden_states[0], plan, cache)  # type: ignore[arg-type]
        return tuple(output[None] for output in outputs)


def _hand_step(
    _attention: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand attention's projection the step as its mask of tokens, its only option."""
    return args, {**options, "attention_mask": {"conv": options["step"]}}


class ZayaFamily(Family):
    model_types = ("zaya",)
    swaps: ClassVar = {
        "convolved_projection": Swap(
            attribute="qkv_proj", make=_projection, adapter=_ProjectionAdapter
        )
    }

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        require(config, "attention_bias", config.attention_bias, [False])
        heads = {
            "num_q_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        projection = ConvolvedProjectionSpec(
            **heads, channel_width=config.cca_time0, head_width=config.cca_time1
        )
        if projection.conv_width > MAX_WIDTH:
            raise UnsupportedError(
                f"{config.model_type}: convolutions of queries and keys must see at most "
                f"{MAX_WIDTH} tokens, got {projection.conv_width} of config fields "
                f"cca_time0 {config.cca_time0} and cca_time1 {config.cca_time1}"
            )

        def attention(window: int) -> tuple[LayerSpec, ...]:
            scale = config.head_dim**-0.5
            return projection, AttentionSpec(**heads, scale=scale, window=window)

        known = {"hybrid": attention(0)}
        if config.sliding_window:
            known["hybrid_sliding"] = attention(config.sliding_window)
        found = listed(config, known)
        for layer_type in {*config.layer_types}:
            rope_type = config.rope_parameters[layer_type]["rope_type"]
            require(config, f"rope_parameters.{layer_type}.rope_type", rope_type, ROPE_TYPES)
        return found

    def backbone(self, model: Any) -> None:
        for layer in model.layers:
            layer.self_attn.register_forward_pre_hook(_hand_step, with_kwargs=True)
