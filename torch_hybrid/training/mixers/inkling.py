"""Twins of mixers of Inkling and Inkling-2: attention with biases by distance, convolutions."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.models.families.inkling2 import by_older_names
from torch_hybrid.packing import Packing
from torch_hybrid.training.boundaries import named, packing_of
from torch_hybrid.training.decoder import check_says_nothing, keeps_a_cache
from torch_hybrid.training.linear import linear
from torch_hybrid.training.mixers.inkling_attention import biased_attention
from torch_hybrid.training.mixers.twin import (
    Submodule,
    Twin,
    TwinOfPair,
    as_work,
    by_head,
    convolved,
    earlier,
    work_dtype,
)


class AddedConvolution(Twin, of=("InklingShortConvolution",)):
    """Short convolution that is added to its input, as in Inkling.

    Layers hand it a mask and no other keyword, so the packing comes in place of that.
    """

    conv1d: nn.Conv1d
    conv_kernel_size: int

    def forward(
        self, hidden_states: Tensor, *args: Any, conv_mask: Any = None, **options: Any
    ) -> Any:
        """Map [B, T, D] to [B, T, D]."""
        if isinstance(conv_mask, Packing):
            return super().forward(hidden_states, packing=conv_mask)
        return super().forward(hidden_states, *args, conv_mask=conv_mask, **options)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        return self.summed(as_work(x), packing).to(x.dtype)  # in float32, as transformers sums

    def summed(self, x: Tensor, packing: Packing) -> Tensor:
        """Add to tokens [T, D] their convolution."""
        return x + convolved(self.conv1d, x, packing)


class ScaledConvolution(
    AddedConvolution, of=("Inkling2ShortConvolution", "Inkling2LoopShortConvolution")
):
    """Short convolution that is added to its input, and scaled by its terms, as in Inkling-2."""

    def summed(self, x: Tensor, packing: Packing) -> Tensor:
        return super().summed(x, packing) / sqrt(self.conv_kernel_size + 1)


class BiasedAttention(TwinOfPair, of=("InklingAttention",)):
    """Attention with biases by distance, and convolutions of keys and values, as in Inkling."""

    attention_dropout: float
    config: Any
    head_dim: int
    is_sliding: bool
    k_norm: Submodule
    k_proj: Submodule
    k_sconv: AddedConvolution
    num_heads: int
    o_proj: Submodule
    q_norm: Submodule
    q_proj: Submodule
    r_proj: Submodule
    rel_logits_proj: Any  # transformers' profiles of biases, whose parameter is read
    scaling: float
    sliding_window: int | None
    v_proj: Submodule
    v_sconv: AddedConvolution

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        q = self.q_norm(by_head(self.q_proj(x), self.head_dim))
        k = self.k_norm(by_head(self.k_sconv.packed(self.k_proj(x), packing), self.head_dim))
        v = by_head(self.v_sconv.packed(self.v_proj(x), packing), self.head_dim)
        bias = self.r_proj(x).unflatten(-1, (self.num_heads, -1)) @ self.rel_logits_proj.proj
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            q, bias = grown(q, bias, packing, self.config)
        o, _ = self.attend(q, k, v, bias, packing)
        return self.o_proj(o.flatten(1))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """Attend within sequences, in one dtype; return logarithms of sums of weights too."""
        is_cast = torch.is_autocast_enabled(v.device.type)
        dtype = torch.get_autocast_dtype(v.device.type) if is_cast else v.dtype
        q, k, v, bias = (each.to(dtype) for each in (q, k, v, bias))
        return biased_attention(
            *(q, k, v, bias, packing.cu_seqlens),
            scale=self.scaling,
            window=self.sliding_window,
            dropout=self.attention_dropout if self.training else 0.0,
        )


class SinkAttention(BiasedAttention, of=("Inkling2SlidingAttention",)):
    """Attention with biases, sinks and gates, of clipped heads, as in layers with a window."""

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        return self.mixed(x, x, x, packing)

    def mixed(self, x: Tensor, of_keys: Tensor, of_values: Tensor, packing: Packing) -> Tensor:
        """Map the inputs [T, D] of queries, keys and values to [T, D]."""
        q, mix = self.clipped(x)
        own = by_older_names(self)
        k = own.k_sconv.packed(own.k_proj(of_keys), packing)
        v = own.v_sconv.packed(own.v_proj(of_values), packing)
        return self.gated(x, q, mix, k, v, packing)

    def clipped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project tokens [T, D] to queries [T, H, K] and mixes of profiles [T, H, M]."""
        own = by_older_names(self)
        q = by_head(own.q_proj(x), self.head_dim)
        mix = own.r_proj(x).unflatten(-1, (self.num_heads, -1))
        return scaled_and_clipped(own.q_l2_clip, q), scaled_and_clipped(own.rel_l2_clip, mix)

    def gated(
        self, x: Tensor, q: Tensor, mix: Tensor, k: Tensor, v: Tensor, packing: Packing
    ) -> Tensor:
        """Attend to convolved keys and values, and gate the outputs by tokens [T, D]."""
        own = by_older_names(self)
        k, v = (by_head(each, self.head_dim) for each in (k, v))
        v = own.v_norm(as_work(v)).to(v.dtype)
        bias = mix @ own.rel_logits_proj.proj
        o, lse = self.attend(q, own.k_l2_clip(k), v, bias, packing)
        # A sink is one more weight, of a value that is 0.
        o = as_work(o) * (lse - own.sink_proj(x)).sigmoid()[..., None]
        gate = as_work(own.gate_proj(x)).sigmoid()
        out: Tensor = own.o_proj((o.flatten(1) * gate).to(v.dtype))
        return out


