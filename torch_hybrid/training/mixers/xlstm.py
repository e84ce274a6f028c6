"""Twins of xLSTM's decoder, which hands its layers no keywords, and of its mixers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.models.xlstm.modeling_xlstm import xLSTMOutput
from transformers.utils.output_capturing import capture_outputs

from torch_hybrid.functional import mlstm
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, Twin, as_work


class XlstmDecoder(Twin, of=("xLSTMModel",)):
    """Decoder of xLSTM: a packing goes through its layers in place of states."""

    blocks: Iterable[Callable[[Tensor, Packing], tuple[Tensor, None]]]
    embeddings: Submodule
    out_norm: Submodule

    def forward(self, *args: Any, packing: Packing | None = None, **options: Any) -> Any:
        """Run the decoder; ``packing`` is that of all tokens."""
        if packing is None:
            return super(Twin, self).forward(*args, **options)
        return self.decode(packing=packing, **options)

    @capture_outputs  # type: ignore[untyped-decorator]
    def decode(
        self,
        *,
        packing: Packing,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> xLSTMOutput:
        """Map tokens to hidden states."""
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden, _state = block(hidden, packing)
        return xLSTMOutput(last_hidden_state=self.out_norm(hidden))


class Mlstm(Twin, of=("xLSTMLayer",)):
    """Matrix memory with exponential gates, normed per head, as in xLSTM."""

    config: Any
    fgate_preact: Submodule
    igate_preact: Submodule
    k: Submodule
    multihead_norm: Submodule
    ogate_preact: Submodule
    out_proj: Submodule
    q: Submodule
    v: Submodule

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Map [B, T, D] to [B, T, D] and a state, or None if a packing is in its place."""
        if args and isinstance(args[0], Packing):
            return super().forward(hidden_states, packing=args[0]), None
        return super().forward(hidden_states, *args, **options)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        heads, cap = (self.config.num_heads, -1), self.config.gate_soft_cap
        q, k, v = (part(x).unflatten(-1, heads) for part in (self.q, self.k, self.v))
        gates = (as_work(gate(x)) for gate in (self.igate_preact, self.fgate_preact))
        i, f = (cap * torch.tanh(gate / cap) for gate in gates)
        h, _ = mlstm(q, k, v, i, f, packing, output_final_state=False)
        return self.out_proj(self.ogate_preact(x).sigmoid() * self.multihead_norm(h[None])[0])
