"""Lara Mini: gated delta rule, attention to a window, and to all keys without positions."""

from __future__ import annotations

from typing import ClassVar

from torch_hybrid.models.families.qwen3_5 import Qwen35Family
from torch_hybrid.models.families.qwen3_next import Qwen3NextFamily


class LaraMiniFamily(Qwen3NextFamily):
    model_types = ("lara_mini",)
    swaps: ClassVar = Qwen35Family.swaps
    mtp = None
