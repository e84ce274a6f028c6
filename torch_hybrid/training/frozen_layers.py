"""Quantized layers of transformers as the frozen base of an adapter.

Their inputs are not rounded, and have gradients.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.formats.block_scales import BLOCK, DTYPE
from torch_hybrid.training.experts import as_in_autocast, is_silu, mixed
from torch_hybrid.training.frozen_products import frozen_product


class FrozenFP8Linear(nn.Linear):
    """Linear layer in block-FP8."""

    weight_scale_inv: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N] by the dequantized weight, in the dtype of x."""
        out: Tensor = frozen_product(
            as_in_autocast(x), self.weight, self.weight_scale_inv, None, False
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)


class FrozenIntegerLinear(nn.Linear):
    """Linear layer whose weight is an Int8Tensor or IntxUnpackedToInt8Tensor of torchao."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N] by the dequantized weight, in the dtype of x."""
        weight: Any = self.weight
        zeros = weight.zero_point
        scales = weight.scale.view(len(weight.qdata), -1)
        zeros = None if zeros is None else zeros.view(scales.shape)
        out: Tensor = frozen_product(as_in_autocast(x), weight.qdata, scales, zeros, False)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class FrozenFP8Experts(nn.Module):
    """Experts in block-FP8, with gates."""

    num_experts: int
    gate_up_proj: Tensor
    gate_up_proj_scale_inv: Tensor
    down_proj: Tensor
    down_proj_scale_inv: Tensor
    limit: float | None
    gate_softcap: float | None
    up_softcap: float

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mix the outputs [T, D] of each token's experts [T, top_k]; experts past all give 0."""
        bounds: dict[str, Any] = {"limit": self.limit}
        if self.gate_softcap is not None:
            bounds = {"softcaps": (self.gate_softcap, self.up_softcap)}
        out = mixed(
            as_in_autocast(hidden),
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up_scales=self.gate_up_proj_scale_inv.float(),
            down_scales=self.down_proj_scale_inv.float(),
            **bounds,
        )
        return out.to(hidden.dtype)


def frozen_class(module: Any) -> type[nn.Module] | None:
    """Find the class that a quantized module trains adapters by; None if it is not quantized.

    Raises:
        UnsupportedError: its format is not dequantized here, or it is not frozen.
    """
    name = type(module).__name__
    if name in _FP8_CLASSES:
        _check_fp8(module)
        found: type[nn.Module] = _FP8_CLASSES[name]
    elif type(module) is nn.Linear and type(module.weight).__module__.startswith("torchao."):
        _check_integers(module.weight)
        found = FrozenIntegerLinear
    else:
        base = dict(module.named_children()).get("base_layer")
        if name == "ParamWrapper" and type(base).__name__ == "FP8Experts":
            raise UnsupportedError(
                "FP8Experts have no adapters of their own: leave them out of target_parameters"
            )
        return None
    for each, weight in module.named_parameters(recurse=False):
        if weight.requires_grad and "bias" not in each:
            raise UnsupportedError(f"{name}.{each} is quantized and cannot train: freeze it")
    return found


def refuse_to_merge(safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
    """Refuse what ``merge`` of peft would do: add to numbers without their scales."""
    raise UnsupportedError(
        "no adapter is merged into block-FP8 weights: save it, load it on a base of "
        "FineGrainedFP8Config(dequantize=True), and merge it there"
    )


_FP8_CLASSES: dict[str, type[nn.Module]] = {
    "FP8Linear": FrozenFP8Linear,
    "FP8Experts": FrozenFP8Experts,
}
FROZEN = (FrozenFP8Linear, FrozenFP8Experts, FrozenIntegerLinear)


def _check_fp8(module: Any) -> None:
    """Raise UnsupportedError unless a module's blocks are those that are dequantized here."""
    if module.block_size is None or tuple(module.block_size) != (BLOCK, BLOCK):
        raise UnsupportedError(
            f"FP8 weights train in blocks of {BLOCK} x {BLOCK}, got {module.block_size}"
        )
    if type(module).__name__ == "FP8Experts":
        if not module.has_gate or module.down_proj.dtype != DTYPE:
            raise UnsupportedError("experts train over gated FP8 weights, got others")
        if module.swiglu_alpha is not None or not is_silu(module.act_fn):
            raise UnsupportedError("FP8 experts train with gates of silu, got others")
        if module.gate_up_proj.shape[1] // 2 % BLOCK:
            raise UnsupportedError(
                f"gate and up of FP8 experts train in whole blocks of {BLOCK} rows, got "
                f"{module.gate_up_proj.shape[1] // 2} each"
            )


def _check_integers(weight: Any) -> None:
    """Raise UnsupportedError unless torchao keeps a weight as numbers, scales and zero points."""
    kind = type(weight).__name__
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        raise UnsupportedError(
            f"adapters train over torchao's Int8WeightOnlyConfig and IntxWeightOnlyConfig, "
            f"got a weight of type {kind}"
        )
    if weight.block_size[0] != 1:
        raise UnsupportedError(
            f"INT8 and INT4 weights train with scales of rows or of groups in a row, "
            f"got blocks of {tuple(weight.block_size)}"
        )
