"""Low-rank adapters (LoRA) of linear layers, one of several for each row."""

from torch_hybrid.ops.lora.op import lora

__all__ = ["lora"]
