"""xLSTM: a matrix memory with exponential gates in every layer, and an MLP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mlstm import Mlstm
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.family import (
    Family,
    Logits,
    Swap,
    joined_projection,
    parameter,
    require,
    weights_of,
)
from torch_hybrid.specs import MOST_GATE_SOFTCAP, MlstmSpec

# Our mixer divides without the model's eps: after the norm, one this small changes less than
# rounding does.
_MOST_EPS = 1e-5


def _head_dim(config: Any, name: str, factor: float) -> int:
    num_heads: int = config.num_heads
    head_dim, rest = divmod(int(config.hidden_size * factor), num_heads)
    if rest or not head_dim:
        raise UnsupportedError(
            f"{config.model_type}: config field {name} must give each of the {num_heads} heads "
            f"equally many of the channels, got {factor} of {config.hidden_size}"
        )
    return head_dim


def _mixer(module: Any, spec: MlstmSpec) -> Mlstm:
    with on_meta():
        mixer = Mlstm(module.out_proj.out_features, spec)
    parts = (module.q, module.k, module.v, module.ogate_preact)
    gates = (module.igate_preact, module.fgate_preact)
    mixer.in_proj = joined_projection(weights_of(*parts, *gates))
    mixer.gate_bias = parameter(torch.cat([gate.bias.detach() for gate in gates]))
    mixer.norm_weight, mixer.out_proj = module.multihead_norm.weight, module.out_proj
    return mixer


class _FeedForward(nn.Module):
    """A gated MLP, whose projections have the names that ``shard`` knows."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = module.proj_up_gate, module.proj_up
        self.down_proj = module.proj_down

    def forward(self, x: Tensor) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Block(nn.Module):
    """A decoder layer that takes the step."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm_mlstm, self.mlstm_layer = block.norm_mlstm, block.mlstm_layer
        self.norm_ffn, self.ffn = block.norm_ffn, _FeedForward(block.ffn)

    def forward(self, hidden: Tensor, *, step: LayerStep) -> Tensor:
        """Map [1, T, dim] to [1, T, dim]."""
        hidden = hidden + self.mlstm_layer(self.norm_mlstm(hidden), step=step)
        out: Tensor = hidden + self.ffn(self.norm_ffn(hidden))
        return out


class XlstmFamily(Family):
    model_types = ("xlstm",)
    swaps: ClassVar = {"mlstm": Swap(attribute="mlstm_layer", make=_mixer)}
    hf_takes_masks = False
    hf_taken_modules = (".ffn",)
    hf_layers, hf_num_layers = "blocks", "num_blocks"
    hf_kernel_fields = ("chunkwise_kernel", "sequence_kernel", "step_kernel")

    def specs(self, config: Any) -> list[MlstmSpec]:
        require(config, "use_bias", config.use_bias, [False])
        require(config, "add_out_norm", config.add_out_norm, [True])
        require(config, "weight_mode", config.weight_mode, ["single"])
        require(config, "embedding_dim", config.embedding_dim, [config.hidden_size])
        for name, value, most in (
            ("gate_soft_cap", config.gate_soft_cap, MOST_GATE_SOFTCAP),
            ("eps", config.eps, _MOST_EPS),
        ):
            if not 0 < value <= most:
                raise UnsupportedError(
                    f"{config.model_type}: config field {name} must be above 0 and at most {most}, "
                    f"got {value}"
                )
        spec = MlstmSpec(
            num_heads=config.num_heads,
            head_k_dim=_head_dim(config, "qk_dim_factor", config.qk_dim_factor),
            head_v_dim=_head_dim(config, "v_dim_factor", config.v_dim_factor),
            gate_softcap=config.gate_soft_cap,
            norm_eps=config.norm_eps,
        )
        return [spec] * config.num_blocks

    def backbone(self, model: Any) -> Backbone:
        return Backbone(model.embeddings, map(_Block, model.blocks), model.out_norm)

    def logits(self, config: Any) -> Logits:
        return Logits(vocab_size=config.vocab_size, softcap=config.output_logit_soft_cap)
