"""Inkling: attention with biases by distance alone, to a window in most layers. Convolutions of
keys, values and every branch; experts, of which each token takes some always."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.biased_attention import BiasedAttention, BranchConvolution
from torch_hybrid.models.family import (
    Family,
    Logits,
    Swap,
    TextModel,
    joined_projection,
    listed,
    parameter,
    require,
    require_fields,
    weights_of,
)
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.ops.causal_conv1d.op import MAX_WIDTH, MIN_WIDTH
from torch_hybrid.specs import AttentionSpec, BranchConvolutionSpec, LayerSpec


def layer_specs(
    config: Any, *, scale: Callable[[int], float], sinks: bool = False
) -> list[tuple[LayerSpec, ...]]:
    """Return the specs of each layer: one of two kinds of attention, with its convolutions.

    Args:
        config: config of the text model.
        scale: attention's factor on q k, a function of the width of a head.
        sinks: True where each query has an attention sink of its own.
    """
    if not MIN_WIDTH <= config.conv_kernel_size <= MAX_WIDTH:
        raise UnsupportedError(
            f"{config.model_type}: config field conv_kernel_size must be within {MIN_WIDTH} and "
            f"{MAX_WIDTH}, got {config.conv_kernel_size}"
        )

    def layer(
        num_q_heads: int, num_kv_heads: int, head_dim: int, reach: int, window: int = 0
    ) -> tuple[LayerSpec, ...]:
        attention = AttentionSpec(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale(head_dim),
            window=window,
            reach=reach,
            sinks=sinks,
        )
        convolutions = BranchConvolutionSpec(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            channels=config.hidden_size,
            conv_width=config.conv_kernel_size,
        )
        return attention, convolutions

    window = config.sliding_window_size
    known = {
        "hybrid": layer(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rel_extent,
        ),
        "hybrid_sliding": layer(
            config.swa_num_attention_heads,
            config.swa_num_key_value_heads,
            config.swa_head_dim,
            window,
            window,
        ),
    }
    return listed(config, known)


def _attention(module: Any, spec: AttentionSpec) -> BiasedAttention:
    projections = (module.q_proj, module.k_proj, module.v_proj, module.r_proj)
    convolutions = (module.k_sconv, module.v_sconv)
    taps = [each.conv1d.weight.detach().squeeze(1) for each in convolutions]
    config = module.config
    return BiasedAttention(
        spec,
        in_proj=joined_projection(weights_of(*projections)),
        o_proj=module.o_proj,
        q_norm=module.q_norm,
        k_norm=module.k_norm,
        conv_weight=parameter(torch.cat(taps)),
        profiles=parameter(module.rel_logits_proj.proj.detach().transpose(0, 1).contiguous()),
        log_floor=None if spec.window else config.log_scaling_n_floor,
        log_alpha=config.log_scaling_alpha,
    )


class _AttentionAdapter(LinearAttentionAdapter):
    """Our attention in the place of the model's."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, step: LayerStep, **_options: object
    ) -> tuple[Tensor, None]:
        """Map [1, T, dim] to [1, T, dim] and no attention weights."""
        _, plan, cache = step.mixer(self.kind)
        _, *convolutions = step.mixer(BranchConvolutionSpec.kind)
        return self.mixer(hidden_states[0], plan, cache, *convolutions)[None], None


class _ConvolutionAdapter(LinearAttentionAdapter):
    """Our convolution in the place of a branch's, for a layer that hands it the step alone."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, conv_mask: None = None, **cache: LayerStep
    ) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]; the step comes as the cache, whatever it is called."""
        [step] = cache.values()
        return super().forward(hidden_states, step=step)


