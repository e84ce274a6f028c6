"""What a layer keeps between steps, as a fact: the shape and dtype of each tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from torch_hybrid.ops.formats import fp8_kv

SCALES = "scales"  # by this name, what numbers of 8 bits in a layer's other pool are worth
TOKEN_SHIFT = 2  # taps of a convolution that has of each token the one before it
# By these names, the inputs of tokens that are not certain (``ops.verify``): of a layer's op or of
# its convolution, and of what comes after that.
RECORDS, STATE_RECORDS = "records", "state_records"


@dataclass(frozen=True, slots=True)
class Pool:
    """One tensor that a layer keeps between steps.

    ``shape`` is what a sequence has in it (``per="slot"``), or a token (``per="page"``, of
    ``page_size`` tokens each), or each draft of a sequence (``per="draft"``; there is no such
    tensor where nothing is drafted), or all of them together (``per="layer"``). With ``tokens``, so
    many tokens of a page share one. ``planes`` of them stand one after the other in one tensor;
    with 0, it has no such dimension. ``dtype`` None is the model's. ``fill`` is what a new one
    holds.
    """

    shape: tuple[int, ...]
    per: Literal["slot", "page", "draft", "layer"]
    dtype: torch.dtype | None = None
    planes: int = 0
    fill: float = 0.0
    tokens: int = 1

    def nbytes(self, model_dtype: torch.dtype) -> int:
        """Bytes that a sequence, a token (rounded up), a draft or the layer takes."""
        numbers = math.prod(self.shape) * max(self.planes, 1)
        return -(-numbers * (self.dtype or model_dtype).itemsize // self.tokens)


def scales_of(kv_dtype: torch.dtype | None, shape: tuple[int, ...]) -> dict[str, Pool]:
    """What numbers of 8 bits are worth, 1 until it is set; nothing for other dtypes."""
    if kv_dtype != fp8_kv.DTYPE:
        return {}
    return {SCALES: Pool(shape, per="layer", dtype=torch.float32, fill=1.0)}


def conv_and_state(width: int, channels: int, state_shape: tuple[int, ...]) -> dict[str, Pool]:
    """The last inputs of a convolution, oldest first, and a recurrent state."""
    conv = Pool((width - 1, channels), per="slot")
    return {"conv": conv, "state": Pool(state_shape, per="slot", dtype=torch.float32)}


def records_of(convolved: int, width: int) -> dict[str, Pool]:
    """Of drafts: inputs of a convolution, and those of what comes after it."""
    widths = {RECORDS: convolved, STATE_RECORDS: width}
    return {name: Pool((width,), per="draft") for name, width in widths.items()}
