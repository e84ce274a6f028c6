"""The selective scan: a recurrence whose every channel and state decays on its own (Mamba-1)."""

from torch_hybrid.ops.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
