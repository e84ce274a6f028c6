"""Pools: shapes and dtypes of the tensors that a layer keeps between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.open_chunk import ChunkLayout

SCALES = "scales"  # pool of the dequantization scales of an FP8 cache
# Pools of the inputs of drafts, which accepted drafts are replayed from (``ops.verify``): of a
# layer's only op or its convolution, and of the recurrence after a convolution.
RECORDS, STATE_RECORDS = "records", "state_records"
OPEN_CHUNK = "chunk"  # pool of the tokens since a state was stored (``ops/open_chunk``)


@dataclass(frozen=True, slots=True)
class Pool:
    """One tensor that a layer keeps between steps.

    Attributes:
        shape: shape of one entry.
        per: owner of an entry: a sequence ("slot"; "open" where decode keeps chunks open, else no
            tensor), a token in a page ("page"), a draft of a sequence ("draft"; no tensor without
            drafts), or the layer ("layer").
        dtype: dtype; None is the model's.
        planes: size of a leading dimension; 0 is none.
        fill: initial value.
        tokens: number of tokens of a page that share one entry.
    """

    shape: tuple[int, ...]
    per: Literal["slot", "open", "page", "draft", "layer"]
    dtype: torch.dtype | None = None
    planes: int = 0
    fill: float = 0.0
    tokens: int = 1

    def nbytes(self, model_dtype: torch.dtype) -> int:
        """Count the bytes of a sequence, a token (rounded up), a draft or the layer."""
        numbers = math.prod(self.shape) * max(self.planes, 1)
        return -(-numbers * (self.dtype or model_dtype).itemsize // self.tokens)


def scales_of(kv_dtype: torch.dtype | None, shape: tuple[int, ...]) -> dict[str, Pool]:
    """Declare the dequantization scales of an FP8 cache, initially 1; none for other dtypes."""
    if kv_dtype != fp8_kv.DTYPE:
        return {}
    return {SCALES: Pool(shape, per="layer", dtype=torch.float32, fill=1.0)}


def conv_and_state(width: int, channels: int, state_shape: tuple[int, ...]) -> dict[str, Pool]:
    """Declare a convolution's last inputs, oldest first, and a recurrent state."""
    conv = Pool((width - 1, channels), per="slot")
    return {"conv": conv, "state": Pool(state_shape, per="slot", dtype=torch.float32)}


def open_chunk(
    layout: ChunkLayout, num_k_heads: int, state_shape: tuple[int, ...]
) -> dict[str, Pool]:
    """Declare the records of an open chunk."""
    size = layout.size(num_k_heads, state_shape)
    return {OPEN_CHUNK: Pool((size,), per="open", dtype=torch.float32)}


def records_of(convolved: int, width: int) -> dict[str, Pool]:
    """Declare the inputs of drafts: of a convolution, and of the recurrence after it."""
    widths = {RECORDS: convolved, STATE_RECORDS: width}
    return {name: Pool((width,), per="draft") for name, width in widths.items()}
