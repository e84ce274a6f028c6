"""Twins of what embeds n-grams of tokens in Qwen4-Exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torch_hybrid.functional import causal_conv1d
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Twin, earlier, filters_of


class LayerWithNgrams(Twin, of=("Qwen4ExpTextDecoderLayer",)):
    """Decoder layer that hands its embedding of n-grams a mask alone: the packing in its place."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Any:
        """Run the layer's own forward."""
        if packing is not None:
            options |= {"packing": packing, "conv_mask": packing}
        return super(Twin, self).forward(hidden_states, *args, **options)


class GatedNgrams(Twin, of=("Qwen4ExpTextPLELayer",)):
    """Embedding of n-grams, gated for each residual stream, then convolved."""

    conv1d: nn.Conv1d

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, input_ids: Tensor, past_key_values: Any, conv_mask: Any = None
    ) -> Any:
        """Map [B, S, C] to [B, S, C]; a packing goes down in the place of a cache."""
        if isinstance(conv_mask, Packing):
            past_key_values, conv_mask = conv_mask, None
        own = super(Twin, self).forward
        return own(hidden_states, input_ids, past_key_values, conv_mask=conv_mask)

    def _short_conv(self, hidden_states: Tensor, past_key_values: Any) -> Any:
        """Convolve [B, S, C] over tokens that lie apart."""
        if not isinstance(past_key_values, Packing):
            own: Any = super()
            return own._short_conv(hidden_states, past_key_values)
        apart = self.conv1d.dilation[0]
        weight = pad(filters_of(self.conv1d).mT, (0, apart - 1)).flatten(1)
        weight = weight[:, : weight.shape[1] - apart + 1].to(hidden_states.dtype).contiguous()
        x, packing = hidden_states.flatten(0, 1), past_key_values
        out, _ = causal_conv1d(
            x, weight, None, packing, activation="silu", output_final_state=False
        )
        return out.view(hidden_states.shape)


class NgramEmbedding(Twin, of=("Qwen4ExpTextNGramEmbedding",)):
    """Rows of a table that hashes of n-grams choose; none reaches out of a sequence."""

    eos_token_id: int
    heads_per_ngram: int
    layer_multipliers: Tensor
    ngram_embedding: nn.Embedding
    ngram_heads_offsets: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_size: int

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Any
    ) -> Any:
        """Embed tokens [B, S]."""
        if not isinstance(past_key_values, Packing):
            return super(Twin, self).forward(input_ids, past_key_values)
        token, packing = input_ids.long().flatten()[:, None], past_key_values
        first, *multipliers = self.layer_multipliers
        mixed, hashes = token * first, []
        ended = torch.zeros_like(token, dtype=torch.bool)
        for step, multiplier in enumerate(multipliers, start=1):
            before = earlier(token, packing, step, self.eos_token_id)
            before = before.masked_fill(ended, self.eos_token_id)
            ended = before == self.eos_token_id  # no n-gram reaches across the end of a text
            mixed = mixed ^ (before * multiplier)
            hashes.append(mixed.expand(-1, self.heads_per_ngram))
        rows = torch.cat(hashes, -1) % self.ngram_heads_vocab_sizes + self.ngram_heads_offsets
        table = self.ngram_embedding  # which may be on another device
        return table(rows.to(table.weight.device)).to(rows.device).view(*input_ids.shape, -1)
