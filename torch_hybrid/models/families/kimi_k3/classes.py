"""Kimi-K3's text part as a model of transformers: Kimi-Linear with other layers.

Published configs and names of weights are those of moonshotai/Kimi-K3. The model runs whole texts;
a runner serves it. Importing this registers the classes with transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedConfig,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearForgetGate,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearRMSNormGated,
    KimiLinearTopkRouter,
    eager_attention_forward,
)
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from torch_hybrid.functional import causal_conv1d, kimi_delta_attention
from torch_hybrid.models.whole_texts import causal_masks, packing_of_rows, take_whole_texts
from torch_hybrid.packing import Packing


class KimiK3TextConfig(KimiLinearConfig):  # type: ignore[misc]
    """Config of the text part, by the names of the published ``text_config``."""

    model_type = "kimi_k3_text"

    hidden_act: str = "situ"
    attn_res_block_size: int = 12
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    routed_expert_hidden_size: int = 3584
    linear_attn_config: dict[str, Any] | None = None

    def __post_init__(self, **options: Any) -> None:
        options.pop("model_type", None)  # published as Kimi-Linear's
        linear: dict[str, Any] = {"linear_attn_config": self.linear_attn_config or {}}
        super().__post_init__(**{**options, **linear})
        if self.hidden_act == "situ":  # SiLU with softcaps; elsewhere SiLU is what it is
            self.hidden_act = "silu"
        self.use_cache = False  # transformers has none for these layers


class KimiK3Config(PreTrainedConfig):  # type: ignore[misc]
    """Config of the whole checkpoint, of which the text part is served."""

    model_type = "kimi_k3"
    sub_configs = {"text_config": KimiK3TextConfig}  # noqa: RUF012 (transformers' own form)

    text_config: Any = None

    def __post_init__(self, **options: Any) -> None:
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = KimiK3TextConfig(**(self.text_config or {}))
        super().__post_init__(**options)


def situ(gate: Tensor, up: Tensor, softcaps: tuple[float, float]) -> Tensor:
    """Compute ``c tanh(gate / c) sigmoid(gate) d tanh(up / d)`` for softcaps c and d."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    first, second = softcaps
    gate32, up32 = gate.to(wide), up.to(wide)
    activated = first * torch.tanh(gate32 / first) * gate32.sigmoid()
    return (activated * second * torch.tanh(up32 / second)).to(gate.dtype)


def _softcaps(config: KimiK3TextConfig) -> tuple[float, float]:
    first, second = config.activation_situ_beta, config.activation_situ_linear_beta
    assert first is not None
    assert second is not None
    return first, second


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=None, device=None)


class KimiK3MLP(nn.Module):
    """An MLP with SiTU."""

    def __init__(self, config: KimiK3TextConfig, width: int) -> None:
        super().__init__()
        dim = config.hidden_size
        self.gate_proj, self.up_proj = _linear(dim, width), _linear(dim, width)
        self.down_proj = _linear(width, dim)
        self.softcaps = _softcaps(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to [..., dim]."""
        out: Tensor = self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.softcaps))
        return out


class KimiK3Experts(nn.Module):
    """Experts with SiTU, between latents of tokens."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        count, width = config.num_local_experts, config.moe_intermediate_size
        dim = config.routed_expert_hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=None, device=None))

        self.gate_up_proj = parameter(count, 2 * width, dim)
        self.down_proj = parameter(count, dim, width)
        self.softcaps = _softcaps(config)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Run tokens [T, dim] through their experts, by ids and weights [T, k]."""
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            token, place = torch.where(expert_ids == expert)
            gate, up = F.linear(x[token], gate_up).chunk(2, dim=-1)
            y = F.linear(situ(gate, up, self.softcaps), down)
            y = y * expert_weights[token, place, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


class KimiK3MoE(nn.Module):
    """Experts of a latent of each token, and shared ones beside them."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        dim, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiLinearTopkRouter(config)
        self.experts = KimiK3Experts(config)
        self.shared_experts = KimiK3MLP(
            config, config.moe_intermediate_size * config.n_shared_experts
        )
        self.routed_expert_down_proj = _linear(dim, latent)
        self.routed_expert_norm = KimiLinearRMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = _linear(latent, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, dim] to [B, T, dim]."""
        rows = x.flatten(0, 1)
        _, weights, ids = self.gate(rows)
        mixed = self.experts(self.routed_expert_down_proj(rows), ids, weights)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(mixed))
        out: Tensor = (routed + self.shared_experts(rows)).view(x.shape)
        return out


class KimiK3Attention(KimiLinearAttention):  # type: ignore[misc]
    """Latent attention without positions, whose outputs are gated."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = _linear(config.hidden_size, self.num_heads * self.v_head_dim)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Map [B, T, dim] to [B, T, dim] and no attention weights."""
        x = hidden_states
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        rows = self.kv_a_proj_with_mqa(x)
        latent, rest = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k, v = self.expand_kv(self.kv_a_layernorm(latent)[:, None], rest[:, None])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **options)
        gated = out.reshape(*x.shape[:-1], -1) * self.g_proj(x).sigmoid()
        return self.o_proj(gated), None