class SeparateSinkAttention(SinkAttention, of=("Inkling2LoopSlidingAttention",)):
    """Attention with sinks, whose keys and values may have inputs of their own."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        packing: Packing | None = None,
        **options: Any,
    ) -> Any:
        """Map [B, T, D] to [B, T, D] and None; by default all inputs are ``hidden_states``."""
        others: dict[str, Any] = {
            "key_hidden_states": key_hidden_states,
            "value_hidden_states": value_hidden_states,
        }
        if packing is None:
            return super().forward(hidden_states, *args, **others, **options)
        x = hidden_states.flatten(0, 1)
        keys, values = (x if each is None else each.flatten(0, 1) for each in others.values())
        return self.mixed(x, keys, values, packing).view(hidden_states.shape), None


class DynamicSinkAttention(
    SeparateSinkAttention, of=("Inkling2FullAttention", "Inkling2LoopFullAttention")
):
    """Attention with sinks and growth, whose keys and values have filters of their own."""

    def mixed(self, x: Tensor, of_keys: Tensor, of_values: Tensor, packing: Packing) -> Tensor:
        own = by_older_names(self)
        k = dynamically_convolved(own.k_sconv, own.k_proj(of_keys), of_keys, packing)
        v = dynamically_convolved(own.v_sconv, own.v_proj(of_values), of_values, packing)
        q, mix = grown(*self.clipped(x), packing, self.config)
        return self.gated(x, q, mix, k, v, packing)


class SharedExperts(Twin, of=("InklingSharedExperts",)):
    """Experts that all tokens take, as in Inkling, in one product each way."""

    act_fn: Submodule
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    n_shared_experts: int

    def forward(self, hidden_states: Tensor, gammas: Tensor) -> Tensor:  # type: ignore[override]
        """Map [B, T, D] to [B, T, D] by the weight of each expert [B T, experts]."""
        gate, up = (linear(hidden_states, x.flatten(0, 1)) for x in (self.gate_proj, self.up_proj))
        experts = (self.act_fn(gate) * up).unflatten(-1, (self.n_shared_experts, -1))
        weighted = experts * gammas.view(*experts.shape[:-1], 1)
        return linear(weighted.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class SeeingModel(Twin, of=("InklingModel",)):
    """Model of Inkling with its towers, which makes masks of all tokens before its decoder is run.

    They are not read there, but for a cache.
    """

    language_model: nn.Module

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the model; its decoder is handed the packing."""
        inputs = named(self, args, options, last="use_cache")
        if keeps_a_cache(self.language_model, inputs):
            check_says_nothing(inputs)
        else:
            inputs["packing"], inputs["attention_mask"] = packing_of(inputs), {}
        return super(Twin, self).forward(**inputs)


def dynamically_convolved(conv: Any, x: Tensor, mixes: Tensor, packing: Packing) -> Tensor:
    """Add to tokens [T, C] their convolution, to whose taps tokens [T, D] add some by head."""
    width: int = conv.conv_kernel_size
    own = as_work(conv.weight_proj(mixes)).unflatten(-1, (conv.num_heads, 1, width))
    taps = conv.static_weight.to(own.dtype).unflatten(-1, (conv.num_heads, -1))
    total = as_work(x)
    for lag in range(width):
        past = earlier(as_work(x), packing, lag).view(-1, *taps.shape[1:])
        total = total + (past * (taps[lag] + own[..., lag])).flatten(1)
    return (total / sqrt(2 * width + 1)).to(x.dtype)


def scaled_and_clipped(clip: Any, x: Tensor) -> Tensor:
    """Scale heads [T, H, D], and clip their sizes: without the growth that transformers adds."""
    threshold: float = getattr(clip, "l2_clip", clip).threshold
    scaled = as_work(x) * as_work(clip.scale)
    size: Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return (scaled * (threshold / (size + 1e-6)).clamp(max=1.0)).to(x.dtype)


def grown(q: Tensor, mix: Tensor, packing: Packing, config: Any) -> tuple[Tensor, Tensor]:
    """Scale queries and what biases are mixed of by the place of a token in its sequence."""
    times = (packing.positions + 1).to(work_dtype(q)) / config.log_scaling_n_floor
    growth = (1.0 + config.log_scaling_alpha * times.clamp(min=1.0).log())[:, None, None]
    return (as_work(q) * growth).to(q.dtype), (as_work(mix) * growth).to(mix.dtype)
