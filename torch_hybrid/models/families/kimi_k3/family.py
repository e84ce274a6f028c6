"""The family of Kimi-K3, and its layers made of the modules of its published layout."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.layers.block_residual import BlockResidual
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.family import (
    Family,
    Swap,
    latent_spec,
    require,
    require_fields,
    weights_of,
)
from torch_hybrid.models.kimi_delta import kimi_delta_mixer, kimi_delta_specs
from torch_hybrid.models.transformers_hooks import LinearAttentionPairAdapter
from torch_hybrid.specs import KimiDeltaSpec, LayerSpec

Streams = tuple[Tensor, Tensor]  # the present block's sum [1, T, dim], all others' [1, T, B, dim]


def _mixer(module: Any, spec: KimiDeltaSpec) -> KimiDeltaAttention:
    gate = module.forget_gate
    rows = weights_of(
        module.q_proj, module.k_proj, module.v_proj, gate.f_a_proj, module.g_proj, module.b_proj
    )
    rank = gate.f_a_proj.out_features
    mixer = kimi_delta_mixer(module, spec, rows, gate_rank=rank, has_full_gate=True)
    mixer.f_b_proj = gate.f_b_proj
    return mixer


def _residual(projection: Any, norm: Any, num_blocks: int, num_known: int) -> BlockResidual:
    """Make the mix of the sums of blocks, the first ``num_known`` of which are complete."""
    return BlockResidual(
        projection.weight, num_blocks, num_known, eps=norm.variance_epsilon, weight=norm.weight
    )


class DecoderLayer(nn.Module):
    """A decoder layer that takes the sums of earlier blocks of layers, and hands them on.

    Args:
        layer: the model's layer, whose modules are taken.
        number: index of the layer in the model.
        blocks_of: number of layers in a block.
        num_blocks: number of blocks in the model.
    """

    def __init__(self, layer: Any, number: int, blocks_of: int, num_blocks: int) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        block, place = divmod(number, blocks_of)
        self.begins_block = place == 0
        mix = layer.self_attention_res_proj, layer.self_attention_res_norm, num_blocks
        self.attention_input = _residual(*mix, block + (place > 0)) if number > 0 else None
        self.mlp_input = _residual(layer.mlp_res_proj, layer.mlp_res_norm, num_blocks, block + 1)
        numbers = torch.arange(num_blocks, dtype=torch.int64, device=self.mlp_input.query.device)
        self.own_block = nn.Buffer((numbers == block)[:, None], persistent=False)

    def forward(self, streams: Tensor | Streams, *, step: LayerStep) -> Streams:
        """Run the layer on embeddings [1, T, dim], or on the streams of the layer before."""
        if self.attention_input is None:
            assert isinstance(streams, Tensor)
            present, blocks = streams, streams.new_zeros(())
            x = present
        else:
            present, blocks = streams
            [x] = self.attention_input(blocks, present)
        dtype = present.dtype
        total, _ = self.self_attn(self.input_layernorm(x.to(dtype)), attention_mask=None, step=step)
        if self.begins_block:
            blocks = torch.where(self.own_block, present[..., None, :], blocks)
        else:
            total = present + total
            blocks = blocks.view_as(blocks)  # a value of this layer: the next one is alike by that
        [x] = self.mlp_input(blocks, total)
        return total + self.mlp(self.post_attention_layernorm(x.to(dtype))), blocks


class _FinalNorm(nn.Module):
    """The mix of the last layer's streams, and its norm."""

    def __init__(self, residual: BlockResidual, norm: nn.Module) -> None:
        super().__init__()
        self.residual, self.norm = residual, norm

    def forward(self, streams: Streams) -> Tensor:
        """Mix and norm the streams to [1, T, dim]."""
        present, blocks = streams
        [mixed] = self.residual(blocks, present)
        normed: Tensor = self.norm(mixed.to(present.dtype))
        return normed


class KimiK3Family(Family):
    model_types = ("kimi_k3", "kimi_k3_text")
    hf_taken_modules = ("_res_proj",)
    swaps: ClassVar = {
        "kimi_delta_attention": Swap(
            attribute="self_attn", make=_mixer, adapter=LinearAttentionPairAdapter
        )
    }

    def specs(self, config: Any) -> list[LayerSpec]:
        require_fields(
            config,
            mla_use_nope=True,
            mla_use_output_gate=True,
            latent_moe_use_norm=True,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            rope_scaling=None,
            attention_bias=False,
        )
        linear = config.linear_attn_config
        name = "linear_attn_config.use_full_rank_gate"
        require(config, name, linear.get("use_full_rank_gate", False), [True])
        bounds = config.activation_situ_beta, config.activation_situ_linear_beta
        for name in ("activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size"):
            value = getattr(config, name)
            require(config, name, bool(value) and value > 0, [True])
        assert all(bounds)
        # The "rope" dims of queries and keys exist, but no rotary embedding is applied to them.
        return kimi_delta_specs(
            config, latent_spec(config, rope={}), gate_lower_bound=linear.get("gate_lower_bound")
        )

    def backbone(self, model: Any) -> Backbone:
        """Put layers of ours around the modules of the model's."""
        blocks_of = model.config.attn_res_block_size
        num_blocks = -(-len(model.layers) // blocks_of)
        layers = [
            DecoderLayer(layer, number, blocks_of, num_blocks)
            for number, layer in enumerate(model.layers)
        ]
        last = model.output_attn_res_proj, model.output_attn_res_norm, num_blocks, num_blocks
        return Backbone(model.embed_tokens, layers, _FinalNorm(_residual(*last), model.norm))

    def experts(self, module: Any) -> FusedExperts:
        return FusedExperts(module.gate_up_proj, module.down_proj, softcaps=module.softcaps)

    def register(self) -> None:
        from torch_hybrid.models.families.kimi_k3 import classes  # noqa: F401 (registers them)