class KimiK3ForgetGate(KimiLinearForgetGate):  # type: ignore[misc]
    """Decays of channels, bounded or not."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=None, device=None))
        self.lower_bound = (config.linear_attn_config or {}).get("gate_lower_bound")
        self.safe_gate = self.lower_bound is not None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the log decays [T, H, K] of tokens [T, dim]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        step = self.f_b_proj(self.f_a_proj(x)).to(wide) + self.dt_bias.to(wide)
        step, rate = step.unflatten(-1, (self.num_heads, -1)), self.A_log.to(wide).exp()[:, None]
        if self.lower_bound is None:
            return -rate * F.softplus(step)
        bounded: Tensor = self.lower_bound * torch.sigmoid(rate * step)
        return bounded


class KimiK3DeltaAttention(nn.Module):
    """A linear layer's mixer, with its weights by their published names."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.num_heads = config.linear_num_heads
        dim, channels = config.hidden_size, config.linear_num_heads * config.linear_head_dim
        self.q_proj, self.k_proj = _linear(dim, channels), _linear(dim, channels)
        self.v_proj, self.g_proj = _linear(dim, channels), _linear(dim, channels)
        self.b_proj = _linear(dim, self.num_heads)
        self.conv1d = nn.Conv1d(
            3 * channels,
            3 * channels,
            config.linear_conv_kernel_dim,
            groups=3 * channels,
            bias=False,
            dtype=None,
            device=None,
        )
        self.forget_gate = KimiK3ForgetGate(config)
        self.o_norm = KimiLinearRMSNormGated(config.linear_head_dim, config.rms_norm_eps)
        self.o_proj = _linear(channels, dim)

    def forward(
        self, hidden_states: Tensor, *, packing: Packing | None = None, **_options: object
    ) -> tuple[Tensor, None]:
        """Map [B, T, dim] to [B, T, dim] and no attention weights.

        ``packing`` is that of all B * T tokens; without one, each row is a text.
        """
        if packing is None:
            packing = packing_of_rows(hidden_states)
        return self.mixed(hidden_states.flatten(0, 1), packing).view(hidden_states.shape), None

    def mixed(self, x: Tensor, packing: Packing) -> Tensor:
        """Map tokens [T, dim] to [T, dim]."""
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        weight = self.conv1d.weight.squeeze(1).to(qkv.dtype)
        qkv, _ = causal_conv1d(
            qkv, weight, None, packing, activation="silu", output_final_state=False
        )
        heads = (self.num_heads, -1)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, dim=-1))
        g = self.forget_gate(x)
        beta = self.b_proj(x).to(g.dtype).sigmoid()
        o, _ = kimi_delta_attention(
            q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False
        )
        normed = self.o_norm(o, self.g_proj(x).unflatten(-1, heads))
        out: Tensor = self.o_proj(normed.to(x.dtype).flatten(1))
        return out


