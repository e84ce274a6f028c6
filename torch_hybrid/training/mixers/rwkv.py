"""Twins of RWKV's mixers, of tokens and of channels, and of its decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_hybrid.functional import wkv
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import KnowsPackings, Submodule, Twin, as_work, earlier


class StateTwin(Twin):
    """Mixer that is handed the packing as its state, and hands it on."""

    key: Submodule
    receptance: Submodule
    time_mix_key: Tensor
    time_mix_receptance: Tensor
    value: Submodule

    def forward(self, hidden_states: Tensor, *args: Any, state: Any = None, **options: Any) -> Any:
        """Map [B, T, D] to [B, T, D] and a state."""
        if not isinstance(state, Packing):
            return super().forward(hidden_states, *args, state=state, **options)
        return super().forward(hidden_states, packing=state), self.handed_on(state)

    def handed_on(self, packing: Packing) -> Packing | None:
        """Return the state that the next mixer is handed."""
        return packing


class TimeMix(StateTwin, of=("RwkvSelfAttention",)):
    """Weighted average of past values, as in RWKV-4."""

    output: Submodule
    time_decay: Tensor
    time_first: Tensor
    time_mix_value: Tensor

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before = earlier(x, packing)
        k = self.key(mixed(x, before, self.time_mix_key))
        v = self.value(mixed(x, before, self.time_mix_value))
        receptance = self.receptance(mixed(x, before, self.time_mix_receptance))
        log_decay, bonus = -as_work(self.time_decay).exp(), as_work(self.time_first)
        mean, _ = wkv(k, v, log_decay, bonus, packing, output_final_state=False)
        return self.output(receptance.sigmoid() * mean)


class ChannelMix(StateTwin, of=("RwkvFeedForward",)):
    """Gated squares of units, as in RWKV-4."""

    config: Any
    layer_id: int

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        before = earlier(x, packing)
        units = self.key(mixed(x, before, self.time_mix_key)).relu().square()
        receptance = self.receptance(mixed(x, before, self.time_mix_receptance))
        return receptance.sigmoid() * self.value(units)

    def handed_on(self, packing: Packing) -> Packing | None:
        """Keep the packing from the model's outputs, where its last layer's state stands."""
        return None if self.layer_id == self.config.num_hidden_layers - 1 else packing


class Decoder(KnowsPackings, of=("RwkvModel",)):
    """Decoder whose weights are divided by no evaluation, which a save would write so.

    transformers divides them, and halves residuals, where float16 would overflow.
    """

    def _rescale_layers(self) -> None:
        if self.training:  # divided before: multiply them back
            super()._rescale_layers()  # type: ignore[misc]


def mixed(x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
    """Mix tokens with the ones before them, by weights [1, 1, D]."""
    mix = mix.flatten()
    return x * mix + before * (1 - mix)
