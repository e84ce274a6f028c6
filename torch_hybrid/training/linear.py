"""Linear layers whose products on a CPU, forward and backward, are our own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.matrix_product import matrix_product_forward

OWN_DTYPES = frozenset({torch.float32, torch.bfloat16})


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map x [..., K] to [..., N] by a weight [N, K], rounded as autocast has it."""
    is_ours = x.device.type == "cpu" and not isinstance(weight, DTensor)
    if is_ours and torch.is_autocast_enabled("cpu") and {x.dtype, weight.dtype} <= OWN_DTYPES:
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
    if not (is_ours and x.dtype == weight.dtype and x.dtype in OWN_DTYPES):
        return F.linear(x, weight)
    check_no_tangents("matrix_product", x, weight)
    out = matrix_product_forward(x.reshape(-1, x.shape[-1]), weight.T, impl="cpp")
    return out.view(*x.shape[:-1], len(weight))


class OwnLinear(nn.Linear):
    """Linear layer on a CPU where torch multiplies float32 or bfloat16 more slowly."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)
