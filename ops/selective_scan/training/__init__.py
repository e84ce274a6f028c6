"""The selective scan without pools, which a backward goes through."""

from torch_hybrid.ops.selective_scan.training.op import (
    selective_scan_backward,
    selective_scan_forward,
)

__all__ = ["selective_scan_backward", "selective_scan_forward"]
