"""RWKV's weighted average of past values over ragged sequences, with its states kept by slot."""

from torch_hybrid.ops.wkv.op import wkv

__all__ = ["wkv"]
