"""Jet-Nemotron as a model of transformers: Qwen2 with other mixers in its linear layers.

Published configs and names of weights are those of NVlabs/Jet-Nemotron. The model runs whole texts;
a runner serves it. Importing this registers the classes with transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model, Qwen2RMSNorm

from torch_hybrid.functional import gated_delta_rule
from torch_hybrid.models.families.jet_nemotron.family import block_spec
from torch_hybrid.models.whole_texts import causal_masks, packing_of_rows, take_whole_texts
from torch_hybrid.packing import Packing

_LAYER_TYPES = {"jet": "linear_attention", "attn": "full_attention", "swa": "sliding_attention"}


class JetNemotronConfig(Qwen2Config):  # type: ignore[misc]
    """Config of a model, by the names of its ``config.json``; types of layers by transformers'."""

    model_type = "jet_nemotron"

    layer_types: list[str] | None = None
    efficient_attention_config: dict[str, Any] | None = None

    def __post_init__(self, **options: Any) -> None:
        if self.layer_types is not None:
            self.layer_types = [_LAYER_TYPES.get(name, name) for name in self.layer_types]
        window = (self.efficient_attention_config or {}).get("swa")
        if window is not None:
            self.use_sliding_window, self.sliding_window = True, window["window_size"]
        self.use_cache = False  # transformers has none for these layers
        super().__post_init__(**options)


class JetRMSNorm(Qwen2RMSNorm):  # type: ignore[misc]
    """RMSNorm that is rounded once, after its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., dim] in float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.square().mean(-1, keepdim=True)
        normed: Tensor = self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon))
        return normed.to(x.dtype)


class FilterGenerator(nn.Module):
    """Projection of each token to the filters of its channels, oldest tap first: [..., C W]."""

    def __init__(self, dim: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, rank, bias=False, dtype=None, device=None)
        self.w2 = nn.Linear(rank, outputs, dtype=None, device=None)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to [..., outputs]."""
        filters: Tensor = self.w2(F.silu(self.w1(x)))
        return filters


class DynamicConvolution(nn.Module):
    """Causal convolution of channels by filters of each token, and SiLU."""

    def __init__(self, dim: int, rank: int, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.kernel_generator = FilterGenerator(dim, rank, channels * width)

    def forward(self, values: Tensor, x: Tensor, packing: Packing) -> Tensor:
        """Convolve values [T, C] by the filters that x [T, dim] gives."""
        filters = self.kernel_generator(x).unflatten(-1, (-1, self.width)).unbind(-1)
        mixed = values * filters[-1]
        for back in range(1, self.width):
            rows = F.pad(values, (0, 0, back, 0))[: len(values)]
            is_there = (packing.positions >= back)[:, None]
            mixed = mixed + torch.where(is_there, rows, 0.0) * filters[-1 - back]
        return F.silu(mixed)


class JetBlock(nn.Module):
    """A linear layer's mixer, with its weights by their published names."""

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__()
        self.spec = spec = block_spec(config)
        dim = config.hidden_size

        def linear(outputs: int) -> nn.Linear:
            return nn.Linear(dim, outputs, bias=False, dtype=None, device=None)

        self.q_proj, self.k_proj = linear(spec.k_channels), linear(spec.k_channels)
        self.v_proj, self.g_proj = linear(spec.v_channels), linear(spec.v_channels)
        self.b_proj, self.a_proj = linear(spec.num_heads), linear(spec.num_heads)
        self.A_log = nn.Parameter(torch.zeros(spec.num_heads, dtype=None, device=None))
        self.dt_bias = nn.Parameter(torch.zeros(spec.num_heads, dtype=None, device=None))
        self.dynamic_conv1d = DynamicConvolution(
            dim, spec.filter_rank, spec.v_channels, spec.conv_width
        )
        self.o_norm = nn.RMSNorm(spec.head_v_dim, spec.norm_eps, dtype=None, device=None)
        self.o_proj = nn.Linear(spec.v_channels, dim, bias=False, dtype=None, device=None)

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
        wide = torch.promote_types(x.dtype, torch.float32)
        v = self.dynamic_conv1d(self.v_proj(x), x, packing)
        q, k = F.silu(self.q_proj(x)), F.silu(self.k_proj(x))
        step = F.softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide))
        g, beta = -self.A_log.to(wide).exp() * step, self.b_proj(x).to(wide).sigmoid()
        heads = (self.spec.num_heads, -1)
        q, k, v, z = (part.unflatten(-1, heads) for part in (q, k, v, self.g_proj(x)))
        o, _ = gated_delta_rule(q, k, v, g, beta, packing, qk_l2norm=True, output_final_state=False)
        gated = self.o_norm(o.to(wide)) * F.silu(z.to(wide))
        out: Tensor = self.o_proj(gated.to(x.dtype).flatten(1))
        return out


class JetNemotronDecoderLayer(Qwen2DecoderLayer):  # type: ignore[misc]
    """A decoder layer of any type."""

    def __init__(self, config: JetNemotronConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.layer_types is not None
        if config.layer_types[layer_idx] == "linear_attention":
            self.self_attn = JetBlock(config)
        self.input_layernorm = JetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = JetRMSNorm(config.hidden_size, config.rms_norm_eps)


class JetNemotronModel(Qwen2Model):  # type: ignore[misc]
    """The model without its head."""

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__(config)
        layers = (JetNemotronDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = JetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the layers over whole texts, or over the tokens of a step of a runner's.

        Raises:
            UnsupportedError: texts are padded, or continue others.
        """
        if not isinstance(attention_mask, dict):
            take_whole_texts(attention_mask, options)
            if inputs_embeds is None:
                inputs_embeds, input_ids = self.embed_tokens(input_ids), None
            attention_mask = causal_masks(inputs_embeds, self.config.sliding_window)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **options,
        )


class JetNemotronForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """The model and its head."""

    config_class = JetNemotronConfig

    def __init__(self, config: JetNemotronConfig) -> None:
        super().__init__(config)
        self.model = JetNemotronModel(config)
        self.post_init()
        self.generation_config.use_cache = False


AutoConfig.register("jet_nemotron", JetNemotronConfig, exist_ok=True)
AutoModelForCausalLM.register(JetNemotronConfig, JetNemotronForCausalLM, exist_ok=True)
