"""RWKV-4: time mixing and channel mixing in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.rwkv import ChannelMix, TimeMix, TokenShift
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.family import Family, Swap, parameter
from torch_hybrid.specs import ChannelMixSpec, TimeMixSpec


def _shift(*mixes: Tensor) -> TokenShift:
    return TokenShift.of(torch.cat([mix.detach().squeeze(0) for mix in mixes]))


def _time_mix(module: Any, spec: TimeMixSpec) -> TimeMix:
    with on_meta():
        mixer = TimeMix(spec)
    mixer.shift = _shift(module.time_mix_key, module.time_mix_value, module.time_mix_receptance)
    mixer.key, mixer.value, mixer.receptance = module.key, module.value, module.receptance
    mixer.time_decay, mixer.time_first = module.time_decay, module.time_first
    mixer.out_proj = module.output
    return mixer


def _channel_mix(module: Any, spec: ChannelMixSpec) -> ChannelMix:
    with on_meta():
        mixer = ChannelMix(spec)
    mixer.shift = _shift(module.time_mix_key, module.time_mix_receptance)
    mixer.key, mixer.value, mixer.receptance = module.key, module.value, module.receptance
    return mixer


class _Block(nn.Module):
    """A decoder layer that takes the step and multiplies the residual by ``scale``. That is a
    tensor, so that layers that halve it compile as all others do."""

    scale: Tensor

    def __init__(self, block: Any, scale: float) -> None:
        super().__init__()
        self.ln1, self.attention = block.ln1, block.attention
        self.ln2, self.feed_forward = block.ln2, block.feed_forward
        where = block.ln1.weight.device
        factor = torch.tensor(scale, dtype=torch.float32, device=where)
        self.register_buffer("scale", factor, persistent=False)

    def forward(self, hidden: Tensor, *, step: LayerStep) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]."""
        hidden = hidden + self.attention(self.ln1(hidden), step=step)
        hidden = hidden + self.feed_forward(self.ln2(hidden), step=step)
        return hidden * self.scale


def _divide(linear: nn.Linear, factor: int) -> None:
    if factor > 1:
        linear.weight = parameter(linear.weight.detach() * (1 / factor))


class RwkvFamily(Family):
    model_types = ("rwkv",)
    swaps: ClassVar = {
        "time_mix": Swap(attribute="attention", make=_time_mix),
        "channel_mix": Swap(attribute="feed_forward", make=_channel_mix),
    }
    hf_takes_masks = False
    hf_layers = "blocks"

    def specs(self, config: Any) -> list[tuple[TimeMixSpec, ChannelMixSpec]]:
        dim = config.hidden_size
        time_mix = TimeMixSpec(dim=dim, channels=config.attention_hidden_size)
        channel_mix = ChannelMixSpec(dim=dim, width=config.intermediate_size)
        return [(time_mix, channel_mix)] * config.num_hidden_layers

    def backbone(self, model: Any) -> Backbone:
        """Halve the residual after every ``rescale_every`` layers, and the outputs of later layers.

        Norms give the same as without, but for their eps."""
        every, layers = model.config.rescale_every, []
        for number, block in enumerate(model.blocks):
            if every > 0 and not model.layers_are_rescaled:  # else its first forward does it
                _divide(block.attention.output, 2 ** (number // every))
                _divide(block.feed_forward.value, 2 ** (number // every))
            is_last_of_some = every > 0 and (number + 1) % every == 0
            layers.append(_Block(block, 0.5 if is_last_of_some else 1.0))
        return Backbone(model.embeddings, layers, model.ln_out, first_norm=model.blocks[0].pre_ln)