class KimiK3DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A decoder layer, whose inputs are mixed of the sums of earlier blocks."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.layer_type = config.layer_types[layer_idx]
        self.begins_block = layer_idx % config.attn_res_block_size == 0
        self.self_attn: nn.Module = (
            KimiK3DeltaAttention(config)
            if self.layer_type == "linear_attention"
            else KimiK3Attention(config, layer_idx)
        )
        is_dense = config.mlp_layer_types[layer_idx] == "dense"
        self.mlp: nn.Module = (
            KimiK3MLP(config, config.intermediate_size) if is_dense else KimiK3MoE(config)
        )
        self.input_layernorm = KimiLinearRMSNorm(dim, eps)
        self.post_attention_layernorm = KimiLinearRMSNorm(dim, eps)
        self.self_attention_res_norm = KimiLinearRMSNorm(dim, eps)
        self.self_attention_res_proj = _linear(dim, 1)
        self.mlp_res_norm, self.mlp_res_proj = KimiLinearRMSNorm(dim, eps), _linear(dim, 1)

    def forward(
        self, present: Tensor, attention_mask: Any, *blocks: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        """Run the layer on the present block's sum [B, T, dim], after those of blocks before.

        No tuple holds them, in which activation checkpointing would not find them.
        """
        # Without blocks it is the present sum itself.
        x = mix(present, blocks, self.self_attention_res_proj, self.self_attention_res_norm)
        total, _ = self.self_attn(self.input_layernorm(x), attention_mask=attention_mask, **options)
        if self.begins_block:
            blocks = (*blocks, present)
        else:
            total = present + total
        x = mix(total, blocks, self.mlp_res_proj, self.mlp_res_norm)
        return total + self.mlp(self.post_attention_layernorm(x)), *blocks


def mix(present: Tensor, blocks: Iterable[Tensor], projection: Any, norm: Any) -> Tensor:
    """Mix sums [B, T, dim] by the softmax of their normed products with a query."""
    rows = torch.stack([*blocks, present], dim=-2)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    if type(projection) is nn.Linear:
        query = norm.weight.to(wide.dtype) * projection.weight[0].to(wide.dtype)
        scores = (keys * query).sum(-1)
    else:  # of an adapter, which adds to products, or quantized
        scores = projection((keys * norm.weight).to(present.dtype)).squeeze(-1)
    chances = scores.softmax(-1, dtype=wide.dtype)
    mixed: Tensor = (wide * chances[..., None]).sum(-2).to(present.dtype)
    return mixed


class KimiK3Model(KimiLinearPreTrainedModel):  # type: ignore[misc]
    """The model without its head."""

    config_class = KimiK3TextConfig
    _can_set_experts_implementation_cached_value = False  # else Kimi-Linear's answer is taken
    _can_record_outputs: ClassVar = {
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        "hidden_states": KimiK3DecoderLayer,
    }

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(
            config.vocab_size, dim, config.pad_token_id, dtype=None, device=None
        )
        self.layers = nn.ModuleList(
            KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.output_attn_res_norm = KimiLinearRMSNorm(dim, eps)
        self.output_attn_res_proj = _linear(dim, 1)
        self.norm = KimiLinearRMSNorm(dim, eps)
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> MoeModelOutputWithPast:
        """Run the layers over whole texts.

        Raises:
            UnsupportedError: texts are padded, or continue others.
        """
        if not isinstance(attention_mask, dict):
            take_whole_texts(attention_mask, options)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if not isinstance(attention_mask, dict):
            attention_mask = causal_masks(x)
        blocks: list[Tensor] = []
        for layer in self.layers:
            x, *blocks = layer(x, attention_mask[layer.layer_type], *blocks, **options)
        x = mix(x, blocks, self.output_attn_res_proj, self.output_attn_res_norm)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x))


class KimiK3ForCausalLM(KimiLinearForCausalLM):  # type: ignore[misc]
    """The model and its head."""

    config_class = KimiK3TextConfig
    _can_set_experts_implementation_cached_value = False

    def __init__(self, config: KimiK3TextConfig) -> None:
        KimiLinearPreTrainedModel.__init__(self, config)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.post_init()
        self.generation_config.use_cache = False

    @staticmethod
    def _load_pretrained_model(
        model: Any, tensors: Any, files: Any, load_config: Any, *options: Any
    ) -> Any:
        """Load weights; those of decays are published with heads that are none."""
        heads = model.config.linear_num_heads
        for name in tensors or ():
            if name.endswith(".self_attn.A_log") and tensors[name].numel() > heads:
                tensors[name] = tensors[name].flatten().narrow(0, 0, heads)
        return KimiLinearForCausalLM._load_pretrained_model(
            model, tensors, files, load_config, *options
        )


register_checkpoint_conversion_mapping(
    "kimi_k3_text", get_checkpoint_conversion_mapping("kimi_linear"), overwrite=True
)
AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
AutoConfig.register("kimi_k3_text", KimiK3TextConfig, exist_ok=True)
AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
