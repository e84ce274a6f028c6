"""Quantization of a model's weights to INT8, INT4 or FP4, in memory or as they are read.

A weight is quantized some rows at a time, so that little of an unread weight is ever held in full
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.caches.room import check_room
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.malloc import trim
from torch_hybrid.host.memory import weight_memory
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.integers import IntegerEmbedding
from torch_hybrid.layers.read_weights import read_by_weight
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.read import progress_bar, read_rows
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.ops.formats.integers import (
    FP4,
    GROUPS,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    in_4_bits,
    in_8_bits,
    in_fp4,
    num_scales,
    stored_depth,
)
from torch_hybrid.ops.formats.stored_weights import WITH_SCALES
from torch_hybrid.ranks import SummedLinear, SumOverRanks

WEIGHTS = {"int8": INT8, "int4": INT4, "mxfp4": FP4, "nvfp4": FP4}
_BLOCKS = {"mxfp4": MXFP4, "nvfp4": NVFP4}
# Names of modules that are not quantized: embeddings, of which a step reads a few rows, routers,
# which are small and choose the experts, and a tower, whose modules are transformers' own.
# benchmarks/figures/quantization.md has the measurements.
KEPT = ("*embed*", "*router*", "*gate", "*.gate.*", "vision.*")
# Names of modules that become INT8 where others become INT4 or FP4.
EIGHT_BITS = ("*head", "*k_proj", "*v_proj", "*o_proj", "*out_proj")

_STRETCH_BYTES = 64 << 20  # of the rows that are quantized at once

# Reads rows [first, first + count) of a weight, in memory or from files.
ReadRows = Callable[[Tensor, int, int], Tensor]


@in_isolation
def quantize(
    model: HybridModel,
    weights: str,
    *,
    group: int = 32,
    keep: Sequence[str] = KEPT,
    eight_bits: Sequence[str] = EIGHT_BITS,
) -> None:
    """Quantize the weights of a model in memory to INT8, INT4 or FP4, one weight after the other.

    In INT8, each row of a weight has one scale; in INT4, each ``group`` numbers of a row have one;
    in MXFP4 each 32 have a power of two, in NVFP4 each 16 a scale in FP8, and a row has a factor.
    Where ranks share a row, the part of each counts as a row: its scale is no coarser.
    Linear layers, embeddings and experts are quantized. Their GEMMs then read that much less
    memory; activations are not rounded.

    Args:
        model: model without a runner; it is changed.
        weights: "int8", "int4", "mxfp4" or "nvfp4".
        group: numbers of a row that share a scale in INT4: 32, 64 or 128.
        keep: patterns of names of modules that are not quantized; by default embeddings, routers
            and a tower. With ``()`` all are quantized.
        eight_bits: patterns of names of modules that become INT8 where others have 4 bits; by
            default the head, the outputs of mixers, and keys and values of attention.

    Raises:
        TypeError: ``model`` is another one, or ``keep`` or ``eight_bits`` is no list.
        ValueError: ``weights`` or ``group`` is none of these, or a group, or 32 of FP4, does not
            divide the rows of a weight.
        UnsupportedError: the model has quantized weights already.
    """
    if not isinstance(model, HybridModel):
        raise TypeError(
            f"model must come from th.from_pretrained or th.adapt, got {type(model).__name__}"
        )
    check_weights(weights, group, others=())
    plan = plan_integers(model, weights, group=group, keep=keep, eight_bits=eight_bits)
    if plan.modules:
        device = _weights_of(plan.modules[0][1])[0].device
        check_room(plan.num_bytes, device, what="the weights", limits="their precision (weights)")
        _make_integers(model, plan, device, lambda weight, first, count: weight[first:][:count])
    trim()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """The weights of a model that are to be quantized, and the tensors that replace them.

    Attributes:
        modules: names and modules whose weights are quantized.
        shapes: shapes and dtypes of the numbers of each weight, then of its scales.
        group: numbers of a row that share a scale in INT4 or FP4.
    """

    modules: list[tuple[str, nn.Module]]
    shapes: list[tuple[tuple[int, ...], torch.dtype]]
    group: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers and scales."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes)


def plan_integers(
    model: HybridModel,
    weights: str,
    *,
    group: int = 32,
    keep: Sequence[str] = KEPT,
    eight_bits: Sequence[str] = EIGHT_BITS,
) -> QuantizationPlan:
    """Choose the weights of a model to quantize, in memory or unread.

    Raises:
        TypeError, ValueError, UnsupportedError: as ``quantize``.
    """
    for what, names in (("keep", keep), ("eight_bits", eight_bits)):
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise TypeError(f"{what} must be a list of patterns of names, got {names!r}")
    _refuse_with_scales(model)
    group = _BLOCKS.get(weights, group)
    stored = _Stored(WEIGHTS[weights], group, tuple(keep), tuple(eight_bits))
    modules = list(_chosen(model, stored))
    shapes = [
        shape
        for name, module in modules
        for weight in _weights_of(module)
        for shape in stored.shapes(name, weight)
    ]
    return QuantizationPlan(modules=modules, shapes=shapes, group=group)


def quantize_unread(
    model: HybridModel,
    plan: QuantizationPlan,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    label: str = "loading",
) -> None:
    """Quantize the unread weights of a plan on ``device``; all others stay unread."""

    def read(weight: Tensor, first: int, count: int) -> Tensor:
        return read_rows(weight, first, count, checkpoint, device)

    _make_integers(model, plan, device, read, label=f"{label} to integers")


def check_weights(weights: str, group: int, *, others: tuple[str, ...] = ("auto",)) -> None:
    """Raise ValueError unless ``weights`` and ``group`` are known; ``others`` are known too."""
    if weights not in (*others, *WEIGHTS):
        raise ValueError(f"weights must be one of {[*others, *WEIGHTS]}, got {weights!r}")
    if group not in GROUPS:
        raise ValueError(f"group must be 32, 64 or 128, got {group!r}")


def _refuse_with_scales(model: nn.Module) -> None:
    """Raise UnsupportedError where weights are quantized already."""
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            if weight.dtype in WITH_SCALES:
                raise UnsupportedError(f"{name}.{key} is quantized already, to {weight.dtype}")


@dataclass(frozen=True, slots=True)
class _Stored:
    """The format in which each weight is to be stored, by the name of its module."""

    dtype: torch.dtype
    group: int
    keep: tuple[str, ...]
    eight_bits: tuple[str, ...]

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Choose the dtype of a module's numbers; None where it is not quantized."""
        if any(fnmatchcase(name, pattern) for pattern in self.keep):
            return None
        is_larger = any(fnmatchcase(name, pattern) for pattern in self.eight_bits)
        return INT8 if is_larger else self.dtype

    def shapes(self, name: str, weight: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Calculate the shapes and dtypes of a weight's numbers and of its scales."""
        *rows, depth = weight.shape
        dtype = self.dtype_of(name)
        if dtype == INT8:
            return [((*rows, depth), INT8), ((*rows,), torch.float32)]
        assert dtype is not None
        is_fp4 = dtype == FP4
        unit, instead = (MXFP4, "") if is_fp4 else (self.group, "choose another group, or ")
        if depth % unit:
            raise ValueError(
                f"{name} has rows of {depth} numbers, which groups of {unit} do not divide: "
                f"{instead}name it in keep or eight_bits"
            )
        return [
            ((*rows, stored_depth(depth, dtype)), dtype),
            (
                (*rows, num_scales(depth, self.group, dtype)),
                torch.uint8 if is_fp4 else torch.float32,
            ),
        ]


def _make_integers(
    model: nn.Module,
    plan: QuantizationPlan,
    device: torch.device,
    read: ReadRows,
    *,
    label: str = "to integers",
) -> None:
    memory = iter(weight_memory(plan.shapes, device))
    parents = _parents_of(model)
    todo = list(plan.modules)
    plan.modules.clear()  # so that each old weight is freed once it is quantized
    with progress_bar(sum(w.nbytes for _, m in todo for w in _weights_of(m)), label) as bar:
        while todo:
            _, module = todo.pop(0)
            pairs = []
            for weight in _weights_of(module):
                pairs.append((next(memory), next(memory)))
                _fill(*pairs[-1], weight, plan.group, read, bar)
            _replace(module, pairs, parents)


def _replace(
    module: nn.Module,
    pairs: Sequence[tuple[Tensor, Tensor]],
    parents: dict[nn.Module, list[tuple[nn.Module, str]]],
) -> None:
    """Put numbers and scales in the place of a module's weights."""
    if isinstance(module, FusedExperts):
        (gate_up, gate_up_scales), (down, down_scales) = pairs
        held = (gate_up, down, gate_up_scales, down_scales)
        module.hold_scales(
            *(nn.Parameter(tensor, requires_grad=False) for tensor in held),
            dtype=module.dtype,
        )
        return
    made = _made(module, *pairs[0])
    for parent, name in parents.pop(module):
        setattr(parent, name, made)


def _chosen(model: nn.Module, stored: _Stored) -> Iterator[tuple[str, nn.Module]]:
    """Find the modules whose weights are to be quantized, with their names."""
    taken_apart = read_by_weight(model)
    for path, module in model.named_modules():
        name = path.removesuffix(".part")  # the rank's part of the vocabulary
        is_taken = type(module) in (nn.Linear, SummedLinear, nn.Embedding, FusedExperts)
        if is_taken and stored.dtype_of(name) is not None and module not in taken_apart:
            yield name, module


def _weights_of(module: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(module, FusedExperts):
        return module.gate_up_proj.detach(), module.down_proj.detach()
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.detach(),)


def _parents_of(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, name))
    return parents


def _fill(
    numbers: Tensor, scales: Tensor, weight: Tensor, group: int, read: ReadRows, bar: Any
) -> None:
    row_bytes = max(1, weight.nbytes // max(1, len(weight)))
    count = max(1, _STRETCH_BYTES // row_bytes)
    for first in range(0, len(weight), count):
        rows = read(weight, first, count)
        if numbers.dtype == INT8:
            found = in_8_bits(rows)
        else:
            found = (in_fp4 if numbers.dtype == FP4 else in_4_bits)(rows, group)
        numbers[first:][:count], scales[first:][:count] = found
        bar.update(rows.nbytes)


def _made(module: nn.Module, numbers: Tensor, scales: Tensor) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return IntegerEmbedding(numbers, scales, dtype=module.weight.dtype)
    assert isinstance(module, nn.Linear)
    made = ScaledLinear(numbers, scales, module.bias, dtype=module.weight.dtype)
    return SumOverRanks(made, module.ranks) if isinstance(module, SummedLinear) else made
