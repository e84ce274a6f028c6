"""Mixers of transformers that train: boundaries of packed sequences, and differentiable ops."""

from __future__ import annotations

from torch_hybrid.training.mixers.delta_rules import (
    GatedDeltaNet,
    JointGatedDeltaNet,
    KimiDeltaAttention,
    LowRankGateKimiDeltaAttention,
    SeparateGatedDeltaNet,
)
from torch_hybrid.training.mixers.mamba import Mamba, NormedMamba, ZambaMamba
from torch_hybrid.training.mixers.mamba2 import FalconH1Mamba2, Mamba2
from torch_hybrid.training.mixers.short_conv import ShortConv
from torch_hybrid.training.mixers.twin import Twin

__all__ = ["TWINS", "Twin"]

# By the class names of transformers' mixers.
TWINS: dict[str, type[Twin]] = {
    "Qwen3NextGatedDeltaNet": JointGatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": SeparateGatedDeltaNet,
    "KimiLinearDeltaAttention": LowRankGateKimiDeltaAttention,
    "Glm5NextTextLinearAttention": LowRankGateKimiDeltaAttention,
    "BailingHybridDeltaAttention": KimiDeltaAttention,
    "MambaMixer": Mamba,
    "FalconMambaMixer": NormedMamba,
    "JambaMambaMixer": NormedMamba,
    "ZambaMambaMixer": ZambaMamba,
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
}