class _Mixture(nn.Module):
    """Experts, the last of which every token takes."""

    gate: Any  # transformers' router

    def __init__(self, gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]."""
        x = hidden_states[0]
        _, weights, chosen, shared_weights = self.gate(x)
        num_chosen, num_shared = self.gate.num_experts, shared_weights.shape[1]
        last = num_chosen + num_shared
        shared = torch.arange(num_chosen, last, dtype=chosen.dtype, device=x.device)
        chosen = torch.cat([chosen, shared.expand(x.shape[0], -1)], dim=1)
        out: Tensor = self.experts(x, chosen, torch.cat([weights, shared_weights], dim=1))
        return out[None]


def _branch_convolution(module: Any, branch: str) -> BranchConvolution:
    return BranchConvolution(parameter(module.conv1d.weight.detach().squeeze(1)), branch)


def _mixture(module: Any) -> _Mixture:
    experts, shared = module.experts, module.shared_experts
    gate_up = torch.cat([shared.gate_proj.detach(), shared.up_proj.detach()], dim=1)
    experts.gate_up_proj = parameter(torch.cat([experts.gate_up_proj.detach(), gate_up]))
    down = torch.cat([experts.down_proj.detach(), shared.down_proj.detach()])
    experts.down_proj = parameter(down)
    return _Mixture(module.gate, experts)


@cache
def _text_class() -> type[nn.Module]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.inkling import modeling_inkling as theirs

    class InklingForCausalLM(TextModel, theirs.InklingForCausalLM):  # type: ignore[misc]
        """The text model, which takes weights by the names of published checkpoints too."""

        __module__ = theirs.__name__  # where transformers looks up what its experts can do

        @staticmethod
        def _load_pretrained_model(
            model: Any, tensors: Any, files: Any, load_config: Any, *options: Any
        ) -> Any:
            published = [
                WeightRenaming(r"^model\.embed\.", "model.embed_tokens."),
                WeightRenaming(r"^model\.embed_norm\.", "model.embed_tokens.embed_norm."),
                WeightRenaming(r"^model\.unembed\.", "lm_head."),
                *get_checkpoint_conversion_mapping("inkling_mm_model"),
            ]
            load_config.weight_mapping.extend(published)
            whole = theirs.InklingForCausalLM
            return whole._load_pretrained_model(model, tensors, files, load_config, *options)

    return InklingForCausalLM


class InklingFamily(Family):
    model_types = ("inkling_mm_model", "inkling_text")
    swaps: ClassVar = {
        "paged_attention": Swap(attribute="self_attn", make=_attention, adapter=_AttentionAdapter),
        "branch_convolution": Swap(
            attribute="mlp_sconv",
            make=lambda module, spec: _branch_convolution(module, "feed_forward"),
            adapter=_ConvolutionAdapter,
        ),
    }
    hf_layer_step_arguments = ("step", "past_key_values", "cache")
    hf_taken_modules = (".attn_sconv", ".shared_experts")

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        require_fields(config, shared_expert_sink=True)
        for mlp_type in config.mlp_layer_types:
            require(config, "mlp_layer_types", mlp_type, ["dense", "sparse"])
        if config.n_shared_experts < 1:
            raise UnsupportedError(
                f"{config.model_type}: config field n_shared_experts must be positive, "
                f"got {config.n_shared_experts}"
            )
        return layer_specs(config, scale=lambda head_dim: 1 / head_dim)

    def backbone(self, model: Any) -> None:
        """Replace attention's branch convolution, and make shared experts the last of all
        experts."""
        for layer in model.layers:
            own, dtype = layer.self_attn, layer.input_layernorm.weight.dtype
            for convolution in (own.k_sconv, own.v_sconv, layer.attn_sconv, layer.mlp_sconv):
                conv1d = convolution.conv1d  # which transformers keeps in float32
                conv1d.weight = parameter(conv1d.weight.detach().to(dtype))
            ours = _branch_convolution(layer.attn_sconv, "attention")
            layer.attn_sconv = _ConvolutionAdapter(ours, BranchConvolutionSpec.kind)
            if "experts" in layer.mlp._modules:
                layer.mlp = _mixture(layer.mlp)

    def logits(self, config: Any) -> Logits:
        return Logits(
            vocab_size=config.unpadded_vocab_size or config.vocab_size,
            scale=1 / config.logits_mup_width_multiplier,
        )

    def text_class(self) -> type[nn.Module]:
        return _text_class()
