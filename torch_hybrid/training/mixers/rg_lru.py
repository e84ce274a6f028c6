"""Twins of mixers of real-gated linear recurrent units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from torch_hybrid.functional import rg_lru
from torch_hybrid.packing import Packing
from torch_hybrid.training.mixers.twin import Submodule, TwinOfPair, as_work, by_head, convolved


class RecurrentBlock(TwinOfPair, of=("RecurrentGemmaRecurrentBlock",)):
    """Real-gated linear recurrent units behind a short convolution, as in RecurrentGemma."""

    act_fn: Submodule
    conv_1d: nn.Conv1d
    linear_out: Submodule
    linear_x: Submodule
    linear_y: Submodule
    rg_lru: Any  # transformers' recurrence, whose parameters are read

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        y, own = self.act_fn(self.linear_y(x)), self.rg_lru
        x = convolved(self.conv_1d, self.linear_x(x), packing)
        weight = torch.cat([own.input_gate_weight, own.recurrent_gate_weight], -1)
        bias = torch.cat([own.input_gate_bias, own.recurrent_gate_bias], -1)
        heads = by_head(x, own.block_width).transpose(0, 1)
        gates = torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1)
        log_a = -8.0 * softplus(as_work(own.recurrent_param))
        h, _ = rg_lru(x, gates, log_a, packing, output_final_state=False)
        return self.linear_out(h * y)
